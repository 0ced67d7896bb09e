"""Proposals of what to capture: usage, budgets, and the best use of them."""

import math
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from fakes.perf_tables import LLAMA_8B, h200_table
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.config import EngineConfig
from bullet_graph.engine import capture_proposal
from bullet_graph.errors import ConfigError
from bullet_graph.graphs.capture_plan import (
    DECODE_GRAPH_BYTES,
    DECODE_GRAPH_S,
    PIECE_S,
    CapturePlan,
    DecodeSizes,
    default_plan,
)
from bullet_graph.graphs.key import batch_size_buckets
from bullet_graph.hardware import GENERIC
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.masks import WHOLE_GPU, partition_of
from bullet_graph.perf.predict import TableModel
from bullet_graph.runtime.simulated import StepRecord, StepWork
from bullet_graph.runtime.step import Placement

MODEL = TableModel(h200_table(), LLAMA_8B)
SPLIT = partition_of(48, num_sms=132)
CONFIG = EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=192)
DEVICE: dict[str, Any] = {"dtype": "bfloat16", "num_sms": 132}
LIKE = default_plan(CONFIG, **DEVICE, shape=LLAMA_8B, decode_sms=MODEL.decode_sms)


def decode(batch_size: int, partition: object = WHOLE_GPU, ms: float = 10.0) -> StepRecord:
    placement = Placement("decode", partition)  # type: ignore[arg-type]
    return StepRecord(placement, StepWork(0, 0.0, batch_size, 1000 * batch_size, batch_size), ms)


def forward(tokens: int, batch_size: int) -> StepRecord:
    return StepRecord(Placement(), StepWork(tokens, tokens * 100.0, batch_size, 1000 * batch_size, batch_size), 9.0)


def chunk(tokens: int, ms: float, first: int = 0, last: int | None = None) -> StepRecord:
    return StepRecord(Placement("prefill", SPLIT, first, last), StepWork(tokens, tokens * 100.0, 0, 0, 0), ms)


def usage_of(*records: StepRecord, routes: bool = False, num_layers: int = 32) -> capture_proposal.CaptureUsage:
    model = copy(MODEL)
    model.num_layers = num_layers
    usage = capture_proposal.CaptureUsage(model, routes)
    for record in records:
        usage.note(record)
    return usage


def sizes_of(plan: CapturePlan, decode_sms: capture_proposal.GroupKey = None) -> tuple[int, ...]:
    return next((entry.batch_sizes for entry in plan.decode if entry.decode_sms == decode_sms), ())


def seen(usage: capture_proposal.CaptureUsage, key: capture_proposal.GroupKey) -> list[capture_proposal.Demand]:
    return [demand for demand in usage.groups(LIKE)[key].demands if demand.num_steps]


# ---- what was seen, and what it costs ----


def test_steps_are_told_apart() -> None:
    decodes = decode(3), decode(3), decode(5, SPLIT), replace(decode(1), placement=Placement("decode", least_rows=2))
    usage = usage_of(*decodes, forward(60, 4), chunk(512, 8.0, 0, 16), chunk(512, 8.0, 16))
    assert {key: list(sizes) for key, sizes in usage.steps.items()} == {
        None: [3, 2],
        48: [5],
        capture_proposal.PIECEWISE: [64],
    }
    assert len(usage.steps[None][3]) == 2
    beside_ms, whole_ms = usage.beside_ms[48]
    assert beside_ms == 16
    assert whole_ms == pytest.approx(MODEL.prefill(512, 51200.0).ms), "two halves of one chunk"


def test_padding_costs_what_the_padded_rows_cost_and_one_row_has_kernels_of_its_own() -> None:
    (demand,) = seen(usage_of(decode(40), decode(40)), None)
    assert demand.padded_ms(40) == 0
    assert demand.padded_ms(64) == pytest.approx(2 * (MODEL.decode(64, 40_000).ms - MODEL.decode(40, 40_000).ms))
    assert demand.unserved_ms == math.inf, "no batch may be left out on the whole GPU"
    (with_experts,) = seen(usage_of(decode(40), routes=True), None)
    assert 0 < with_experts.padded_ms(41) == with_experts.padded_ms(64) < demand.padded_ms(64), "alike: as one row"
    (one,) = seen(usage_of(decode(1)), None)
    assert one.padded_ms(1) == 0
    assert one.padded_ms(2) >= capture_proposal.SINGLE_ROW_LOSS * MODEL.decode(1, 1000).ms


