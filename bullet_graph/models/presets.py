"""Built-in model shapes: with random weights, they run without a file."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from bullet_graph.errors import ModelError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.families import load_model_config
from bullet_graph.models.families.llama import LLAMA_3_1_8B, LLAMA_3_2_1B, TINY
from bullet_graph.models.families.qwen import QWEN3_0_6B, QWEN3_8B

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


def resolve_model(name_or_path: str) -> tuple[ModelConfig, Path | None]:
    """The config and path of a model folder, or a preset's config and None; a folder comes first.

    Raises:
        ModelError: neither a folder nor a preset, or the folder's config.json cannot be used.
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
