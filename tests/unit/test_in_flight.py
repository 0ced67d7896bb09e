"""In-flight launches: which is oldest, when tokens are expected, which SMs are taken, and what is said of stalls."""

import re

import numpy as np
import pytest
from core_loop import MODEL, CoreLoop

from bullet_graph.config import EngineConfig
from bullet_graph.engine.in_flight import InFlight, LaneSms, Launch, stalled_launches
from bullet_graph.engine.sequence import ScheduledStep, Sequence
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, WHOLE_GPU, Lane, SmPartition, lane_masks, partition_of
from bullet_graph.runtime.step import Placement, Step
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo

NUM_SMS = 132
SPLIT_16, SPLIT_32, SPLIT_64 = (partition_of(sms, num_sms=NUM_SMS) for sms in (16, 32, 64))


def launch(
    ticket: int,
    lane: Lane,
    partition: SmPartition = WHOLE_GPU,
    *,
    last_layer: int | None = None,
    predicted_ms: float | None = None,
    takes_turns: bool = False,
    sampled: tuple[Sequence, ...] = (),
) -> Launch:
    placement = Placement(lane, partition, 0, last_layer, takes_turns=takes_turns)
    scheduled = ScheduledStep(Step((), None, None, None), (), sampled, sampled, (0,) * len(sampled))
    return Launch(ticket, scheduled, placement, "split", predicted_ms, beside=False)


def in_flight(*launches: Launch, num_sms: int | None = NUM_SMS, now_s: float = 1.0) -> InFlight:
    found = InFlight(num_sms)
    for one in launches:
        found.add(one, now_s)
    return found


def test_launches_of_a_lane_end_in_order() -> None:
    first, second, other = launch(1, "decode"), launch(3, "decode"), launch(2, "prefill")
    launches = in_flight(first, other)
    launches.add(second, 2.0)
    assert launches.heads() == {1: "decode", 2: "prefill"}
    assert launches.oldest["decode"] == (first, 1.0)
    assert launches.pop("decode", 5.0) is first
    # It has been the oldest since the one before it ended.
    assert launches.oldest["decode"] == (second, 5.0)
    assert launches.pop("decode", 6.0) is second
    assert launches.oldest["decode"] is None
    assert launches
    assert launches.pop("prefill", 7.0) is other
    assert not launches
    assert launches.oldest["prefill"] is None


# ---- SMs ----


@pytest.mark.parametrize(
    ("running", "wanted", "fits"),
    [
        (SPLIT_32, SPLIT_32, True),
        # The prefill lane of the wider split begins above both decode lanes; that of the narrower one does not.
        (SPLIT_64, SPLIT_32, True),
        (SPLIT_32, SPLIT_64, False),
        (SPLIT_32, WHOLE_GPU, False),
        (WHOLE_GPU, SPLIT_32, False),
    ],
)
def test_decode_fits_beside_slices_on_other_sms(running: SmPartition, wanted: SmPartition, fits: bool) -> None:
    launches = in_flight(launch(1, "prefill", running))
    assert launches.fit_beside("decode", wanted) is fits
    assert launches.fit_beside("prefill", wanted), "its own lane is no obstacle"
    assert in_flight(launch(1, "decode", wanted)).fit_beside("prefill", running) is fits


def test_every_launch_of_the_other_lane_counts() -> None:
    both = in_flight(launch(1, "prefill", SPLIT_32), launch(2, "prefill", SPLIT_64))
    assert not both.fit_beside("decode", SPLIT_64)
    both.pop("prefill", 2.0)
    assert both.fit_beside("decode", SPLIT_64)


def test_without_a_gpu_nothing_fits_beside_anything() -> None:
    assert not in_flight(launch(1, "prefill", SPLIT_32), num_sms=None).fit_beside("decode", SPLIT_32)
    assert InFlight(None).fit_beside("decode", SPLIT_32)


@pytest.mark.parametrize(
    ("planned", "rows", "most_rows", "chosen"),
    [
        *((fits, 8, 8, fits) for fits in (SPLIT_32, SPLIT_16)),
        # Slices of a split still run: decode stays on its side of it, unless no graph there holds the batch.
        (WHOLE_GPU, 8, 8, SPLIT_32),
        (SPLIT_64, 8, 8, SPLIT_32),
        (WHOLE_GPU, 9, 8, WHOLE_GPU),
        (WHOLE_GPU, 999, None, SPLIT_32),
    ],
)
def test_decode_avoids_the_sms_of_slices_in_flight(
    planned: SmPartition, rows: int, most_rows: int | None, chosen: SmPartition
) -> None:
    launches = in_flight(launch(1, "prefill", SPLIT_64), launch(2, "prefill", SPLIT_32))

    def max_rows(partition: SmPartition) -> int | None:
        assert partition == SPLIT_32, "the split of the newest slice"
        return most_rows

    assert launches.decode_partition(planned, rows, max_rows) == chosen
    assert in_flight(launch(3, "decode")).decode_partition(planned, rows, max_rows) == planned


# ---- when tokens are expected ----


def sequence(slo: Slo, *, output_tokens: int, first_token_s: float | None = None) -> Sequence:
    params = SamplingParams(max_tokens=9)
    found = Sequence("a", 0, np.zeros(4, dtype=np.int32), params, 0, frozenset(), slo, arrival_s=10.0)
    found.num_tokens += output_tokens
    found.first_token_s = first_token_s
    return found


