"""A model folder for peers: a preset's shape, and this engine's dummy weights where a peer's own would distort.

Peers fill a model with weights below 0.001. FP8 leaves zeros of those, and under a power cap products of zeros are
faster: of an FP8 preset, SGLang reads this engine's dummies as a checkpoint.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.peers.systems import Setup
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.rope import Llama3RopeScaling
from bullet_graph.models.weights import checkpoint_views, fill_dummy, zero_weights
from bullet_graph.perf.roofline import FP8_BLOCK, Fp8Weights

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"} | {
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

_WEIGHTS = "model.safetensors"


def prepare_model(setup: Setup, folder: Path, *, writes_fp8: bool) -> dict[str, str]:
    """The model for a peer and ``load_format``, dummy or auto; writes a preset's folder.

    ``writes_fp8``: with the weights of an FP8 one, because the peer's own would distort.
    """
    found = resolve_model(setup.model)
    is_dummy = setup.load_format == "dummy" or (setup.load_format == "auto" and found.folder is None)
    if found.folder is None:
        write_model_folder(folder, found.config)
        if is_dummy and writes_fp8 and found.config.fp8 is not None:
            write_weights(folder, found.config, setup.seed)
            is_dummy = False
    return {"model": str(found.hub_id or found.folder or folder), "load_format": "dummy" if is_dummy else "auto"}


def remove_weights(folder: Path) -> None:
    """Remove the weights that :func:`prepare_model` may have written."""
    (folder / _WEIGHTS).unlink(missing_ok=True)


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """The JSON that ``load_model_config`` reads back as ``model``, with the names of transformers 5."""
    rope: dict[str, Any] = {"rope_theta": model.rope.theta, "rope_type": "default"}
    if isinstance(model.rope.scaling, Llama3RopeScaling):
        rope |= {"rope_type": "llama3"} | dataclasses.asdict(model.rope.scaling)
    others: dict[str, Any] = {} if model.fp8 is None else {"quantization_config": quantization_config(model.fp8)}
    if model.num_experts:
        others |= dict.fromkeys(("num_experts", "num_local_experts"), model.num_experts) | {
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_intermediate_size,
            "norm_topk_prob": model.renormalize_experts,
        }
    return others | {
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


def quantization_config(fp8: Fp8Weights) -> dict[str, Any]:
    """As compressed-tensors writes it: scales of channels and tokens, or of blocks and groups of 128 columns."""
    blocks = {"strategy": "block", "block_structure": [FP8_BLOCK] * 2} if fp8.blocks else {"strategy": "channel"}
    groups = {"strategy": "group", "group_size": FP8_BLOCK} if fp8.blocks else {"strategy": "token"}
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | blocks,
        "input_activations": number | groups | {"dynamic": True},
    }
    told = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return told | {"ignore": ["lm_head", "re:.*gate$"]}


def write_model_folder(folder: Path, model: ModelConfig) -> Path:
    """Write a model folder that has a shape and no weights, and return it; one that is there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(model), indent=2) + "\n", encoding="utf-8")
    return folder


def write_weights(folder: Path, model: ModelConfig, seed: int, device: str = "cuda") -> None:
    """Write this engine's dummy weights as a checkpoint."""
    weights = zero_weights(model, dtype=getattr(torch, model.dtype), device=torch.device(device))
    list(fill_dummy(model, weights, seed=seed))
    save_file(dict(checkpoint_views(model, weights)), folder / _WEIGHTS)
    del weights
    torch.cuda.empty_cache()
