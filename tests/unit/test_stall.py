"""What is told of a lane that makes no progress: its graph, its layers, its mask. And what lanes are counted to use."""

import re

import pytest
from core_loop import MODEL, CoreLoop, make_planner

from bullet_graph.config import EngineConfig
from bullet_graph.engine.in_flight import LaneSms, stalled_launches
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, lane_masks

CONFIG = EngineConfig(model="llama-3.1-8b", max_num_seqs=16, policy="split:48")  # type: ignore[arg-type]


@pytest.fixture
def loop() -> CoreLoop:
    """A split with work on both lanes."""
    loop = CoreLoop(make_planner("split:48"), max_model_len=4096, num_kv_blocks=4000)
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


def told_of(loop: CoreLoop, *, limit_s: float, config: EngineConfig, lane_sms: LaneSms) -> tuple[str, ...]:
    now_s = loop.executor.now()
    return stalled_launches(
        loop.core.in_flight, now_s=now_s, limit_s=limit_s, config=config, lane_sms=lane_sms
    )


def test_both_lanes_are_named_with_graph_and_mask(loop: CoreLoop, lane_sms: LaneSms) -> None:
    told = told_of(loop, limit_s=-1, config=CONFIG, lane_sms=lane_sms)
    by_lane = {text.partition(" ")[0]: text for text in told}
    assert by_lane.keys() == {"decode", "prefill"}
    assert by_lane["decode"].startswith(
        "decode lane: the decode graph of batch size 8 (7 rows) on 48 SMs (TPC mask 0xffffff, SMs 0-47) has not "
        "finished after "
    )
    assert re.search(
        r"a forward of \d+ prompt tokens \(1 prompts\) and 0 decode rows, layers 0 to \d+ on",
        by_lane["prefill"],
    )
    prefill_sms = MODEL.num_sms - 48
    assert (
        f" on {prefill_sms} SMs (TPC mask {((1 << prefill_sms // 2) - 1) << 24:#x}, SMs 48-"
        in by_lane["prefill"]
    )
    tickets = [loop.core.in_flight.oldest[text.partition(" ")[0]][0].ticket for text in told]  # type: ignore[arg-type, index]
    assert tickets == sorted(tickets)


def test_only_what_is_older_than_the_limit_is_told(loop: CoreLoop, lane_sms: LaneSms) -> None:
    assert told_of(loop, limit_s=10.0, config=CONFIG, lane_sms=lane_sms) == ()
    loop.run()
    assert told_of(loop, limit_s=-1, config=CONFIG, lane_sms=lane_sms) == ()
    assert set(loop.core.in_flight.oldest.values()) == {None}


def test_a_launch_that_the_driver_has_not_taken_comes_last(loop: CoreLoop, lane_sms: LaneSms) -> None:
    oldest = loop.core.in_flight.oldest["decode"]
    assert oldest is not None
    flight, since_s = oldest
    assert loop.core.in_flight.launching is None
    loop.core.in_flight.launching = flight.scheduled.step, flight.placement, since_s
    *_, last = told_of(loop, limit_s=-1, config=CONFIG, lane_sms=lane_sms)
    assert "is still being launched after" in last


def test_without_a_gpu_there_is_neither_graph_nor_mask(loop: CoreLoop) -> None:
    told = told_of(loop, limit_s=-1, config=CONFIG, lane_sms={})
    assert any(
        "a decode step of 7 rows, launched kernel by kernel on a device without SMs" in text for text in told
    )


def test_time_and_sms_of_the_lanes_are_counted(loop: CoreLoop) -> None:
    now = loop.core.stats()
    assert now.lane_sms == {"decode": 48, "prefill": MODEL.num_sms - 48}
    loop.run()
    stats = loop.core.stats()
    assert stats.lane_sms == {"decode": 0, "prefill": 0}
    assert sum(stats.lane_seconds.values()) == pytest.approx(sum(stats.policy_seconds.values()))
    # Slices of the prefill lane ran on the other SMs, but for those after the last sequence had ended.
    assert stats.lane_sm_seconds["prefill"] <= stats.lane_seconds["prefill"] * MODEL.num_sms + 1e-9
    assert stats.lane_sm_seconds["prefill"] >= stats.lane_seconds["prefill"] * (MODEL.num_sms - 48) - 1e-9
    assert stats.lane_sm_seconds["decode"] < stats.lane_seconds["decode"] * MODEL.num_sms
