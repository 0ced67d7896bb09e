"""Triton kernels against plain torch: in Triton's interpreter where there is no GPU."""

import math
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_rows import settings_row

from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.ops import Experts, HeadNorms, Linear, RowInputs, TorchOps
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.sampler import sample as torch_sample
from bullet_graph.models.presets import PRESETS

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels import triton_moe, triton_ops
from bullet_graph.kernels.few_rows import are_few
from bullet_graph.kernels.triton_moe import Tilings, experts_output
from bullet_graph.kernels.triton_ops import TritonOps, can_fuse, swiglu_matmul
from bullet_graph.kernels.triton_ops import sample as triton_sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(3)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize(("rows", "hidden_size"), [(1, 64), (3, 100), (5, 1024)])
def test_add_rms_norm(
    generator: torch.Generator, rows: int, hidden_size: int, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x, residual = (normal(generator, rows, hidden_size, dtype=dtype) for _ in range(2))
    weight = normal(generator, hidden_size, dtype=weight_dtype or dtype)
    normed, summed = TritonOps().add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_summed = TorchOps().add_rms_norm(x, residual, weight, 1e-5)
    # Not bit for bit: Triton's interpreter truncates where the GPU rounds to bfloat16.
    torch.testing.assert_close(summed, expected_summed)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(normed, expected_normed, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize(("rows", "first", "width"), [(0, 0, 8), (1, 0, 64), (3, 20, 100), (5, 64, 1024)])
def test_rms_norm_of_columns(
    generator: torch.Generator, rows: int, first: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    whole = normal(generator, rows, first + width + 8, dtype=dtype)
    weight = normal(generator, width, dtype=weight_dtype)
    expected = whole.clone()
    TorchOps.rms_norm_(expected[:, first : first + width], weight, 1e-5)
    TritonOps.rms_norm_(whole[:, first : first + width], weight, 1e-5)
    torch.testing.assert_close(whole, expected, rtol={torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype], atol=1e-5)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "intermediate_size"), [(1, 64), (4, 300), (2, 2100)])
def test_act_and_mul(
    generator: torch.Generator, rows: int, intermediate_size: int, dtype: torch.dtype, gelu: bool
) -> None:
    gate_up = normal(generator, rows, 2 * intermediate_size, dtype=dtype) * 3
    expected = TorchOps.act_and_mul(gate_up.float(), gelu).to(dtype)
    torch.testing.assert_close(TritonOps.act_and_mul(gate_up, gelu), expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [(1, 1, 128), (1, 34, 384), (1, 7, 14336), (1, 6, 4096), (1, 5, 100), (2, 34, 384), (8, 7, 1024), (9, 6, 128)],
)
def test_linear_of_few_rows(
    generator: torch.Generator, rows: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    dtype, rtol, atol = (torch.float32, 1e-4, 1e-4) if rows == 1 else (torch.float16, 2e-3, 0.1)
    x, weight = (
        normal(generator, rows, in_features, dtype=dtype),
        normal(generator, out_features, in_features).to(dtype),
    )
    bias = normal(generator, out_features, dtype=dtype) if has_bias else None
    expected = TorchOps().linear(x, Linear(weight, bias))
    torch.testing.assert_close(TritonOps().linear(x, Linear(weight, bias)), expected, rtol=rtol, atol=atol)
    out = torch.full_like(expected, torch.nan)
    assert TritonOps().linear(x, Linear(weight, bias), out=out) is out
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


def test_large_products_of_several_rows_are_torch_s() -> None:
    small, large = (Linear(torch.empty(rows, 4096, dtype=torch.float16)) for rows in (2048, 2049))
    x = torch.empty(2, 4096, dtype=torch.float16)
    assert [are_few(rows, of) for rows in (x[:1], x) for of in (small, large)] == [True, True, True, False]


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "intermediate_size", "hidden_size"), [(1, 1, 128), (1, 37, 384), (1, 300, 4096), (2, 1, 128), (7, 37, 384)]
)
def test_glu_of_few_rows(
    generator: torch.Generator, rows: int, intermediate_size: int, hidden_size: int, dtype: torch.dtype, gelu: bool
) -> None:
    if rows > 1 and dtype is torch.bfloat16:
        dtype = torch.float16  # Triton's interpreter multiplies no matrices of bfloat16
    x = normal(generator, rows, hidden_size, dtype=dtype)
    gate_up = normal(generator, 2 * intermediate_size, hidden_size, dtype=dtype) * hidden_size**-0.5
    bias = normal(generator, 2 * intermediate_size, dtype=dtype)
    expected = TorchOps().glu(x.float(), Linear(gate_up.float(), bias.float()), gelu)
    found = TritonOps().glu(x, Linear(gate_up, bias), gelu)
    assert found.dtype == dtype
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (2e-2, 1e-2)
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("tiny", torch.float32),
        ("llama-3.2-1b", torch.float32),
        ("qwen3-0.6b", torch.float32),
        ("qwen3-0.6b", torch.bfloat16),  # with norms in float32
    ],
)
def test_rope_and_cache(generator: torch.Generator, preset: str, dtype: torch.dtype) -> None:
    config = PRESETS[preset]
    rows, blocks, block_tokens = 7, 5, 16
    qkv = normal(generator, rows, config.q_size + 2 * config.kv_size, dtype=dtype)
    inputs = RowInputs(
        positions=torch.randint(0, 40, (rows,), generator=generator, device=DEVICE, dtype=torch.int32),
        kv_slots=torch.randperm(blocks * block_tokens, generator=generator, device=DEVICE)[:rows].int(),
        cos_sin=normal(generator, 40, config.head_dim),
    )
    norms = HeadNorms(*(normal(generator, config.head_dim) for _ in range(2)), 1e-6) if config.qk_norm else None
    shape = (blocks, block_tokens, config.num_kv_heads, config.head_dim)
    caches = normal(generator, *shape, dtype=dtype), normal(generator, *shape, dtype=dtype)
    expected_caches = caches[0].clone(), caches[1].clone()
    expected_qkv = qkv.clone()
    q = TritonOps().rope_and_cache(qkv, inputs, caches, norms)
    expected_q = TorchOps().rope_and_cache(expected_qkv, inputs, expected_caches, norms)
    close = {torch.float32: {}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}[dtype]
    torch.testing.assert_close(qkv, expected_qkv, **close)
    torch.testing.assert_close(q, expected_q, **close)
    for cache, expected in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache, expected, **close)


SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_k_1": {"temperature": 5.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "all": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_sample_draws_the_reference_sampler_s_tokens(generator: torch.Generator, name: str) -> None:
    rows, vocab_size, slots = 6, 777, torch.tensor([4, 0, 2, 5, 1, 7], dtype=torch.int32, device=DEVICE)
    states = [SamplingState(8, vocab_size, DEVICE) for _ in range(2)]
    for state in states:
        for slot in range(8):
            state.settings[slot] = settings_row(seed=(slot + 1) * 0x1234_5678_9ABC, **SETTINGS[name])
    logits = normal(generator, rows, vocab_size) * 3
    positions = torch.arange(10, 10 + rows, dtype=torch.int32, device=DEVICE)
    tokens = triton_sample(logits, slots, positions, states[0])
    assert torch.equal(tokens, torch_sample(logits, slots, positions, states[1]))
    assert torch.equal(states[0].last_token, states[1].last_token)


def test_sample_keeps_masked_ids_out_until_their_position(generator: torch.Generator) -> None:
    state = SamplingState(2, 100, DEVICE)
    logits = normal(generator, 2, 100)
    best = logits.argmax(-1).int()
    for slot in range(2):
        state.settings[slot] = settings_row(masked_until=20, masked_token_ids=(int(best[slot]), 3))
    slots = torch.arange(2, dtype=torch.int32, device=DEVICE)
    at = torch.tensor([19, 20], dtype=torch.int32, device=DEVICE)
    tokens = triton_sample(logits, slots, at, state)
    assert tokens[0] != best[0]
    assert tokens[1] == best[1]
    assert torch.equal(tokens, torch_sample(logits, slots, at, state))


def test_greedy_takes_the_first_of_equal_logits() -> None:
    state = SamplingState(1, 5000, DEVICE)
    logits = torch.zeros(1, 5000, device=DEVICE)
    logits[0, [77 + 4096, 77, 4999]] = 2.0  # the first in the same lane of the next block
    slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert triton_sample(logits, slots, slots, state).tolist() == [77]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_whatever_the_logits_are_a_token_is_in_the_vocabulary(value: float) -> None:
    """Captures run steps before the weights are there, and the next step looks the token up."""
    state = SamplingState(1, 5000, DEVICE)  # as a slot for padding has it, greedy
    slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    tokens = triton_sample(torch.full((1, 5000), value, device=DEVICE), slots, slots, state)
    assert 0 <= int(tokens[0]) < 5000
    assert state.last_token.tolist() == tokens.tolist()


