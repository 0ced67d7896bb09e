"""FP8 in plain torch against arithmetic in float64, and Triton's kernels against plain torch."""

import pytest
import torch
from fp8_checkpoints import dequantized, quantized_experts
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.kernels.fp8 import FP8, FP8_MAX, dequantize_weight, linear_fp8, quantize, quantize_weight, saturated
from bullet_graph.kernels.ops import Experts, Linear, TorchOps

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels import triton_fp8
from bullet_graph.kernels.triton_fp8 import can_gate, matmul_fp8
from bullet_graph.kernels.triton_moe import experts_output
from bullet_graph.kernels.triton_ops import TritonOps

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")

STEP = 2.0**-3
"""Largest distance of neighbours in FP8, as a share of the lower."""


def normal(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized_linear(out_features: int, in_features: int, *, blocks: bool, bias: bool = False) -> Linear:
    weight, scale = quantize_weight(normal(out_features, in_features, seed=5), blocks=blocks)
    return Linear(weight, normal(out_features) if bias else None, scale, 128 if blocks else in_features)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 4),
    width=st.integers(1, 300),
    group=st.sampled_from([None, 128]),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_quantized_rows_err_by_half_a_step(rows: int, width: int, group: int | None, exponent: int, seed: int) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    values, scales, dtype = quantize(x, group or width)
    num_groups = -(-width // (group or width))
    assert (values.dtype, values.shape, scales.shape, dtype) == (FP8, x.shape, (rows, num_groups), torch.float32)
    back = values.float() * scales.repeat_interleave(group or width, 1)[:, :width]
    # Half a step of the number, or of the smallest normal one; the division rounds, too.
    bound = 0.51 * STEP * x.abs() + 2.0**-10 * scales.repeat_interleave(group or width, 1)[:, :width]
    assert ((back - x).abs() <= bound).all()


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (256, 128), (130, 300), (3, 129)])
def test_weights_are_within_half_a_step(shape: tuple[int, int], blocks: bool) -> None:
    weight = normal(*shape) * torch.linspace(0.01, 3, shape[0])[:, None]
    values, scale = quantize_weight(weight, blocks=blocks)
    assert scale.shape == ((-(-shape[0] // 128), -(-shape[1] // 128)) if blocks else (shape[0], 1))
    back = dequantize_weight(values, scale)
    assert ((back - weight).abs() <= 0.51 * STEP * weight.abs() + scale.max() * 2.0**-10).all()
    assert values.float().abs().max() == FP8_MAX


def test_zeros_and_what_is_out_of_range() -> None:
    assert quantize(torch.zeros(2, 5), 5).values.float().eq(0).all()
    assert saturated(torch.tensor([1e9, -500.0, 449.0])).float().tolist() == [448, -448, 448]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 5, 384), (3, 1300, 200), (2, 128, 128)])
def test_the_reference_product_is_that_of_the_rounded_operands(
    rows: int, out_features: int, in_features: int, blocks: bool
) -> None:
    linear = quantized_linear(out_features, in_features, blocks=blocks, bias=True)
    x = quantize(normal(rows, in_features), linear.group or 0)
    assert linear.scale is not None
    assert linear.bias is not None
    spread = x.scales.double().repeat_interleave(linear.group or 0, 1)[:, :in_features]
    operands = x.values.double() * spread, dequantize_weight(linear.weight, linear.scale).double()
    expected = (operands[0] @ operands[1].t() + linear.bias.double()).float()
    found = linear_fp8(x, linear.weight, linear.scale, linear.bias)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    out = torch.empty_like(found)
    assert TorchOps().linear(x, linear, out) is out
    assert torch.equal(out, found)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "group"), [(3, 100, 100), (2, 1024, 1024), (3, 384, 128), (2, 200, 128)])
