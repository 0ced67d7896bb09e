"""The models there are: folders of a supported architecture, on disk or on the hub, and presets with random weights."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bullet_graph.errors import ConfigError, ModelError, UnsupportedModelError, io_errors
from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.families import gemma, llama, qwen
from bullet_graph.models.hub import download, is_hub_id
from bullet_graph.models.json_files import JsonObject, read_json_object
from bullet_graph.perf.roofline import Fp8Weights

_PRESETS = {
    "tiny": llama.TINY,
    "llama-3.2-1b": llama.LLAMA_3_2_1B,
    "llama-3.1-8b": llama.LLAMA_3_1_8B,
    "llama-3.1-70b": llama.LLAMA_3_1_70B,
    "llama-3.1-405b": llama.LLAMA_3_1_405B,
    "qwen3-0.6b": qwen.QWEN3_0_6B,
    "qwen3-8b": qwen.QWEN3_8B,
    "tiny-moe": qwen.TINY_MOE,
    "qwen3-30b-a3b": qwen.QWEN3_30B_A3B,
    "qwen3-235b-a22b": qwen.QWEN3_235B_A22B,
    "mixtral-8x7b": llama.MIXTRAL_8X7B,
}
_NOT_IN_FP8 = ("tiny", "llama-3.2-1b", "tiny-moe")

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    _PRESETS
    | {f"{name}-fp8": replace(_PRESETS[name], fp8=Fp8Weights()) for name in _PRESETS if name not in _NOT_IN_FP8}
)

PRESETS_OF_BYTES = frozenset({"tiny", "tiny-moe"})
"""Presets whose text is read and written byte by byte (``byte_tokenizer``); the others take only token ids."""

_READERS: Mapping[str, Callable[[JsonObject], ModelConfig]] = {
    "Gemma3ForCausalLM": gemma.read_gemma3,
    "GraniteForCausalLM": llama.read_granite,
    "LlamaForCausalLM": read_dense_config,
    "MistralForCausalLM": llama.read_mistral,
    "MixtralForCausalLM": llama.read_mixtral,
    "Olmo2ForCausalLM": llama.read_olmo2,
    "Phi3ForCausalLM": llama.read_phi3,
    "Qwen2ForCausalLM": qwen.read_qwen2,
    "Qwen2MoeForCausalLM": qwen.read_qwen2_moe,
    "Qwen3ForCausalLM": qwen.read_qwen3,
    "Qwen3MoeForCausalLM": qwen.read_qwen3_moe,
    "SmolLM3ForCausalLM": llama.read_smollm3,
}
"""Reader of ``config.json``, by Hugging Face's name of the architecture."""

_TAKE_SAFETENSORS = "give the folder or the hub id of the model's safetensors"


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a Hugging Face model folder.

    Raises UnsupportedModelError for an architecture or feature that is not implemented, else ModelError.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a model folder that holds config.json")
    if any(folder.glob("*.gguf")) and not (folder / "config.json").exists():
        raise ModelError(f"{folder} holds a GGUF file, which is not read, and no config.json: {_TAKE_SAFETENSORS}")
    config = read_json_object(folder / "config.json")
    names = config.get("architectures")
    supported = f"a list naming one of {', '.join(_READERS)}"
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        config.fail("architectures", supported)
    if names[0] not in _READERS:
        config.fail("architectures", supported, UnsupportedModelError)
    return _READERS[names[0]](config)


class FoundModel(NamedTuple):
    """A model's config and where its files are.

    ``name`` is the preset's, the folder's or the hub id's without its owner. ``folder`` is None for a preset, and the
    folder of a commit in the hub's cache for a ``hub_id``.
    """

    config: ModelConfig
    name: str
    folder: Path | None = None
    hub_id: str | None = None


def resolve_model(model: str, revision: str | None = None) -> FoundModel:
    """Find a model by folder, preset or hub id, in this order; of the hub's files it downloads all but the weights.

    Raises ModelError where there is none, or as :func:`load_model_config`; ConfigError for a ``revision`` of no hub id.
    """
    with io_errors(f"the model {model!r} cannot be read", ModelError):
        folder, is_local = Path(model), Path(model).exists() or model in PRESETS
    if revision is not None and (is_local or not is_hub_id(model)):
        raise ConfigError(f"revision={revision} is for a hub id such as Qwen/Qwen3-0.6B, not for {model!r}")
    if folder.is_dir():
        return FoundModel(load_model_config(folder), folder.resolve().name, folder)
    if model in PRESETS:
        return FoundModel(PRESETS[model], model)
    if folder.suffix == ".gguf":
        raise ModelError(f"{model} is a GGUF file, which is not read: {_TAKE_SAFETENSORS}")
    if not is_local and is_hub_id(model):
        folder = download(model, revision)
        return FoundModel(load_model_config(folder), model.partition("/")[2], folder, model)
    if "/" not in model and (near := difflib.get_close_matches(model.lower(), PRESETS, n=1)):
        raise ModelError(f"unknown model {model!r}: there is no such preset; did you mean {near[0]}?")
    raise ModelError(
        f"unknown model {model!r}: expected a folder with config.json, a hub id NAME/MODEL such as Qwen/Qwen3-0.6B, "
        f"or one of the presets {', '.join(PRESETS)}"
    )
