"""Small random checkpoints in FP8, as the libraries that quantize models write them."""

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import Family, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from bullet_graph.kernels.fp8 import FP8, dequantize_weight, quantize_weight, saturated
from bullet_graph.kernels.ops import Linear

SIZES = {"hidden_size": 256, "intermediate_size": 384}
"""Of a model whose q, k, v, gate and up are whole blocks."""

_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def compressed(**weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors."""
    described = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": described, "input_activations": _ACTIVATIONS}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8 block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        *("block", "weight_scale_inv"),
    ),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "weight_scale"),
    "fp8 tensor inv": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        *("tensor", "weight_scale_inv"),
    ),
    "compressed tensor": (compressed(strategy="tensor"), "tensor", "weight_scale"),
    "compressed channel": (compressed(strategy="channel"), "channel", "weight_scale"),
    "compressed block": (compressed(strategy="block", block_structure=[128, 128]), "block", "weight_scale"),
}
"""``quantization_config``, granularity and name of scales, by form."""


def write_fp8_checkpoint(
    folder: Path, form: str, family: Family = "llama", *, plain: tuple[str, ...] = (), **changes: Any
) -> dict[str, Tensor]:
    """Write a checkpoint and return its weights, dequantized, by name; ``plain`` modules are not quantized."""
    write_checkpoint(folder, family, tokenizer=False, **{**SIZES, **changes})
    config, granularity, scale_name = FORMS[form]
    stored, dequantized = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        dequantized[name] = stored[name] = tensor
        module = name.removesuffix(".weight")
        if (
            not module.endswith(("_proj", ".w1", ".w2", ".w3"))
            or module.endswith(plain or ("nothing",))
            or name.endswith(".bias")
        ):
            continue
        values, scale = _quantized(tensor, granularity)
        dequantized[name] = dequantize_weight(values, scale.expand(len(values), 1) if scale.dim() < 2 else scale)
        stored |= {name: values, f"{module}.{scale_name}": scale}
        if config.get("activation_scheme") == "static":
            stored[f"{module}.input_scale"] = torch.tensor(0.5)
    save_file(stored, folder / "model.safetensors")
    change_config(folder, quantization_config=config)
    return dequantized


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def quantized_experts(weights: Tensor, blocks: bool | None) -> Linear:
    """Projections of experts, [num_experts, out_features, in_features]; ``blocks`` None: not quantized."""
    if blocks is None:
        return Linear(weights)
    values, scales = zip(*(quantize_weight(weight, blocks=blocks) for weight in weights), strict=True)
    return Linear(torch.stack(values), None, torch.stack(scales), 128 if blocks else weights.shape[-1])


def dequantized(linear: Linear) -> Tensor:
    """Weights of a projection, or of the experts' projections, in float32 if they are in FP8."""
    if linear.scale is None:
        return linear.weight
    if linear.weight.dim() == 2:
        return dequantize_weight(linear.weight, linear.scale)
    return torch.stack([dequantize_weight(*each) for each in zip(linear.weight, linear.scale, strict=True)])


def _quantized(weight: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    if granularity == "tensor":
        scale = weight.abs().amax() / 448
        return saturated(weight / scale), scale
    values, scale = quantize_weight(weight, blocks=granularity == "block")
    assert values.dtype is FP8
    return values, scale