def test_a_split_that_has_no_graph_takes_turns_instead() -> None:
    prefill_ms = MODEL.prefill(2048, 204800.0).ms
    (demand,) = seen(usage_of(decode(64, SPLIT, ms=12.0), chunk(2048, 1.5 * prefill_ms)), 48)
    # Beside decode, prefill has two thirds of its rate: in 12 ms what takes 8 alone.
    expected = MODEL.decode(64, 64_000).ms + 8.0 - 12.0
    assert expected > 0.7
    assert demand.unserved_ms == pytest.approx(expected)
    slow = seen(usage_of(decode(64, SPLIT, ms=14.0), chunk(2048, 100 * prefill_ms)), 48)
    assert slow[0].unserved_ms == pytest.approx(capture_proposal.LEAST_SPLIT_GAIN * 14.0)


def test_a_forward_without_pieces_costs_the_hosts_time() -> None:
    (demand,) = seen(usage_of(forward(100, 20), forward(900, 0)), capture_proposal.PIECEWISE)
    assert demand.size == 120
    assert demand.unserved_ms == pytest.approx((GENERIC.eager_layer_ms - GENERIC.captured_layer_ms) * 32)
    assert demand.padded_ms(128) == pytest.approx(
        MODEL.mixed(108, 10_000.0, 20, 20_000).ms - MODEL.mixed(100, 10_000.0, 20, 20_000).ms
    )
    (alone,) = seen(usage_of(forward(100, 0), forward(100, 0)), capture_proposal.PIECEWISE)
    assert alone.padded_ms(112) == pytest.approx(2 * (MODEL.prefill(112, 1e4).ms - MODEL.prefill(100, 1e4).ms))
    assert alone.unserved_ms == 2 * demand.unserved_ms


def test_lost_time_is_a_share_of_the_steps_that_came_up() -> None:
    usage = usage_of(decode(40), decode(40), forward(90, 10))
    plan = replace(LIKE, decode=(DecodeSizes(None, (64,)),), piecewise_rows=(112,))
    (whole,), (mixed,) = seen(usage, None), seen(usage, capture_proposal.PIECEWISE)
    lost_ms = whole.padded_ms(64) + mixed.padded_ms(112)
    assert lost_ms > whole.padded_ms(64) > 0
    assert usage.lost_percent(usage.groups(LIKE), plan) == pytest.approx(100 * lost_ms / 29)


# ---- what is proposed ----


def test_without_limits_all_that_came_up_is_captured() -> None:
    usage = usage_of(*[decode(37)] * 9, *[decode(16, SPLIT)] * 9, *[forward(90, 20)] * 9, chunk(512, 1000.0))
    plan = capture_proposal.propose(usage.groups(LIKE), capture_proposal.Budget(), like=LIKE)
    assert 40 in sizes_of(plan)
    # Batches that may come have graphs; 40 rows attend to as many tokens as 32 in the same time.
    assert set(batch_size_buckets(64)[3:]) - set(sizes_of(plan)) == {32}
    assert sizes_of(plan, 48) == (16,)
    assert plan.piecewise_rows == (112,)


def test_piecewise_graphs_end_where_those_without_a_plan_do() -> None:
    config = replace(CONFIG, max_num_batched_tokens=8192)
    like = default_plan(config, **DEVICE, shape=PRESETS["qwen3-0.6b"], decode_sms=())
    rows = range(1, 5000, 37)
    groups = usage_of(decode(3), *(forward(n, 0) for n in rows)).groups(like)
    assert {demand.size for demand in groups[capture_proposal.PIECEWISE].demands} == {n for n in rows if n <= 3840}
    assert capture_proposal.propose(groups, capture_proposal.Budget(), like=like).piecewise_rows[-1] == 3824, (
        "the longest, padded to a multiple of 16"
    )