# ---- the fused SwiGLU product ----

ERROR = 1e-2  # relative, Frobenius, as on the GPU
# An H200's tiles would take the interpreter minutes.
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "STAGES": 2, "num_warps": 4}
OPS = TritonOps(Gpu(3, (9, 0)))


def inputs(rows: int, hidden_size: int, intermediate_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Half and not bf16, of which Triton's interpreter multiplies the bits.
    generator = torch.Generator(DEVICE).manual_seed(5)
    shapes = (rows, hidden_size), (2 * intermediate_size, hidden_size)
    x, gate_up = (normal(generator, *shape, dtype=torch.half) for shape in shapes)
    return x, gate_up


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.to(expected.dtype) - expected).norm() / expected.norm())


# Fewer rows than a tile, rows that no tile divides, and more rows of tiles than a group with an incomplete last group;
# sizes that no tile divides.
@example(rows=1, hidden_eighths=5, intermediate_eighths=9, group_m=2)
@example(rows=80, hidden_eighths=6, intermediate_eighths=8, group_m=2)
@example(rows=83, hidden_eighths=1, intermediate_eighths=1, group_m=2)
@given(st.integers(1, 90), st.integers(1, 8), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=20)
def test_swiglu_of_any_sizes(rows: int, hidden_eighths: int, intermediate_eighths: int, group_m: int) -> None:
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


def test_every_preset_s_swiglu_fits_in_sixteen_bits() -> None:
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
def test_a_swiglu_that_does_not_fit_is_not_fused(
    monkeypatch: pytest.MonkeyPatch, hidden_size: int, intermediate_size: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(triton_ops, "FUSED_SWIGLU_MIN_ROWS", 1)
    monkeypatch.setattr(triton_ops, "swiglu_matmul", None)
    x, gate_up = (tensor.to(dtype) for tensor in inputs(4, hidden_size, intermediate_size))
    assert not can_fuse(x, gate_up)
    assert relative_error(OPS.glu(x, Linear(gate_up)), TorchOps().glu(x.float(), Linear(gate_up.float()))) <= ERROR


@pytest.mark.parametrize("gpu", [Gpu(108, (8, 0)), Gpu(148, (10, 0)), None], ids=str)
def test_only_hopper_as_a_whole_fuses_swiglu(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None) -> None:
    monkeypatch.setattr(triton_ops, "FUSED_SWIGLU_MIN_ROWS", 1)
    monkeypatch.setattr(triton_ops, "swiglu_matmul", None)
    x, gate_up = inputs(4, 64, 64)
    assert TritonOps(gpu).glu(x, Linear(gate_up)).shape == (4, 64)


# ---- a mixture of experts ----


def small(block_m: int) -> Tilings:
    """Tiles that the interpreter multiplies quickly; none divides the sizes below."""
    tiling = {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 2} | {"STAGES": 2, "num_warps": 4}
    return ((math.inf, tiling, tiling),)


def layer(num_experts: int, top_k: int, *, renormalize: bool = True, hidden: int = 40, size: int = 24) -> Experts:
    generator = torch.Generator(DEVICE).manual_seed(num_experts)

    def normal(*shape: int) -> Linear:
        return Linear((torch.randn(*shape, generator=generator, device=DEVICE) * shape[-1] ** -0.5).half())

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
    assert relative_error(out, expected) <= 2e-3, "results are in 16 bits"


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
def test_experts_of_any_routing(routing: tuple[torch.Tensor, int], block_m: int, renormalize: bool) -> None:
    logits, top_k = routing[0].to(DEVICE), routing[1]
    x, experts = rows_of(len(logits)), layer(logits.shape[1], top_k, renormalize=renormalize)
    out = experts_output(x, logits, experts, tilings=small(block_m))
    assert out.dtype == x.dtype
    assert_close(out, expected_output(x, logits, experts))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_routing_and_experts_agree_with_arithmetic(rows: int, top_k: int) -> None:
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


def test_counts_of_experts_in_many_programs_and_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs of 16 rows, whose counts are read one by one, and more blocks than a program describes at once."""
    monkeypatch.setattr(triton_moe, "_COUNTS", 1)
    x, experts = rows_of(40), layer(20, 2)
    logits = TorchOps().linear(x, experts.router)
    assert_close(experts_output(x, logits, experts, tilings=small(16)), expected_output(x, logits, experts))


def test_a_row_s_experts_depend_on_no_other_row() -> None:
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
