"""Resolves a configuration against the machine."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError, DeviceError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS_OF_BYTES, resolve_model
from bullet_graph.models.tokenizer import Tokenizer, byte_tokenizer
from bullet_graph.models.weights import torch_dtype


@dataclass(frozen=True, slots=True)
class Runtime:
    """What an engine runs on.

    Attributes:
        model: the model's shape.
        folder: where its files are; None for a preset.
        preset: its name; None for a folder.
        device: where it runs.
        dtype: of weights, activations and cache.
        max_model_len: resolved limit, in tokens.
    """

    model: ModelConfig
    folder: Path | None
    preset: str | None
    device: torch.device
    dtype: torch.dtype
    max_model_len: int


def resolve(config: EngineConfig) -> Runtime:
    """Find model and device, and settle what the configuration leaves open.

    Raises:
        ModelError: the model cannot be found or used.
        DeviceError: a GPU was asked for where there is none.
        ConfigError: settings that contradict the model.
    """
    model, folder = resolve_model(config.model)
    if config.load_format == "safetensors" and folder is None:
        raise ConfigError(
            f"load_format=safetensors needs a model folder, but {config.model!r} is a preset of shapes only: "
            "use load_format=dummy, or give a folder"
        )
    device = _resolve_device(config)
    if config.dtype != "auto":
        dtype = torch_dtype(config.dtype)
    elif device.type == "cpu":
        dtype = torch.float32
    else:
        dtype = torch_dtype("bfloat16" if model.dtype == "float32" else model.dtype)
    if device.type == "cuda" and dtype is torch.float32:
        raise ConfigError("the GPU path computes in bfloat16 or float16, not float32: pass dtype=bfloat16")
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the model's own limit of {limit} positions"
        )
    preset = config.model if folder is None else None
    return Runtime(model, folder, preset, device, dtype, config.max_model_len or limit)


def load_tokenizer(runtime: Runtime) -> Tokenizer | None:
    """The model's tokenizer: the folder's, or that of a preset which has one; None where there is none.

    Raises:
        ModelError: the folder's files cannot be used.
    """
    if runtime.folder is not None:
        return Tokenizer.from_folder(runtime.folder)
    return byte_tokenizer(runtime.model.vocab_size) if runtime.preset in PRESETS_OF_BYTES else None


def _resolve_device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise DeviceError(
            f"device=cuda was asked for, but torch {torch.__version__} sees no CUDA device: "
            "check `nvidia-smi` and that torch is a CUDA build, or pass device=cpu"
        )
    return torch.device("cuda" if config.device != "cpu" and available else "cpu")
