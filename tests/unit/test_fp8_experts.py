"""Experts in FP8: kernels against the reference, checkpoints against what they hold, and their bytes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import Family, write_checkpoint
from decoders import read_weights
from fp8_checkpoints import FORMS, change_config, write_fp8_checkpoint
from interpreted_fp8 import rounding

from bullet_graph.errors import CheckpointError, UnsupportedModelError
from bullet_graph.hardware import H200
from bullet_graph.kernels.fp8 import FP8, dequantize_weight, quantize_weight
from bullet_graph.kernels.ops import Experts, Linear, TorchOps
from bullet_graph.models.layers import Mixture
from bullet_graph.models.presets import PRESETS, load_model_config
from bullet_graph.models.quantization import in_formats
from bullet_graph.models.weights import ModelWeights, checkpoint_views
from bullet_graph.perf.roofline import Fp8Weights, Roofline, decode_weight_bytes, touched_experts

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels.triton_moe import experts_output
from bullet_graph.kernels.triton_ops import TritonOps

__all__ = ["rounding"]

BLOCKS = "fp8 block"
SIZES = {"moe_intermediate_size": 128}
SHARED = SIZES | {"shared_expert_intermediate_size": 256}

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")


# ---- kernels ----


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-1] ** -0.5


def stacked(count: int, rows: int, columns: int, blocks: bool | None) -> Linear:
    """Projections of experts; ``blocks`` None: not quantized."""
    weights = normal(count, rows, columns)
    if blocks is None:
        return Linear(weights)
    values, scales = zip(*(quantize_weight(weight, blocks=blocks) for weight in weights), strict=True)
    return Linear(torch.stack(values), None, torch.stack(scales), 128 if blocks else columns)


def dequantized(experts: Experts) -> Experts:
    def plain(linear: Linear) -> Linear:
        if linear.scale is None:
            return linear
        return Linear(torch.stack([dequantize_weight(*each) for each in zip(linear.weight, linear.scale, strict=True)]))

    return experts._replace(gate_up=plain(experts.gate_up), down=plain(experts.down))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@on_cpu
@pytest.mark.usefixtures("rounding")
# Rows: one; fewer than a block; several blocks of an expert.
@pytest.mark.parametrize(
    ("first", "last", "hidden", "rows"),
    [(False, False, 72, 5), (True, True, 200, 37), (True, True, 128, 1), (True, None, 200, 5), (None, False, 72, 1)],
)
def test_kernels_equal_the_reference(first: bool | None, last: bool | None, hidden: int, rows: int) -> None:
    count, size, top_k = 6, 128, 3
    x, router = 3 * normal(rows, hidden), Linear(normal(count, hidden) * 5)
    fused, down = stacked(count, 2 * size, hidden, first), stacked(count, hidden, size, last)
    experts = Experts(router, fused, down, top_k, renormalize=True)
    expected = TorchOps().experts(x, experts)
    # What is rounded are rows and what goes into the second product.
    assert 1e-3 < error(expected, TorchOps().experts(x, dequantized(experts))) < 0.06
    tiling = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 2, "STAGES": 2, "num_warps": 4}
    small = experts_output(x, TorchOps().linear(x, router), experts, tilings=((float("inf"), tiling, tiling),))
    # A number on the border may be rounded to either neighbour.
    assert error(small, expected) < 4e-3
    assert error(TritonOps().experts(x, experts), expected) < 4e-3


# ---- checkpoints ----


def held(weights: ModelWeights, block: str, names: tuple[str, str, str]) -> dict[str, torch.Tensor]:
    """All experts' weights in float32, by the checkpoint's names."""
    found = {}
    for index, layer in enumerate(weights.layers):
        mixture, prefix = layer.mlp, f"model.layers.{index}"
        assert isinstance(mixture, Mixture)
        assert mixture.experts.router.scale is None
        plain = dequantized(mixture.experts)
        assert mixture.experts.gate_up.weight.dtype == mixture.experts.down.weight.dtype == FP8
        parts = [
            (f"{prefix}.{block}.experts.{i}", *both)
            for i, both in enumerate(zip(plain.gate_up.weight, plain.down.weight, strict=True))
        ]
        if mixture.shared is not None:
            shared = [dequantize_weight(*linear[::2][:2]) for linear in (mixture.shared.gate_up, mixture.shared.down)]
            parts.append((f"{prefix}.mlp.shared_expert", *shared))
        for name, gate_up, down in parts:
            for part, tensor in zip(names, (*gate_up.chunk(2), down), strict=True):
                found[f"{name}.{part}.weight"] = tensor
    return found


@pytest.mark.parametrize("form", [BLOCKS, "fp8 tensor", "compressed channel"])
@pytest.mark.parametrize(
    ("family", "sizes", "block", "names"),
    [
        ("qwen3_moe", SIZES, "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("qwen2_moe", SHARED, "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", {}, "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_experts_are_held_as_they_are_stored(
    tmp_path: Path, form: str, family: Family, sizes: dict[str, int], block: str, names: tuple[str, str, str]
) -> None:
    if form == BLOCKS:
        sizes = {**sizes, "num_attention_heads": 2, "head_dim": 128}
    expected = write_fp8_checkpoint(tmp_path, form, family, **sizes)
    routers = ["re:.*mlp.gate$", "re:.*shared_expert_gate", "lm_head", "model.layers.0.block_sparse_moe.gate"]
    key = "ignore" if form.startswith("compressed") else "modules_to_not_convert"
    change_config(tmp_path, quantization_config=FORMS[form][0] | {key: routers})
    weights = read_weights(tmp_path)
    found = held(weights, block, names)
    assert len(found) == sum(".experts." in name or "shared_expert." in name for name in expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=0)
    views = dict(checkpoint_views(load_model_config(tmp_path), weights))
    for name in (f"model.layers.1.{block}.gate.weight", "lm_head.weight"):
        assert torch.equal(views[name], expected[name])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_are_quantized_while_they_are_loaded(tmp_path: Path, family: Family) -> None:
    write_checkpoint(tmp_path, family, tokenizer=False)
    config = load_model_config(tmp_path)
    plain = read_weights(tmp_path)
    weights = read_weights(tmp_path, in_formats(config, quantization="fp8", kv_cache_dtype="auto"))
    for layer, expected in zip(weights.layers, plain.layers, strict=True):
        found, own = layer.mlp.experts, expected.mlp.experts
        assert torch.equal(found.router.weight, own.router.weight)
        for linear, wanted in ((found.gate_up, own.gate_up), (found.down, own.down)):
            for index, weight in enumerate(wanted.weight):
                values, scale = quantize_weight(weight, blocks=False)
                assert torch.equal(linear.weight[index].float(), values.float())
                assert torch.equal(linear.scale[index], scale)


def test_what_is_refused(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "fp8 tensor", "qwen3_moe", **SIZES)
    some = {"modules_to_not_convert": ["model.layers.0.mlp.experts.3"]}
    change_config(tmp_path, quantization_config=FORMS["fp8 tensor"][0] | some)
    with pytest.raises(UnsupportedModelError, match="alike in all layers"):
        load_model_config(tmp_path)
    change_config(tmp_path, quantization_config=FORMS[BLOCKS][0], moe_intermediate_size=96)
    with pytest.raises(UnsupportedModelError, match=r"multiples of 128 .* intermediate_size 96"):
        read_weights(tmp_path)
    change_config(tmp_path, quantization_config=FORMS["fp8 tensor"][0], num_experts=7, moe_intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"experts\.6\.gate_proj"):
        read_weights(tmp_path)


# ---- bytes and times ----


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_step_reads_the_scales_and_bytes_of_touched_experts(name: str) -> None:
    plain, fp8 = PRESETS[name], PRESETS[f"{name}-fp8"]
    assert fp8 == replace(plain, fp8=Fp8Weights())
    hidden, size = plain.hidden_size, plain.expert_intermediate_size
    qkv = plain.q_size + 2 * plain.kv_size
    of_rows = qkv * hidden + hidden * plain.q_size - 4 * (qkv + hidden)
    of_expert = 3 * hidden * size - 4 * (2 * size + hidden)
    for rows in (1, 8, 4096):
        steps = [decode_weight_bytes(model, batch_size=rows, dtype_bytes=2) for model in (plain, fp8)]
        saved = plain.num_layers * (of_rows + touched_experts(plain, rows) * of_expert)
        assert steps[0] - steps[1] == pytest.approx(saved, rel=1e-9)
    assert plain.weight_bytes(2) - fp8.weight_bytes(2) == plain.num_layers * (of_rows + plain.num_experts * of_expert)
    rooflines = [Roofline(H200, model) for model in (plain, fp8)]
    overhead_ms = plain.num_layers * H200.layer_overhead_ms
    decode, prefill = (
        [f(r) - overhead_ms for r in rooflines]
        for f in (lambda r: r.decode(64, 64).ms, lambda r: r.prefill(16384, 1.0).ms)
    )
    assert 0.5 < decode[1] / decode[0] < 0.6
    assert 0.5 < prefill[1] / prefill[0] < 0.62
