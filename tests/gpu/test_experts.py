"""A mixture of experts on the GPU with its own tilings: against the reference, and captured for any routing."""

import pytest
import torch
from fp8_checkpoints import quantized_experts

from bullet_graph.kernels.gpu import captured
from bullet_graph.kernels.ops import Experts, Linear, TorchOps
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.presets import PRESETS

DEVICE = torch.device("cuda")


def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator, device=DEVICE) * std).bfloat16()


@pytest.fixture(
    scope="module",
    params=[(name, blocks) for blocks in (None, False, True) for name in ("qwen3-30b-a3b", "mixtral-8x7b")],
    ids=str,
)
def experts(request: pytest.FixtureRequest) -> Experts:
    name, blocks = request.param
    config = PRESETS[name]
    count, hidden, size = config.num_experts, config.hidden_size, config.expert_intermediate_size
    router = Linear(normal(count, hidden, std=hidden**-0.5))
    gate_up = quantized_experts(normal(count, 2 * size, hidden, std=hidden**-0.5), blocks)
    down = quantized_experts(normal(count, hidden, size, std=size**-0.5), blocks)
    return Experts(router, gate_up, down, top_k=config.experts_per_token, renormalize=True)


def assert_close(out: torch.Tensor, expected: torch.Tensor, limit: float = 1e-2) -> None:
    assert out.isfinite().all()
    assert float((out.float() - expected.float()).norm() / expected.float().norm()) <= limit


@torch.inference_mode()
@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 250, 300, 2000])
def test_every_tiling(experts: Experts, rows: int, is_skewed: bool) -> None:
    x = normal(rows, experts.router.weight.shape[1])
    if is_skewed:
        # All rows alike but for a little: nearly all take the same experts.
        x = x[:1] + 0.05 * x
    # The reference rounds gate and up to bfloat16; in FP8, a number on a border may be rounded to either neighbour.
    limit = 1e-2 if experts.gate_up.scale is None else 3e-2
    assert_close(TritonOps().experts(x, experts), TorchOps().experts(x, experts), limit)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 64, 512])
def test_a_captured_launch_holds_for_any_routing(experts: Experts, rows: int) -> None:
    ops, hidden = TritonOps(), experts.router.weight.shape[1]
    x = normal(rows, hidden)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.experts(x, experts)
        with captured(torch.cuda.graph_pool_handle()) as graph:
            out = ops.experts(x, experts)
    torch.cuda.current_stream().wait_stream(stream)
    for other in (normal(rows + 1, hidden)[1:], x[:1].expand(rows, -1).clone(), -x):
        x.copy_(other)
        graph.replay()
        assert torch.equal(out, ops.experts(other, experts))
