"""The model families: the supported architectures, and how each reads its config."""

from collections.abc import Callable, Mapping
from pathlib import Path

from bullet_graph.errors import ModelError, UnsupportedModelError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.families.llama import LLAMA, read_llama
from bullet_graph.models.families.qwen import QWEN2, QWEN3, read_qwen2, read_qwen3
from bullet_graph.models.json_files import JsonObject, read_json_object

_READERS: Mapping[str, Callable[[JsonObject], ModelConfig]] = {
    LLAMA: read_llama,
    QWEN2: read_qwen2,
    QWEN3: read_qwen3,
}
"""Reader of ``config.json``, by Hugging Face's name of the architecture."""


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a Hugging Face model folder.

    Raises:
        UnsupportedModelError: the architecture, or a feature that the file switches on, is not implemented.
        ModelError: no such folder or file, invalid JSON, or a key that is missing, wrong or contradictory.
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
