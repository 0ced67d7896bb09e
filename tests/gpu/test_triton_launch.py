"""Repeated launches on the GPU: the same results wherever the tensors lie, eager and captured."""

from collections.abc import Callable
from functools import partial

import torch

from bullet_graph.kernels.launch import Launcher
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.kernels.triton_kernels import act_and_mul_kernel

DEVICE = torch.device("cuda")
ROWS, SIZE = 3, 1000


def gate_up(seed: int, offset: int) -> torch.Tensor:
    """[ROWS, 2 * SIZE], so many elements after an aligned address."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    memory = torch.randn(ROWS * 2 * SIZE + offset, generator=generator, device=DEVICE).bfloat16()
    return memory[offset:].view(ROWS, 2 * SIZE)


def new_launch() -> Callable[..., None]:
    return partial(Launcher(act_and_mul_kernel)[ROWS, 1], intermediate_size=SIZE, GELU=False, BLOCK=1024, num_warps=4)


def check(out: torch.Tensor, x: torch.Tensor) -> None:
    torch.testing.assert_close(out.float(), TorchOps.act_and_mul(x.float()), rtol=1e-2, atol=1e-2)


def test_tensors_anywhere() -> None:
    launch = new_launch()
    # Aligned twice, then at one element and at three after that, then aligned once more.
    for seed, offset in enumerate((0, 0, 1, 3, 0, 8)):
        x = gate_up(seed, offset)
        out = torch.full((ROWS, SIZE), torch.nan, dtype=x.dtype, device=DEVICE)
        launch(x, out)
        check(out, x)


def test_captured_launches_and_other_streams() -> None:
    launch = new_launch()
    inputs = [gate_up(seed, 0) for seed in range(3)]
    outs = [torch.full((ROWS, SIZE), torch.nan, dtype=x.dtype, device=DEVICE) for x in inputs]
    launch(inputs[0], torch.empty_like(outs[0]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, out in zip(inputs[:2], outs[:2], strict=True):
            launch(x, out)
    assert all(out.isnan().all() for out in outs)
    graph.replay()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(inputs[2], outs[2])
    torch.cuda.synchronize()
    for x, out in zip(inputs, outs, strict=True):
        check(out, x)
