"""The fused SwiGLU product on the GPU: against float32, on its own, as the engine calls it, and captured."""

import pytest
import torch

from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.ops import Linear, TorchOps
from bullet_graph.kernels.triton_ops import FUSED_SWIGLU_MIN_ROWS, TritonOps, swiglu_matmul
from bullet_graph.models.presets import PRESETS

DEVICE = torch.device("cuda")

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and Gpu.of(DEVICE).is_hopper), reason="the kernel is for compute capability 9.0"
)


def fused(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return swiglu_matmul(x, gate_up, out, num_sms=Gpu.of(DEVICE).num_sms)


def inputs(
    rows: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(7)
    shapes = (rows, hidden_size), (2 * intermediate_size, hidden_size)
    x, gate_up = (torch.randn(*shape, generator=generator, device=DEVICE) for shape in shapes)
    return x.to(dtype), (gate_up * hidden_size**-0.5).to(dtype)


def check(out: torch.Tensor, x: torch.Tensor, gate_up: torch.Tensor) -> None:
    expected = TorchOps().glu(x.float(), Linear(gate_up.float()))
    assert float((out.float() - expected).norm() / expected.norm()) <= 1e-2  # relative, Frobenius


@pytest.mark.parametrize("rows", [640, 1024, 1500, 8192])
@pytest.mark.parametrize("preset", ["llama-3.1-8b", "qwen3-8b", "qwen3-0.6b"])
def test_presets(preset: str, rows: int) -> None:
    config = PRESETS[preset]
    x, gate_up = inputs(rows, config.hidden_size, config.intermediate_size)
    out = torch.full((rows, config.intermediate_size), torch.nan, dtype=x.dtype, device=DEVICE)
    fused(x, gate_up, out)
    check(out, x, gate_up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "hidden_size", "intermediate_size"), [(1, 128, 384), (129, 136, 200), (300, 8, 8)])
def test_sizes_that_no_tile_divides(rows: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
    x, gate_up = inputs(rows, hidden_size, intermediate_size, dtype)
    around = torch.full((rows + 256, intermediate_size), torch.nan, dtype=dtype, device=DEVICE)
    fused(x, gate_up, around[128:-128])
    check(around[128:-128], x, gate_up)
    assert around[:128].isnan().all()
    assert around[-128:].isnan().all()


def test_rows_decide_what_the_engine_launches() -> None:
    x, gate_up = inputs(FUSED_SWIGLU_MIN_ROWS, 1024, 3072)
    ops = TritonOps(Gpu.of(DEVICE))
    assert torch.equal(ops.glu(x, Linear(gate_up)), fused(x, gate_up))
    two_steps = ops.act_and_mul(ops.linear(x, Linear(gate_up)))
    assert torch.equal(TritonOps().glu(x, Linear(gate_up)), two_steps)
    fewer = x[:-1]
    two_steps = ops.act_and_mul(ops.linear(fewer, Linear(gate_up)))
    assert torch.equal(ops.glu(fewer, Linear(gate_up)), two_steps)
    check(two_steps, fewer, gate_up)


def test_a_captured_launch_reads_what_its_tensors_hold_when_replayed() -> None:
    x, gate_up = inputs(1024, 1024, 3072)
    fused(x, gate_up)  # loads the kernel, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused(x, gate_up)
    out.fill_(torch.nan)
    x.neg_()
    graph.replay()
    check(out, x, gate_up)
    assert torch.equal(out, fused(x, gate_up))
