"""SM partitions on the GPU: where work runs eagerly, in graphs and with two lanes at once, and what it costs."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from bullet_graph.errors import PartitionError
from bullet_graph.partition.backend import OPENERS, PartitionBackend, open_backend, verify
from bullet_graph.partition.green import GreenBackend
from bullet_graph.partition.masks import (
    LANES,
    SMS_PER_TPC,
    WHOLE_GPU,
    Lane,
    SmPartition,
    TpcMask,
    lane_masks,
    partition_of,
    sm_ranges,
)
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.smctrl import SmctrlBackend, bind

Record = Callable[[str, object], None]
DECODE_SMS = (16, 24, 32, 48, 64, 96)


@pytest.fixture(scope="module")
def probe() -> Iterator[SmidProbe]:
    # As in the engine: PyTorch's context is there first, and the GPU is idle.
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with closing(SmidProbe()) as probe:
        yield probe


@pytest.fixture(scope="module", params=["smctrl", "green"])
def backend(request: pytest.FixtureRequest, probe: SmidProbe) -> Iterator[PartitionBackend]:
    with closing(OPENERS[request.param](SmidProbe(driver=probe.driver))) as backend:
        yield backend


@pytest.fixture
def smctrl(probe: SmidProbe) -> Iterator[SmctrlBackend]:
    with closing(SmctrlBackend(SmidProbe(driver=probe.driver))) as backend:
        yield backend


def split(decode_sms: int, num_sms: int) -> SmPartition:
    return partition_of(decode_sms, num_sms=num_sms)


def splits(num_sms: int) -> list[SmPartition]:
    return [split(decode_sms, num_sms) for decode_sms in DECODE_SMS]


# Where work runs. The probe is asked directly: verification is tested below, not relied on.


@pytest.mark.parametrize("decode_sms", DECODE_SMS)
def test_each_lane_keeps_to_its_sms(backend: PartitionBackend, probe: SmidProbe, decode_sms: int) -> None:
    partition = split(decode_sms, backend.num_sms)
    expected = {lane: backend.expected_sms(lane, partition) for lane in LANES}
    assert len(expected["decode"]) == decode_sms
    assert expected["decode"] | expected["prefill"] == frozenset(range(backend.num_sms))
    streams = {lane: backend.stream(lane, partition) for lane in LANES}
    plain = probe.driver.create_stream()
    seen = {
        "eager": {lane: probe.run(streams[lane]) for lane in LANES},
        "graph": {lane: probe.run_captured(streams[lane]) for lane in LANES},
        "graph_on_unmasked_stream": {lane: probe.run_captured(streams[lane], plain) for lane in LANES},
        "graph_on_other_lanes_stream": {
            lane: probe.run_captured(streams[lane], streams[other])
            for lane, other in zip(LANES, reversed(LANES), strict=True)
        },
        "both_lanes_at_once": dict(zip(LANES, probe.run_together([streams[lane] for lane in LANES]), strict=True)),
    }
    probe.driver.call("cuStreamDestroy", plain)
    for how, by_lane in seen.items():
        assert by_lane == expected, how
    assert seen["both_lanes_at_once"]["decode"].isdisjoint(seen["both_lanes_at_once"]["prefill"])


def test_a_graph_captured_without_a_mask_ignores_the_launch_streams(
    backend: PartitionBackend, probe: SmidProbe
) -> None:
    masked = backend.stream("decode", split(32, backend.num_sms))
    assert probe.run_captured(backend.stream("prefill", WHOLE_GPU), masked) == frozenset(range(backend.num_sms))
    backend.stream("decode", WHOLE_GPU)


@pytest.mark.parametrize("lane", LANES)
def test_the_whole_gpu_comes_back_after_a_partition(backend: PartitionBackend, probe: SmidProbe, lane: Lane) -> None:
    for partition in splits(backend.num_sms):
        assert len(probe.run(backend.stream(lane, partition))) < backend.num_sms
        whole = backend.stream(lane, WHOLE_GPU)
        assert probe.run(whole) == probe.run_captured(whole) == frozenset(range(backend.num_sms))


@pytest.mark.parametrize("sizes", [(64, 96), (132, 96), (96, 132), (40, 80)])
def test_lanes_that_overlap_or_leave_sms_out(smctrl: SmctrlBackend, probe: SmidProbe, sizes: tuple[int, int]) -> None:
    verified = verify(smctrl, SmPartition(*(min(size, smctrl.num_sms) // SMS_PER_TPC for size in sizes)), probe)
    shared = len(verified["decode"] & verified["prefill"])
    assert shared == max(0, len(verified["decode"]) + len(verified["prefill"]) - smctrl.num_sms)


def test_masks_that_follow_the_gpcs(probe: SmidProbe) -> None:
    green = GreenBackend(SmidProbe())
    smctrl = SmctrlBackend(SmidProbe(), layout=green.gpc_layout())
    for partition in splits(probe.num_sms):
        verify(smctrl, partition, probe)
        ours, theirs = (backend.expected_sms("decode", partition) for backend in (smctrl, green))
        assert ours == theirs
    smctrl.close()
    green.close()


# Verification


def test_verification_is_quick(backend: PartitionBackend, probe: SmidProbe, record_property: Record) -> None:
    started = time.perf_counter()
    verified = [verify(backend, partition, probe) for partition in splits(backend.num_sms)]
    seconds = time.perf_counter() - started
    record_property("backend", backend.name)
    record_property("num_partitions", len(verified))
    record_property("verification_seconds", seconds)
    assert not any(one["decode"] & one["prefill"] for one in verified)
    assert seconds < 1.0


class Planted:
    """A back end behind whose back one lane's stream is bound to other SMs, or is another stream."""

    def __init__(self, real: PartitionBackend, lane: Lane, plant: Callable[[int], int]) -> None:
        self._real, self._lane, self._plant = real, lane, plant

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        stream = self._real.stream(lane, partition)
        return self._plant(stream) if lane == self._lane and partition != WHOLE_GPU else stream


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("mistake", ["one TPC too many", "one TPC too few", "shifted by one", "inverted", "none"])
def test_a_planted_wrong_mask_is_caught(smctrl: SmctrlBackend, probe: SmidProbe, lane: Lane, mistake: str) -> None:
    partition = split(32, smctrl.num_sms)
    num_tpcs = smctrl.num_sms // SMS_PER_TPC
    right = lane_masks(partition, num_tpcs=num_tpcs)[lane]
    every_tpc, count = (1 << num_tpcs) - 1, right.bits.bit_count()
    # Decode has the first TPCs, prefill the last.
    first = 0 if lane == "decode" else num_tpcs - count
    step = 1 if lane == "decode" else -1

    def contiguous(count: int, start: int) -> int:
        return ((1 << count) - 1) << start

    bits = {
        "one TPC too many": contiguous(count + 1, first + min(step, 0)),
        "one TPC too few": contiguous(count - 1, first + 1),
        "shifted by one": contiguous(count, first + step),
        "inverted": every_tpc & ~right.bits,
        "none": every_tpc,
    }[mistake]
    wrong = TpcMask(bits, num_tpcs)

    def plant(stream: int) -> int:
        bind(stream, smctrl.offset, wrong)
        return stream

    with pytest.raises(PartitionError) as caught:
        verify(Planted(smctrl, lane, plant), partition, probe)
    assert f"the {lane} lane" in str(caught.value)
    assert f"an eager launch ran on SMs {sm_ranges(wrong.sms)} " in str(caught.value)
    verify(smctrl, partition, probe)


