"""The fused SwiGLU product against plain torch: in Triton's interpreter where there is no GPU."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.ops import Linear, TorchOps
from bullet_graph.models.presets import PRESETS

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels import triton_ops
from bullet_graph.kernels.triton_ops import TritonOps, can_fuse, swiglu_matmul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = 1e-2  # relative, Frobenius, as on the GPU
# An H200's tiles would take the interpreter minutes.
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "STAGES": 2, "num_warps": 4}
OPS = TritonOps(Gpu(3, (9, 0)))


def inputs(rows: int, hidden_size: int, intermediate_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Half and not bf16, of which Triton's interpreter multiplies the bits.
    generator = torch.Generator(DEVICE).manual_seed(5)
    shapes = (rows, hidden_size), (2 * intermediate_size, hidden_size)
    x, gate_up = (torch.randn(*shape, generator=generator, device=DEVICE).half() for shape in shapes)
    return x, gate_up


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


# Fewer rows than a tile, rows that no tile divides, and more rows of tiles than a group with an incomplete last group;
# sizes that no tile divides.
@example(rows=1, hidden_eighths=5, intermediate_eighths=9, group_m=2)
@example(rows=80, hidden_eighths=6, intermediate_eighths=8, group_m=2)
@example(rows=83, hidden_eighths=1, intermediate_eighths=1, group_m=2)
@given(st.integers(1, 90), st.integers(1, 8), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=20)
def test_any_sizes(rows: int, hidden_eighths: int, intermediate_eighths: int, group_m: int) -> None:
    x, gate_up = inputs(rows, 8 * hidden_eighths, 8 * intermediate_eighths)
    guarded = torch.full((rows + 2, 8 * intermediate_eighths), torch.nan, dtype=torch.half, device=DEVICE)
    out = guarded[1:-1]
    # On three SMs, so that each has several tiles.
    assert swiglu_matmul(x, gate_up, out, num_sms=3, tiling={**SMALL, "GROUP_M": group_m}) is out
    assert relative_error(out, TorchOps().glu(x.float(), Linear(gate_up.float()))) <= ERROR
    assert guarded[[0, -1]].isnan().all()


def test_swiglu_on_both_sides_of_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "FUSED_SWIGLU_MIN_ROWS", 20)
    fused = Mock(wraps=swiglu_matmul)
    monkeypatch.setattr(triton_ops, "swiglu_matmul", fused)
    for rows in (1, 19, 20, 21):
        x, gate_up = inputs(rows, 128, 136)
        out, expected = OPS.glu(x, Linear(gate_up)), TorchOps().glu(x, Linear(gate_up))
        assert out.shape == expected.shape
        assert out.dtype == expected.dtype
        assert relative_error(out, expected.float()) <= ERROR
    assert [len(call.args[0]) for call in fused.call_args_list] == [20, 21]


def test_every_preset_fits_in_sixteen_bits() -> None:
    for config in PRESETS.values():
        x = torch.empty(1, config.hidden_size, device="meta")
        gate_up = torch.empty(2 * config.intermediate_size, config.hidden_size, device="meta")
        for dtype in (torch.bfloat16, torch.float16):
            assert can_fuse(x.to(dtype), gate_up.to(dtype))
        assert not can_fuse(x, gate_up)
        assert not can_fuse(x.half(), gate_up.bfloat16())


@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size", "dtype"), [(60, 64, torch.half), (64, 60, torch.half), (64, 64, torch.float32)]
)
def test_what_does_not_fit_is_not_fused(
    monkeypatch: pytest.MonkeyPatch, hidden_size: int, intermediate_size: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(triton_ops, "FUSED_SWIGLU_MIN_ROWS", 1)
    monkeypatch.setattr(triton_ops, "swiglu_matmul", None)
    x, gate_up = (tensor.to(dtype) for tensor in inputs(4, hidden_size, intermediate_size))
    assert not can_fuse(x, gate_up)
    assert relative_error(OPS.glu(x, Linear(gate_up)), TorchOps().glu(x.float(), Linear(gate_up.float()))) <= ERROR


@pytest.mark.parametrize("gpu", [Gpu(108, (8, 0)), Gpu(148, (10, 0)), None], ids=str)
def test_only_hopper_as_a_whole_fuses(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None) -> None:
    monkeypatch.setattr(triton_ops, "FUSED_SWIGLU_MIN_ROWS", 1)
    monkeypatch.setattr(triton_ops, "swiglu_matmul", None)
    x, gate_up = inputs(4, 64, 64)
    assert TritonOps(gpu).glu(x, Linear(gate_up)).shape == (4, 64)
