"""Resolves a configuration against the machine, and refuses what the machine cannot run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bullet_graph.config import DeviceName, EngineConfig
from bullet_graph.errors import ConfigError, DeviceError, ModelError, SamplingParamsError, UnsupportedModelError
from bullet_graph.hardware import GENERIC, GpuSpec, gpu_spec
from bullet_graph.models.config import GPU_HEAD_DIMS, ModelConfig, with_padded_heads, without_wide_windows
from bullet_graph.models.json_files import read_json_object
from bullet_graph.models.presets import PRESETS_OF_BYTES, resolve_model
from bullet_graph.models.quantization import in_formats
from bullet_graph.models.tokenizer import Tokenizer, byte_tokenizer
from bullet_graph.models.weights import torch_dtype
from bullet_graph.perf.roofline import expert_projections, in_fp8, layer_projections
from bullet_graph.sampling_params import SamplingParams

FLASHINFER_RELEASE = "0.6.12"
"""The release whose compiled modules ``kernels.flashinfer_attention`` calls; pyproject.toml pins the same."""

_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Keys of generation_config.json that are read, as vLLM reads them; the last is ``max_tokens`` here."""

_LEAST_FP8_CAPABILITY = (8, 9)
_FP8_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Runtime:
    """A model on a device, with its index where it is a GPU: the resolved part of a configuration.

    ``name``, ``folder`` and ``hub_id`` are those of :class:`~bullet_graph.models.presets.FoundModel`.
    """

    model: ModelConfig
    name: str
    folder: Path | None
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    hub_id: str | None = None

    @property
    def gpu(self) -> GpuSpec:
        """Facts about the GPU; on the CPU those of a generic one."""
        if self.device.type == "cpu":
            return GENERIC
        properties = torch.cuda.get_device_properties(self.device)
        return gpu_spec(properties.name, properties.multi_processor_count)

    @property
    def dtype_name(self) -> str:
        """Such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")


def resolve(config: EngineConfig) -> Runtime:
    """Find model and device, and choose the dtype and length limit that the configuration leaves open.

    Raises ModelError, DeviceError where a GPU was asked for and there is none, or ConfigError.
    """
    found = resolve_model(config.model, config.revision)
    model = in_formats(found.config, quantization=config.quantization, kv_cache_dtype=config.kv_cache_dtype)
    if config.load_format == "safetensors" and found.folder is None:
        raise ConfigError(
            f"load_format=safetensors needs a model folder, but {config.model!r} is a preset of shapes only: "
            "use load_format=dummy, or give a folder"
        )
    if config.zipf_exponent is not None:
        if not model.num_experts or (found.folder is not None and config.load_format != "dummy"):
            what = f"{config.model!r} has none" if not model.num_experts else "its weights are read from files"
            raise ConfigError(
                f"router_skew={config.router_skew} is for random weights of a model of experts, but {what}: leave it "
                "out, or use a model of experts such as qwen3-30b-a3b with load_format=dummy"
            )
        model = replace(model, router_bias=True)
    device = find_device(config.device)
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
            f"max_model_len={config.max_model_len} exceeds the model's own limit of {limit} positions: give no more"
        )
    length = config.max_model_len or limit
    model = without_wide_windows(model, length)
    if device.type == "cuda":
        model = with_padded_heads(model, GPU_HEAD_DIMS)
    return Runtime(model, found.name, found.folder, device, dtype, length, found.hub_id)


def load_tokenizer(runtime: Runtime) -> Tokenizer | None:
    """The tokenizer of the model's folder or preset; None where it has none. Raises ModelError for unusable files."""
    if runtime.folder is not None:
        return Tokenizer.from_folder(runtime.folder)
    return byte_tokenizer(runtime.model.vocab_size) if runtime.name in PRESETS_OF_BYTES else None


def with_own_end(runtime: Runtime, tokenizer: Tokenizer | None) -> ModelConfig:
    """The model, which its tokenizer's end-of-sequence token ends too: tuned chat models may name theirs only there."""
    model = runtime.model
    end = None if tokenizer is None or runtime.folder is None else tokenizer.eos_token_id
    if end is None or end in model.eos_token_ids or end >= model.vocab_size:
        return model
    return replace(model, eos_token_ids=(*model.eos_token_ids, end))


def default_sampling_params(config: EngineConfig, runtime: Runtime) -> Mapping[str, Any]:
    """Fields of SamplingParams that the model's ``generation_config.json`` gives, unless that is off.

    Raises ModelError where that file holds a value that no request may have.
    """
    if config.generation_config == "none" or runtime.folder is None:
        return {}
    path = runtime.folder / "generation_config.json"
    if not path.exists():
        return {}
    file = read_json_object(path)
    given = {name: file.get(name) for name in _GENERATION_CONFIG if file.get(name) is not None}
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    try:
        SamplingParams(**given)
    except SamplingParamsError as error:
        raise ModelError(f"{path}: {error}; correct the file, or pass generation_config=none") from error
    return given