def test_a_planted_wrong_green_context_is_caught(probe: SmidProbe) -> None:
    green = GreenBackend(SmidProbe())
    other = green.stream("decode", split(48, green.num_sms))
    with pytest.raises(PartitionError, match=r"the decode lane .* an eager launch ran on"):
        verify(Planted(green, "decode", lambda _: other), split(32, green.num_sms), probe)
    green.close()


def test_a_capture_without_the_mask_is_caught(smctrl: SmctrlBackend) -> None:
    class Forgetful(SmidProbe):
        def run_captured(self, stream: int, launch_stream: int | None = None) -> frozenset[int]:
            smctrl.stream("decode", WHOLE_GPU)
            return super().run_captured(stream, launch_stream)

    probe = Forgetful()
    with pytest.raises(PartitionError, match="a graph launched on the lane's stream ran on SMs 0-"):
        verify(smctrl, split(32, smctrl.num_sms), probe)
    probe.close()


# Costs and choices


def test_changing_the_mask_is_cheap(backend: PartitionBackend, record_property: Record) -> None:
    partitions = splits(backend.num_sms)
    costs_us = []
    for round_index in range(3000):
        partition = partitions[round_index % len(partitions)]
        started = time.perf_counter_ns()
        backend.stream("decode", partition)
        costs_us.append((time.perf_counter_ns() - started) / 1e3)
    backend.stream("decode", WHOLE_GPU)
    # The first rounds make the green contexts.
    costs_us = sorted(costs_us[1000:])
    median_us = statistics.median(costs_us)
    record_property("backend", backend.name)
    record_property("mask_change_us_p50", median_us)
    record_property("mask_change_us_p99", costs_us[len(costs_us) * 99 // 100])
    assert median_us <= 10.0


@pytest.mark.parametrize(
    ("name", "chosen"), [("auto", "smctrl"), ("smctrl", "smctrl"), ("green", "green"), ("none", "none")]
)
def test_the_choice_of_a_back_end(probe: SmidProbe, name: str, chosen: str) -> None:
    backend, _ = open_backend(name, [WHOLE_GPU] if name == "none" else splits(probe.num_sms))
    assert backend.name == chosen
    assert probe.run(backend.stream("prefill", WHOLE_GPU)) == frozenset(range(probe.num_sms))
    backend.close()