def test_decode_waits_for_slices_whose_sms_it_shares_or_that_take_turns() -> None:
    step = launch(1, "decode", SPLIT_32, predicted_ms=10.0)
    for slices, due_s in (
        ((), 20.007),
        ((launch(2, "prefill", SPLIT_32, predicted_ms=40.0),), 20.007),
        ((launch(2, "prefill", predicted_ms=40.0),), 20.044),
        ((launch(2, "prefill", SPLIT_32, predicted_ms=40.0, takes_turns=True),), 20.044),
    ):
        launches = in_flight(step, now_s=19.997)
        for one in slices:
            launches.add(one, 19.997)
        # 3 ms of each have passed.
        assert launches.due_s("decode", 20.0) == pytest.approx(due_s), slices
    assert in_flight().due_s("decode", 20.0) == 20.0
    assert in_flight(step, now_s=5.0).due_s("decode", 20.0) == 20.0, "late is not in the past"


def test_first_and_last_tokens_are_awaited() -> None:
    first = sequence(Slo(ttft_ms=500), output_tokens=1)
    middle = sequence(Slo(tpot_ms=20), output_tokens=5, first_token_s=10.2)
    last = sequence(Slo(tpot_ms=20), output_tokens=9, first_token_s=10.2)
    no_target = sequence(NO_TARGETS, output_tokens=9, first_token_s=10.2)
    launches = in_flight(
        launch(1, "decode", SPLIT_32, predicted_ms=10.0, sampled=(middle, last, no_target)),
        launch(2, "prefill", SPLIT_32, predicted_ms=30.0, sampled=(first,)),
        now_s=10.3,
    )
    expected, due = zip(*launches.awaited_s(10.3), strict=True)
    assert expected == pytest.approx((10.31, 10.33))
    # The last of 9 tokens is due 8 intervals after the first.
    assert due == pytest.approx((10.36, 10.5))
    unfinished = in_flight(launch(2, "prefill", last_layer=5, sampled=(first,)))
    assert unfinished.awaited_s(10.3) == [], "these layers bring no token"


# ---- stalls, and what lanes are counted to use ----

CONFIG = EngineConfig.of("llama-3.1-8b", max_num_seqs=16, policy="split:48")


@pytest.fixture
def loop() -> CoreLoop:
    """A split with work on both lanes."""
    loop = CoreLoop("split:48", max_model_len=4096, num_kv_blocks=4000)
    for _ in range(7):
        loop.add(50, 300)
    for _ in range(40):
        loop.step()
    loop.add(3000, 5)
    while None in loop.core.in_flight.oldest.values():
        loop.step()
    return loop


@pytest.fixture
def lane_sms(loop: CoreLoop) -> LaneSms:
    num_tpcs = MODEL.num_sms // SMS_PER_TPC
    masks = {p: lane_masks(p, num_tpcs=num_tpcs) for p in loop.executor.partitions}
    return {(lane, p): m[lane].sms for p, m in masks.items() for lane in LANES}


def told_of(loop: CoreLoop, lane_sms: LaneSms, *, limit_s: float = -1) -> tuple[str, ...]:
    now_s = loop.executor.now()
    return stalled_launches(loop.core.in_flight, now_s=now_s, limit_s=limit_s, config=CONFIG, lane_sms=lane_sms)


def test_both_lanes_are_named_with_graph_and_mask(loop: CoreLoop, lane_sms: LaneSms) -> None:
    told = told_of(loop, lane_sms)
    by_lane = {text.partition(" ")[0]: text for text in told}
    assert by_lane.keys() == {"decode", "prefill"}
    graph = "decode graph of batch size 8 (7 rows) on 48 SMs (TPC mask 0xffffff, SMs 0-47) has not finished after "
    assert graph in by_lane["decode"]
    assert re.search(r"\d+ prompt tokens \(1 prompts\) and 0 decode rows, layers 0 to \d+ on", by_lane["prefill"])
    prefill_sms = MODEL.num_sms - 48
    assert f" on {prefill_sms} SMs (TPC mask {((1 << prefill_sms // 2) - 1) << 24:#x}, SMs 48-" in by_lane["prefill"]
    tickets = [loop.core.in_flight.oldest[text.partition(" ")[0]][0].ticket for text in told]  # type: ignore[arg-type, index]
    assert tickets == sorted(tickets)


def test_only_what_is_older_than_the_limit_is_told(loop: CoreLoop, lane_sms: LaneSms) -> None:
    assert told_of(loop, lane_sms, limit_s=10.0) == ()
    loop.run()
    assert told_of(loop, lane_sms) == ()
    assert set(loop.core.in_flight.oldest.values()) == {None}


def test_a_launch_that_the_driver_has_not_taken_comes_last(loop: CoreLoop, lane_sms: LaneSms) -> None:
    oldest = loop.core.in_flight.oldest["decode"]
    assert oldest is not None
    flight, since_s = oldest
    assert loop.core.in_flight.launching is None
    loop.core.in_flight.launching = flight.scheduled.step, flight.placement, since_s
    *_, last = told_of(loop, lane_sms)
    assert "is still being launched after" in last


def test_time_and_sms_of_the_lanes_are_counted(loop: CoreLoop) -> None:
    assert loop.core.stats().lane_sms == {"decode": 48, "prefill": MODEL.num_sms - 48}
    loop.run()
    stats = loop.core.stats()
    assert stats.lane_sms == {"decode": 0, "prefill": 0}
    assert sum(stats.lane_seconds.values()) == pytest.approx(sum(stats.policy_seconds.values()))
    # Slices of the prefill lane ran on the other SMs, but for those after the last sequence had ended.
    assert stats.lane_sm_seconds["prefill"] <= stats.lane_seconds["prefill"] * MODEL.num_sms + 1e-9
    assert stats.lane_sm_seconds["prefill"] >= stats.lane_seconds["prefill"] * (MODEL.num_sms - 48) - 1e-9
    assert stats.lane_sm_seconds["decode"] < stats.lane_seconds["decode"] * MODEL.num_sms
