"""The forwards that stand for a workload's: worked by hand, and never more than the workload."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kernels.bare_steps import Chunks, cut, decode_step, prompt_lens, serving_step
from bench.reporting.work import serving_work
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.traffic import kv_cache_bytes_per_token
from bullet_graph.workloads import WorkloadRequest, load_workload

LLAMA = PRESETS["llama-3.1-8b"]
REQUESTS = st.lists(
    st.builds(WorkloadRequest, st.integers(1, 20_000), st.integers(1, 2_000), st.none()),
    min_size=1,
    max_size=30,
)


def test_prompts_that_a_forward_does_not_hold_are_cut() -> None:
    assert prompt_lens(1000, 400) == (400, 400, 200)
    assert prompt_lens(1000, 500) == (500, 500)
    assert prompt_lens(1000, 4000) == (1000,)
    assert prompt_lens(0, 400) == prompt_lens(1000, 0) == ()


def test_prompts_are_cut_one_behind_the_other() -> None:
    # 5 | 3, 2 fresh | 5 that go on | 1 that goes on.
    assert cut([8, 8], 5) == Chunks(
        fresh_tokens=5 + 2,
        fresh_pairs=15 + 3,
        continued_tokens=3 + 5 + 1,
        continued_pairs=(6 + 7 + 8) + (3 + 4 + 5 + 6 + 7) + 8,
    )
    assert cut([4], 4) == Chunks(4, 10, 0, 0)


def test_requests_of_one_kind() -> None:
    # 64 × 1,000 prompt tokens and 64 × 100 decode rows, the first of which attends to 1,001 tokens, the last to 1,100.
    step = serving_step(LLAMA, [WorkloadRequest(1000, 101, None)] * 64, 1100)
    # The last layer needs not compute the prompts' rows that are not sampled, so it is not quite 64 forwards.
    assert 62 < step.repeats < 64
    scale = 64 / step.repeats
    assert step.decode_rows == int(100 * scale)
    assert step.head_rows == int(101 * scale)
    assert 1050 <= step.context < 1062
    # Pieces of the prompts drift through the forwards: half of a forward goes on with a prompt, half begins one.
    assert sum(step.prompt_lens) + step.continued_tokens in range(1022, 1027)
    assert 450 < step.continued_tokens < 600
    assert 300 < step.continued_cached < 400


@pytest.mark.parametrize("rows", [1024, 2048, 4096])
@pytest.mark.parametrize(("name", "num_requests"), [("azure:conv", 600), ("azure:code", 400)])
def test_the_traces_come_to_nearly_all_of_their_work(name: str, num_requests: int, rows: int) -> None:
    requests = load_workload(name, num_requests=num_requests).requests
    work, step = serving_work(LLAMA, requests), serving_step(LLAMA, requests, rows)
    decode_flops = 4 * work.kv_bytes  # a token and layer: 4 × 4,096 operations, 4,096 bytes
    whole = work.layer_flops + work.head_flops + work.attention_flops + decode_flops
    assert 0.99 * whole < step.flops(LLAMA) * step.repeats <= whole


def test_a_decode_step_is_all_there_is() -> None:
    step = decode_step(64, 1000)
    assert (step.repeats, step.prompt_lens, step.kv_tokens) == (1.0, (), 64_000)
    # Products of a layer: 2 × 218,103,808 weights; two products with the keys and values; the head.
    assert step.flops(LLAMA) == 32 * (64 * 2 * 218_103_808 + 4 * 4096 * 64_000) + 2 * 64 * 4096 * 128_256


@given(REQUESTS, st.sampled_from([16, 2048, 4096]))
def test_it_is_never_more_than_the_workload(requests: list[WorkloadRequest], rows: int) -> None:
    work = serving_work(LLAMA, requests)
    step = serving_step(LLAMA, requests, rows)
    least = 1 - 1e-9
    layer_flops = 32 * 2 * 218_103_808 * rows * step.repeats
    assert layer_flops == pytest.approx(work.layer_flops)
    assert 2 * 4096 * 128_256 * step.head_rows * step.repeats * least <= work.head_flops
    kv_bytes = kv_cache_bytes_per_token(LLAMA, dtype_bytes=2) * step.kv_tokens * step.repeats
    assert kv_bytes * least <= work.kv_bytes
    assert 32 * 4 * 4096 * step.prompt_pairs * step.repeats * least <= work.attention_flops