def find_device(name: DeviceName) -> torch.device:
    """The device that an engine takes; DeviceError where a GPU is asked for and there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError(
            f"device=cuda was asked for, but torch {torch.__version__} sees no CUDA device: "
            "check `nvidia-smi` and that torch is a CUDA build, or pass device=cpu"
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    # Asking for the current device would make a context; before there is one, it is the first GPU.
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def check_fork(config: EngineConfig, runtime: Runtime) -> None:
    """Refuse to start in a fork of a process that may have used the device, where it would hang; DeviceError."""
    if runtime.device.type == "cuda" and not torch.cuda._is_in_bad_fork():
        return
    if runtime.device.type == "cpu" and (config.cpu_threads or torch.get_num_threads()) == 1:
        return
    raise DeviceError(
        "an engine can hang in a fork of a process that has used torch: start processes with the method spawn"
        + (", or pass cpu_threads=1" if runtime.device.type == "cpu" else "")
    )


def check_device(config: EngineConfig, runtime: Runtime) -> None:
    """Refuse a configuration that the device, its libraries or its kernels cannot run.

    Raises ConfigError, DeviceError (a library is missing) or UnsupportedModelError (no kernels for the model).
    """
    if runtime.device.type == "cpu":
        is_partitioned = config.decode_sms or config.partition_backend not in ("auto", "none")
        if is_partitioned or config.policy.name == "split":
            raise ConfigError(
                "SM partitions need a GPU, but the device is the CPU: leave out decode_sms, partition_backend and "
                "the policy split"
            )
        if config.capture_plan is not None:
            raise ConfigError("capture_plan is for CUDA graphs, but the device is the CPU: leave out capture_plan")
        if config.capture_cache is not None and not config.compile:
            raise ConfigError(
                "capture_cache keeps what is compiled, and on the CPU nothing is: pass compile=True, or leave it out"
            )
        return
    if config.compile or config.cpu_threads is not None:
        raise ConfigError(
            "compile=True and cpu_threads are for the CPU, and the device is a GPU, whose captured decode steps always "
            "are compiled: leave them out"
        )
    _require_cuda_libraries()
    _require_fp8(runtime)
    if runtime.model.head_dim not in GPU_HEAD_DIMS:
        raise UnsupportedModelError(
            f"the GPU's attention kernels need heads of {', '.join(map(str, GPU_HEAD_DIMS))}, the model's have "
            f"{runtime.model.head_dim}. Smaller heads are padded, except where queries and keys are normalized: pass "
            "device=cpu"
        )


def _require_fp8(runtime: Runtime) -> None:
    model = runtime.model
    if model.fp8 is None and not model.fp8_kv:
        return
    capability = torch.cuda.get_device_capability(runtime.device)
    if capability < _LEAST_FP8_CAPABILITY:
        raise DeviceError(
            f"FP8 needs a GPU of compute capability {_shown(_LEAST_FP8_CAPABILITY)} or above, found "
            f"{_shown(capability)}: leave out quantization and kv_cache_dtype, or take a 16-bit checkpoint"
        )
    if model.fp8 is not None and runtime.dtype is not torch.bfloat16:
        raise ConfigError(f"FP8 weights need dtype=bfloat16 on a GPU, found {runtime.dtype_name}: pass that")
    both = layer_projections(model), expert_projections(model)
    sizes = {size for projections in both for matrix in in_fp8(model, projections) for size in matrix}
    if any(size % _FP8_ALIGNMENT for size in sizes):
        raise UnsupportedModelError(
            f"the GPU's FP8 products need sizes that are multiples of {_FP8_ALIGNMENT}, the model has "
            f"{', '.join(map(str, sorted(sizes)))}: take 16-bit weights, or pass device=cpu"
        )


def _shown(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _require_cuda_libraries() -> None:
    missing = [name for name in ("triton", "flashinfer", "tvm_ffi") if find_spec(name) is None]
    if missing:
        raise DeviceError(
            f"the GPU path needs {' and '.join(missing)}, not installed here: "
            "pip install 'bullet-graph[cuda]', or pass device=cpu"
        )
    if (found := version("flashinfer-python")) != FLASHINFER_RELEASE:
        raise DeviceError(
            f"the GPU path needs flashinfer-python {FLASHINFER_RELEASE}, found {found}: "
            f"pip install flashinfer-python=={FLASHINFER_RELEASE}"
        )