def test_triton_quantizes_as_the_reference(rows: int, width: int, group: int, dtype: torch.dtype) -> None:
    x, residual, gate_up = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype), normal(rows, 2 * width)
    weight, gate_up = normal(width, dtype=dtype), (3 * gate_up).to(dtype)
    plain, ours = TorchOps(), TritonOps()
    normed, summed = ours.add_rms_norm_quantized(x, residual, weight, 1e-5, group)
    expected_normed, expected_summed = plain.add_rms_norm_quantized(x, residual, weight, 1e-5, group)
    torch.testing.assert_close(summed, expected_summed)
    pairs = [
        (normed, expected_normed),
        (ours.quantize(x, group), plain.quantize(x, group)),
        *(
            (ours.act_and_mul_quantized(gate_up, g, group), plain.act_and_mul_quantized(gate_up, g, group))
            for g in (0, 1)
        ),
    ]
    for found, expected in pairs:
        assert found.dtype == dtype
        # Neighbours where the operand's own rounding differs: Triton's interpreter truncates to bfloat16.
        a, b = found.values.float(), expected.values.float()
        assert ((a - b).abs() <= STEP * torch.maximum(a.abs(), b.abs()) + 2.0**-9).all()
        assert (a != b).float().mean() < 0.1
        rtol = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found.scales, expected.scales, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "bias"),
    [
        *((1, 33, 384, True), (1, 130, 256, True), (1, 5, 100, False)),
        *((3, 130, 384, True), (17, 64, 600, False), (130, 200, 128, False)),
    ],
)
def test_triton_product(rows: int, out_features: int, in_features: int, bias: bool, blocks: bool) -> None:
    linear = quantized_linear(out_features, in_features, blocks=blocks, bias=bias)
    x = quantize(normal(rows, in_features), linear.group or 0)
    expected = TorchOps().linear(x, linear)
    for product in (TritonOps().linear, matmul_fp8):
        torch.testing.assert_close(product(x, linear), expected, rtol=1e-4, atol=1e-3)
        out = torch.full_like(expected, torch.nan)
        assert product(x, linear, out) is out
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "width", "in_features"), [(3, 100, 384), (64, 72, 600), (65, 64, 128)])
def test_swiglu_in_the_product(rows: int, width: int, in_features: int, blocks: bool, gelu: bool) -> None:
    linear = quantized_linear(2 * width, in_features, blocks=blocks, bias=True)
    x = quantize(normal(rows, in_features), linear.group or 0)
    assert can_gate(x, linear) == (rows < 65)
    expected = TorchOps().glu(x, linear, gelu)
    found = TritonOps().glu(x, linear, gelu)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert isinstance(found, torch.Tensor)
    for one, other in zip(TritonOps().glu(x, linear, gelu, 128)[:2], quantize(found, 128)[:2], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=STEP, atol=1e-6)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("out_features", "in_features", "bias"), [(33, 384, True), (260, 256, True), (1, 128, False)])
def test_one_row_is_projected_unquantized(out_features: int, in_features: int, bias: bool, blocks: bool) -> None:
    linear = quantized_linear(out_features, in_features, blocks=blocks, bias=bias)
    x = normal(1, in_features)
    assert (TritonOps.group_for(linear, x), TorchOps.group_for(linear, x)) == (None, linear.group)
    assert TritonOps.group_for(linear, normal(2, in_features)) == linear.group
    assert TritonOps.group_for(quantized_linear(8, 100, blocks=blocks), normal(1, 100)) == (128 if blocks else 100)
    expected = TorchOps().linear(x, Linear(dequantized(linear), linear.bias))
    torch.testing.assert_close(TritonOps().linear(x, linear), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("limit", "rows"), [("_WIDE", 2), ("_WIDE", 100), ("_SMS", 130)])
def test_triton_product_with_many_features(limit: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_fp8, limit, 128 if limit == "_WIDE" else 1)
    linear = quantized_linear(150, 128, blocks=False)
    x = quantize(normal(rows, 128), 128)
    torch.testing.assert_close(matmul_fp8(x, linear), TorchOps().linear(x, linear), rtol=1e-4, atol=1e-3)


# ---- experts ----


def scaled(*shape: int) -> torch.Tensor:
    return normal(*shape, seed=sum(shape)) * shape[-1] ** -0.5


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.usefixtures("rounding")
# Rows: one; fewer than a block; several blocks of an expert.
@pytest.mark.parametrize(
    ("first", "last", "hidden", "rows"),
    [(False, False, 72, 5), (True, True, 200, 37), (True, True, 128, 1), (True, None, 200, 5), (None, False, 72, 1)],
)
def test_experts_equal_the_reference(first: bool | None, last: bool | None, hidden: int, rows: int) -> None:
    count, size, top_k = 6, 128, 3
    x, router = 3 * scaled(rows, hidden), Linear(scaled(count, hidden) * 5)
    fused = quantized_experts(scaled(count, 2 * size, hidden), first)
    down = quantized_experts(scaled(count, hidden, size), last)
    experts = Experts(router, fused, down, top_k, renormalize=True)
    expected = TorchOps().experts(x, experts)
    plain = experts._replace(gate_up=Linear(dequantized(fused)), down=Linear(dequantized(down)))
    # What is rounded are rows and what goes into the second product.
    assert 1e-3 < error(expected, TorchOps().experts(x, plain)) < 0.06
    tiling = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 2, "STAGES": 2, "num_warps": 4}
    small = experts_output(x, TorchOps().linear(x, router), experts, tilings=((float("inf"), tiling, tiling),))
    # A number on the border may be rounded to either neighbour.
    assert error(small, expected) < 4e-3
    assert error(TritonOps().experts(x, experts), expected) < 4e-3
