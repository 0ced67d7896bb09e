"""A preset's ``config.json``, for systems that read a model's shape from a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from bullet_graph.models.config import ModelConfig

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """The JSON that ``load_model_config`` reads back as ``model``, with the names of transformers 5."""
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_type": "default"}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return {
        "architectures": [model.architecture],
        "model_type": _MODEL_TYPES[model.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "dtype": model.dtype,
        "eos_token_id": list(model.eos_token_ids) or None,
    }


def write_model_folder(folder: Path, model: ModelConfig) -> Path:
    """Write a model folder that has a shape and no weights, and return it; one that is there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(model), indent=2) + "\n", encoding="utf-8")
    return folder