def test_the_whole_gpu_always_holds_the_largest_batch() -> None:
    usage = usage_of(decode(3), decode(20, SPLIT), forward(30, 2))
    plan = capture_proposal.propose(usage.groups(LIKE), capture_proposal.Budget(time_s=DECODE_GRAPH_S), like=LIKE)
    assert plan.decode[0].batch_sizes == (64,)
    assert (len(plan.decode), plan.piecewise_rows) == (1, ())
    for budget in (capture_proposal.Budget(memory_bytes=DECODE_GRAPH_BYTES - 1), capture_proposal.Budget(time_s=0.001)):
        with pytest.raises(ConfigError, match="the whole GPU needs a graph of max_num_seqs=64 rows"):
            capture_proposal.propose(usage.groups(LIKE), budget, like=LIKE)


records = st.lists(
    st.builds(decode, st.integers(1, 64), st.sampled_from([WHOLE_GPU, SPLIT]))
    | st.builds(forward, st.integers(1, 200), st.integers(0, 40)),
    max_size=12,
)


@given(records, st.floats(0.02, 1.0), st.floats(0.03, 4.0), st.sampled_from([16, 32, 80]))
def test_a_proposal_keeps_to_its_budget(
    steps: list[StepRecord], memory_gb: float, time_s: float, num_layers: int
) -> None:
    usage = usage_of(*steps, chunk(512, 100.0), num_layers=num_layers)
    groups = usage.groups(LIKE)
    plan = capture_proposal.propose(groups, capture_proposal.Budget(memory_gb * 1e9, time_s), like=LIKE)
    assert plan.graph_bytes(num_layers) <= memory_gb * 1e9
    assert plan.capture_s(num_layers) <= time_s * (1 + 1e-9)
    assert plan.batch_sizes[WHOLE_GPU][-1] == 64
    assert 0 <= usage.lost_percent(groups, plan) < math.inf


@given(records)
def test_without_limits_no_other_size_saves_time(steps: list[StepRecord]) -> None:
    usage = usage_of(*steps, chunk(512, 100.0))
    groups = usage.groups(LIKE)
    plan = capture_proposal.propose(groups, capture_proposal.Budget(), like=LIKE)
    every = replace(
        LIKE,
        decode=tuple(DecodeSizes(key, groups[key].candidates) for key in groups if key != capture_proposal.PIECEWISE),
        piecewise_rows=groups[capture_proposal.PIECEWISE].candidates,
    )
    assert usage.lost_percent(groups, plan) <= usage.lost_percent(groups, every) * (1 + 1e-9) + 1e-9


def test_the_size_that_saves_most_for_its_cost_comes_first() -> None:
    def padded(size: int, count: int, unserved_ms: float = math.inf) -> capture_proposal.Demand:
        """Each row of padding costs each step 1 ms."""
        return capture_proposal.Demand(size, count, lambda to: count * float(to - size), unserved_ms)

    whole = capture_proposal.Group.of([padded(8, 10), padded(16, 1), padded(64, 1)], (8, 16, 64))
    pieces = capture_proposal.Group.of([padded(16, 1, unserved_ms=300.0)], (16,), layers=2)
    assert (whole.saved_ms(8, [64]), whole.saved_ms(16, [64])) == (560.0, 528.0)
    assert whole.saved_ms(16, [8, 64]) == 48.0
    assert capture_proposal.Budget(100.0, 10.0).share(1, 5) == 0.5
    two = DECODE_GRAPH_S + 2 * PIECE_S
    for budget, expected in (
        (capture_proposal.Budget(time_s=two), ((64,), (16,))),  # a graph more does not fit
        (capture_proposal.Budget(time_s=two + DECODE_GRAPH_S), ((8, 64), (16,))),
        (capture_proposal.Budget(time_s=two + 2 * DECODE_GRAPH_S), ((8, 16, 64), (16,))),
    ):
        plan = capture_proposal.propose({None: whole, capture_proposal.PIECEWISE: pieces}, budget, like=LIKE)
        assert (sizes_of(plan), plan.piecewise_rows) == expected
