"""Kernels of a mixture of experts against plain torch: in Triton's interpreter where there is no GPU."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bullet_graph.kernels.ops import Experts, Linear, TorchOps

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels import triton_moe
from bullet_graph.kernels.triton_moe import Tilings, experts_output
from bullet_graph.kernels.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = 2e-3  # relative, Frobenius, of results in 16 bits


def small(block_m: int) -> Tilings:
    """Tiles that the interpreter multiplies quickly; none divides the sizes below."""
    tiling = {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 2} | {"STAGES": 2, "num_warps": 4}
    return ((math.inf, tiling, tiling),)


def layer(num_experts: int, top_k: int, *, renormalize: bool = True, hidden: int = 40, size: int = 24) -> Experts:
    generator = torch.Generator(DEVICE).manual_seed(num_experts)

    def normal(*shape: int) -> Linear:
        tensor = torch.randn(*shape, generator=generator, device=DEVICE) * shape[-1] ** -0.5
        return Linear(tensor.half())

    return Experts(
        normal(num_experts, hidden),
        normal(num_experts, 2 * size, hidden),
        normal(num_experts, hidden, size),
        top_k,
        renormalize,
    )


def rows_of(count: int, hidden: int = 40) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).half()


def expected_output(x: torch.Tensor, logits: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Row by row and expert by expert, in float64."""
    scores = logits.double().softmax(-1)
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for row, one in enumerate(x.double()):
        # A stable sort takes the first of equals.
        order = scores[row].sort(descending=True, stable=True).indices[: experts.top_k]
        total = scores[row, order].sum() if experts.renormalize else 1.0
        for expert in order:
            gate, up = (experts.gate_up.weight[expert].double() @ one).chunk(2)
            down = experts.down.weight[expert].double() @ (torch.nn.functional.silu(gate) * up)
            out[row] += scores[row, expert] / total * down
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((out.double() - expected).norm() / expected.norm()) <= ERROR


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Logits [rows, experts] of few values, so that some experts are equal, hot or without rows; and top_k."""
    num_experts = draw(st.integers(1, 20))
    favourites = draw(st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=3))
    values = draw(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0]), min_size=num_experts, max_size=num_experts))
    logits = torch.tensor(values).repeat(draw(st.integers(1, 24)), 1)
    for row in range(len(logits)):
        logits[row, favourites[row % len(favourites)]] += 5.0
    return logits.to(DEVICE), draw(st.integers(1, min(4, num_experts)))


@example((torch.zeros(1, 1), 1), 16, True)
@example((torch.zeros(1, 8), 8), 16, False)
@example((torch.tensor([[9.0, 0.0, 0.0]]).repeat(35, 1), 1), 16, True)  # all on one expert, in several blocks
@given(routings(), st.sampled_from([16, 32]), st.booleans())
@settings(max_examples=8)
def test_any_routing(routing: tuple[torch.Tensor, int], block_m: int, renormalize: bool) -> None:
    logits, top_k = routing[0].to(DEVICE), routing[1]
    x, experts = rows_of(len(logits)), layer(logits.shape[1], top_k, renormalize=renormalize)
    out = experts_output(x, logits, experts, tilings=small(block_m))
    assert out.dtype == x.dtype
    assert_close(out, expected_output(x, logits, experts))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_both_operations_agree_with_arithmetic(rows: int, top_k: int) -> None:
    x, experts = rows_of(rows), layer(6, top_k, renormalize=top_k == 3)
    expected = expected_output(x, TorchOps().linear(x, experts.router), experts)
    assert_close(TorchOps().experts(x, experts), expected)
    assert_close(TritonOps().experts(x, experts), expected)


def test_experts_that_ranks_divide_add_up() -> None:
    x, experts = rows_of(20), layer(6, 3)
    logits = TorchOps().linear(x, experts.router)
    total = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for first, count in ((0, 2), (2, 3), (5, 1)):
        gate_up, down = (Linear(one.weight[first : first + count]) for one in (experts.gate_up, experts.down))
        own = experts._replace(gate_up=gate_up, down=down, first=first)
        out = experts_output(x, logits, own, tilings=small(16))
        assert_close(out, TorchOps().experts(x, own).double())
        total += out.double()
    assert_close(total, expected_output(x, logits, experts))


def test_counts_of_many_programs_and_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs of 16 rows, whose counts are read one by one, and more blocks than a program describes at once."""
    monkeypatch.setattr(triton_moe, "_COUNTS", 1)
    x, experts = rows_of(40), layer(20, 2)
    logits = TorchOps().linear(x, experts.router)
    out = experts_output(x, logits, experts, tilings=small(16))
    assert_close(out, expected_output(x, logits, experts))


def test_a_row_s_result_depends_on_no_other_row() -> None:
    x, experts = rows_of(20), layer(5, 2)
    logits = TorchOps().linear(x, experts.router)
    whole = experts_output(x, logits, experts, tilings=small(16))
    for some in (slice(3, 4), slice(2, 19)):
        assert_same(experts_output(x[some], logits[some], experts, tilings=small(16)), whole[some])
    assert_same(experts_output(x.flip(0), logits.flip(0), experts, tilings=small(16)), whole.flip(0))


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    # On a CPU, NumPy's own results depend in the last bit on where a number lies in an array.
    limit = 0.0 if DEVICE.type == "cuda" else 1e-3
    torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def test_whatever_the_logits_are_experts_exist() -> None:
    """Captures run steps before the weights are there."""
    x, experts = rows_of(4), layer(5, 3)
    logits = torch.zeros(4, 5, device=DEVICE)
    logits[0], logits[1], logits[2] = torch.nan, torch.inf, -torch.inf
    out = experts_output(x, logits, experts, tilings=small(16))
    assert_close(out[3:], expected_output(x[3:], logits[3:], experts))
