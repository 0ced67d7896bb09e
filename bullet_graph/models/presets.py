"""The models there are: folders of a supported architecture, and presets, which run with random weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from bullet_graph.errors import ModelError, UnsupportedModelError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.families.gemma import GEMMA3, read_gemma3
from bullet_graph.models.families.granite import GRANITE, read_granite
from bullet_graph.models.families.llama import LLAMA, LLAMA_3_1_8B, LLAMA_3_2_1B, TINY, read_llama
from bullet_graph.models.families.mistral import MISTRAL, read_mistral
from bullet_graph.models.families.olmo import OLMO2, read_olmo2
from bullet_graph.models.families.phi import PHI3, read_phi3
from bullet_graph.models.families.qwen import QWEN2, QWEN3, QWEN3_0_6B, QWEN3_8B, read_qwen2, read_qwen3
from bullet_graph.models.families.smollm import SMOLLM3, read_smollm3
from bullet_graph.models.json_files import JsonObject, read_json_object

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": TINY,
        "llama-3.2-1b": LLAMA_3_2_1B,
        "llama-3.1-8b": LLAMA_3_1_8B,
        "qwen3-0.6b": QWEN3_0_6B,
        "qwen3-8b": QWEN3_8B,
    }
)

PRESETS_OF_BYTES = frozenset({"tiny"})
"""Presets whose text is read and written byte by byte (``byte_tokenizer``); the others take only token ids."""

_READERS: Mapping[str, Callable[[JsonObject], ModelConfig]] = {
    GEMMA3: read_gemma3,
    GRANITE: read_granite,
    LLAMA: read_llama,
    MISTRAL: read_mistral,
    OLMO2: read_olmo2,
    PHI3: read_phi3,
    QWEN2: read_qwen2,
    QWEN3: read_qwen3,
    SMOLLM3: read_smollm3,
}
"""Reader of ``config.json``, by Hugging Face's name of the architecture."""


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a Hugging Face model folder.

    Raises UnsupportedModelError for an architecture or feature that is not implemented, else ModelError.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a model folder that holds config.json")
    config = read_json_object(folder / "config.json")
    names = config.get("architectures")
    supported = f"a list naming one of {', '.join(_READERS)}"
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        config.fail("architectures", supported)
    if names[0] not in _READERS:
        config.fail("architectures", supported, UnsupportedModelError)
    return _READERS[names[0]](config)


def resolve_model(name_or_path: str) -> tuple[ModelConfig, Path | None]:
    """The config and path of a model folder, or a preset's config and None; a folder comes first.

    Raises ModelError for neither, or as :func:`load_model_config`.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        return load_model_config(folder), folder
    if name_or_path in PRESETS:
        return PRESETS[name_or_path], None
    raise ModelError(
        f"unknown model {name_or_path!r}: expected a folder with config.json, "
        f"or one of the presets {', '.join(PRESETS)}"
    )
