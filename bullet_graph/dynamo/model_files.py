"""The folder that Dynamo's frontend reads: it tokenizes prompts and writes texts by the model's own files."""

import json
import os
from pathlib import Path

from platformdirs import user_cache_path

from bullet_graph.errors import ConfigError, ModelError
from bullet_graph.models.presets import PRESETS_OF_BYTES, resolve_model
from bullet_graph.models.tokenizer import byte_tokenizer


def model_folder(model: str, revision: str | None) -> Path:
    """The model's own folder, or one in the user's cache for a preset with a tokenizer of bytes.

    Dynamo takes workers for the same model only if they name the same folder. Raises ModelError where there is no such
    model, or no tokenizer in it, and ConfigError where the cache cannot be written.
    """
    found = resolve_model(model, revision)
    if found.folder is not None and (found.folder / "tokenizer.json").exists():
        return found.folder.resolve()
    if found.folder is not None or found.name not in PRESETS_OF_BYTES:
        raise ModelError(
            f"Dynamo's frontend needs the model's tokenizer, and {model} has none: give a folder or a hub id with "
            "tokenizer.json"
        )
    tokenizer = byte_tokenizer(found.config.vocab_size)
    assert tokenizer.eos_token_id is not None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False),
        "chat_template": tokenizer.chat_template,
    }
    # What the frontend reads of it. Nobody loads weights from here.
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": found.config.vocab_size,
        "max_position_embeddings": found.config.max_position_embeddings,
        "eos_token_id": [*found.config.eos_token_ids],
    }
    folder = user_cache_path("bullet_graph") / "dynamo" / found.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "tokenizer.json", tokenizer.to_json())
        _write(folder / "tokenizer_config.json", json.dumps(settings))
        _write(folder / "config.json", json.dumps(shape))
    except OSError as error:
        raise ConfigError(f"{folder} must take the tokenizer of {model}, and cannot be written: {error}") from error
    return folder


def _write(path: Path, text: str) -> None:
    """Write a file that other workers may be writing, with the same text, or reading."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
