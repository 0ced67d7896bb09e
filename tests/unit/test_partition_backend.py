"""Verification, green contexts, no partitions, and the choice between back ends, on a fake GPU."""

from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
from fakes.fake_driver import CUresult, FakeDriver, MaskBackend, fake_probe

from bullet_graph.errors import PartitionError
from bullet_graph.partition import backend as backend_module
from bullet_graph.partition.backend import OPENERS, NoneBackend, PartitionBackend, open_backend, verify
from bullet_graph.partition.green import GreenBackend
from bullet_graph.partition.masks import LANES, WHOLE_GPU, Lane, SmPartition, lane_masks, sm_ranges
from bullet_graph.partition.probe import SmidProbe

ALL = frozenset(range(132))
PARTITION = SmPartition(8, 58)
SPLITS = [SmPartition(tpcs, 66 - tpcs) for tpcs in (8, 12, 16, 24, 32, 48)]


@pytest.fixture
def masks(gpu: FakeDriver) -> MaskBackend:
    return MaskBackend(fake_probe(gpu))


@pytest.fixture
def green(gpu: FakeDriver) -> GreenBackend:
    return GreenBackend(fake_probe(gpu))


# Verification


@pytest.mark.parametrize("decode_tpcs", [1, 8, 33, 65])
def test_disjoint_lanes_verify(masks: MaskBackend, probe: SmidProbe, decode_tpcs: int) -> None:
    verified = verify(masks, SmPartition(decode_tpcs, 66 - decode_tpcs), probe)
    assert verified["decode"] == frozenset(range(2 * decode_tpcs))
    assert verified["prefill"] == ALL - verified["decode"]


@pytest.mark.parametrize("partition", [WHOLE_GPU, SmPartition(None, 58), SmPartition(66, 8), SmPartition(40, 30)])
def test_overlapping_lanes_are_not_run_together(
    gpu: FakeDriver, masks: MaskBackend, probe: SmidProbe, partition: SmPartition
) -> None:
    # Such lanes can starve each other, so that they never run at the same time.
    gpu.serial = True
    verified = verify(masks, partition, probe)
    assert verified["decode"] & verified["prefill"]


def test_lanes_have_the_whole_gpu_afterwards(gpu: FakeDriver, masks: MaskBackend, probe: SmidProbe) -> None:
    verify(masks, PARTITION, probe)
    assert [gpu.live[stream].sms for stream in masks.streams.values()] == [ALL, ALL]
    masks.planted["prefill"] = frozenset({0})
    with pytest.raises(PartitionError):
        verify(masks, PARTITION, probe)
    assert gpu.live[masks.streams["decode"]].sms == ALL


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    ("outside", "missing"), [({130}, set()), (set(), {4}), ({126, 127, 128}, {0, 1}), (set(range(16, 132)), set())]
)
def test_a_wrong_mask(masks: MaskBackend, probe: SmidProbe, lane: Lane, outside: set[int], missing: set[int]) -> None:
    partition = PARTITION if lane == "decode" else SmPartition(58, 8)
    if lane == "prefill":
        # Prefill has the last SMs: the same mistakes, seen from the other end.
        outside, missing = {131 - sm for sm in outside}, {131 - sm for sm in missing}
    masks.planted[lane] = (masks.expected_sms(lane, partition) | outside) - missing
    with pytest.raises(PartitionError) as caught:
        verify(masks, partition, probe)
    message = str(caught.value)
    assert f"the {lane} lane of {partition} must" in message
    assert f"but an eager launch ran on SMs {sm_ranges(masks.planted[lane])} " in message
    assert f"(outside: {sm_ranges(outside)}; missing: {sm_ranges(missing)})" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graphs_ignore_masks": True}, "decode lane .* a graph launched on an unmasked stream ran on SMs 0-131"),
        ({"busy_sms": frozenset({77})}, r"prefill lane .*missing: 77\): leave the GPU to this process"),
        ({"serial": True}, "had to run at the same time"),
    ],
)
def test_a_gpu_on_which_a_partition_does_not_hold(
    gpu: FakeDriver, masks: MaskBackend, probe: SmidProbe, change: dict[str, object], message: str
) -> None:
    vars(gpu).update(change)
    with pytest.raises(PartitionError, match=message):
        verify(masks, PARTITION, probe)


def test_lanes_that_disturb_each_other(masks: MaskBackend, probe: SmidProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    run_together = probe.run_together

    def disturbed(streams: list[int]) -> list[frozenset[int]]:
        decode, *prefill = run_together(streams)
        return [decode, *(ALL for _ in prefill)]

    monkeypatch.setattr(probe, "run_together", disturbed)
    with pytest.raises(PartitionError, match=r"prefill lane .* eager launch beside the other lane's ran on"):
        verify(masks, PARTITION, probe)


def test_a_back_end_that_cannot_be_right(masks: MaskBackend, probe: SmidProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    for partition in (SmPartition(0, 66), SmPartition(8, -1), SmPartition(67, None)):
        with pytest.raises(PartitionError, match="from 1 to 66 TPCs"):
            verify(masks, partition, probe)
    monkeypatch.setattr(masks, "expected_sms", lambda *_: frozenset(range(16)))
    with pytest.raises(PartitionError, match="must not share an SM, but fake gives both SMs 0-15"):
        verify(masks, PARTITION, probe)


# Green contexts


def test_green_lanes(gpu: FakeDriver, green: GreenBackend) -> None:
    assert (green.name, green.num_sms, green.granularity_sms) == ("green", 132, 8)
    partition = SmPartition(16, 50)
    decode, prefill = (green.expected_sms(lane, partition) for lane in LANES)
    assert sm_ranges(decode) == "0-7, 16-23, 32-39, 48-55"
    assert prefill == ALL - decode
    for one in (WHOLE_GPU, partition):
        assert [gpu.live[green.stream(lane, one)].priority for lane in LANES] == [-5, 0], "decode is urgent"
    # Each stream is made once.
    stream = green.stream("decode", SmPartition(16, 50))
    live = len(gpu.live)
    for prefill_tpcs in (50, None):
        assert green.stream("decode", SmPartition(16, prefill_tpcs)) == stream
    assert len(gpu.live) == live
    assert green.stream("decode", PARTITION) != stream


@pytest.mark.parametrize(
    "partition", [*SPLITS, WHOLE_GPU, *(SmPartition(*of) for of in ((66, None), (16, None), (8, 50), (32, 50)))]
)
def test_green_partitions_verify(green: GreenBackend, probe: SmidProbe, partition: SmPartition) -> None:
    verified = verify(green, partition, probe)
    decode, prefill = 2 * (partition.decode_tpcs or 66), 2 * (partition.prefill_tpcs or 66)
    assert (len(verified["decode"]), len(verified["prefill"])) == (decode, prefill)
    assert len(verified["decode"] & verified["prefill"]) == max(0, decode + prefill - 132)


@pytest.mark.parametrize(
    ("partition", "lane", "nearest"),
    [
        (SmPartition(50, None), "decode", r"96 \(48 TPCs\) or 104 \(52 TPCs\)"),
        (SmPartition(None, 57), "prefill", r"108 \(54 TPCs\) or 116 \(58 TPCs\)"),
        (SmPartition(None, 65), "prefill", r"116 \(58 TPCs\) or 124 \(62 TPCs\)"),
        (SmPartition(0, None), "decode", r"8 \(4 TPCs\) or 16 \(8 TPCs\)"),
        (SmPartition(-4, None), "decode", r"8 \(4 TPCs\) or 16 \(8 TPCs\)"),
        (SmPartition(80, None), "decode", r"120 \(60 TPCs\) or 128 \(64 TPCs\)"),
        (SmPartition(None, 0), "prefill", r"4 \(2 TPCs\) or 12 \(6 TPCs\)"),
    ],
)
def test_a_size_off_the_granularity(green: GreenBackend, partition: SmPartition, lane: Lane, nearest: str) -> None:
    for ask in (green.stream, green.expected_sms):
        with pytest.raises(PartitionError, match=f"steps of 8, but the {lane} lane.*choose {nearest}"):
            ask(lane, partition)


def test_a_green_context_of_another_size(gpu: FakeDriver, green: GreenBackend) -> None:
    gpu.green_extra = (100, 101)
    with pytest.raises(PartitionError, match=r"16 SMs was asked for.*of 16 and its work ran on 18 \(SMs "):
        green.stream("decode", PARTITION)
    green.close()
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_the_gpc_layout_follows_the_green_contexts(gpu: FakeDriver, green: GreenBackend) -> None:
    live = len(gpu.live)
    layout = green.gpc_layout()
    assert len(gpu.live) == live
    assert layout[:2] == ((0, 8, 16, 24), (1, 9, 17, 25))
    assert layout[-1] == (64, 65)
    for tpcs in (4, 16, 48, 64):
        partition = SmPartition(tpcs, None)
        mask = lane_masks(partition, num_tpcs=66, layout=layout)["decode"]
        assert mask.sms == green.expected_sms("decode", partition)
    gpu.busy_sms = frozenset({0})
    gpu.green_extra = (131,)
    with pytest.raises(PartitionError, match="whole TPCs to be followed by a mask, but has SMs 1, 16-17"):
        green.gpc_layout()


def test_a_driver_without_green_contexts(gpu: FakeDriver) -> None:
    for name in ("cuDeviceGetDevResource", "cuStreamCreateWithPriority"):
        gpu.fail = {name: CUresult.CUDA_ERROR_INVALID_VALUE}
        with pytest.raises(PartitionError, match=name):
            GreenBackend(fake_probe(gpu))
    gpu.fail, gpu.granularity = {}, 0
    with pytest.raises(PartitionError, match=r"reports their granularity \(CUDA 13.0 or later\)"):
        GreenBackend(fake_probe(gpu))
    assert (gpu.live, gpu.retained) == ({}, 0)


@pytest.mark.parametrize(
    "name",
    [*("cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc"), *("cuGreenCtxCreate", "cuGreenCtxStreamCreate")],
)
def test_a_green_call_that_fails(gpu: FakeDriver, green: GreenBackend, probe: SmidProbe, name: str) -> None:
    gpu.fail = {name: CUresult.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(PartitionError, match=name):
        green.stream("decode", SPLITS[0])
    gpu.fail = {}
    assert len(verify(green, SPLITS[0], probe)["decode"]) == 16


# No partitions


def test_none_has_the_whole_gpu_only(gpu: FakeDriver, probe: SmidProbe) -> None:
    backend = NoneBackend(fake_probe(gpu))
    assert (backend.name, backend.num_sms, backend.granularity_sms) == ("none", 132, 132)
    assert verify(backend, WHOLE_GPU, probe) == dict.fromkeys(LANES, ALL)
    for ask in (backend.stream, backend.expected_sms):
        with pytest.raises(PartitionError, match=r"none has the whole GPU only.*smctrl, green or auto"):
            ask("decode", SmPartition(16, 50))


# The choice


Opener = Callable[[SmidProbe], PartitionBackend]


def opened(gpu: FakeDriver, name: str, *partitions: SmPartition, smctrl: Opener) -> tuple[PartitionBackend, str]:
    """A choice between the real back ends, but for stream masks this one, on one fake GPU."""
    openers = {"smctrl": smctrl, "green": GreenBackend, "none": NoneBackend}
    with patch.multiple(backend_module, OPENERS=openers, SmidProbe=lambda _: fake_probe(gpu)):
        return open_backend(name, partitions)


def no_offset(probe: SmidProbe) -> PartitionBackend:
    probe.close()
    raise PartitionError("there is no offset for this driver")


@pytest.mark.parametrize(
    ("name", "partitions", "why"),
    [
        ("auto", (*SPLITS, WHOLE_GPU), "smctrl: 7 partitions verified"),
        # No masks are opened for the whole GPU.
        ("auto", (), "none: 0 partitions verified"),
        ("auto", (WHOLE_GPU,), "none: 1 partitions verified"),
        ("smctrl", SPLITS, "smctrl: 6 partitions verified"),
        ("green", SPLITS, "green: 6 partitions verified"),
        ("none", (WHOLE_GPU,), "none: 1 partitions verified"),
    ],
)
def test_the_first_verified_is_taken(gpu: FakeDriver, name: str, partitions: tuple[SmPartition, ...], why: str) -> None:
    assert list(OPENERS) == ["smctrl", "green", "none"]
    masks = Mock(side_effect=MaskBackend)
    backend, found = opened(gpu, name, *partitions, smctrl=masks)
    assert found == why
    assert masks.called == why.startswith("smctrl")
    assert backend.name == why.partition(":")[0].replace("smctrl", "fake")
    assert backend.stream("decode", (*partitions, WHOLE_GPU)[0])
    backend.close()
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_auto_passes_over_one_that_cannot_be_opened(gpu: FakeDriver, probe: SmidProbe) -> None:
    backend, why = opened(gpu, "auto", *SPLITS, smctrl=no_offset)
    assert why == "green: 6 partitions verified; smctrl refused: there is no offset for this driver"
    verify(backend, SPLITS[0], probe)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "auto",
            r"--partition-backend auto has to hold SmPartition\(decode_tpcs=7, prefill_tpcs=59\), "
            "but smctrl refused: there is no offset.*green refused: .* in steps of 8"
            ".*none refused: .* has the whole GPU only",
        ),
        ("smctrl", "--partition-backend smctrl has to hold SmPartition.*, but smctrl refused: there"),
        ("none", "but none refused: partition back end none has the whole GPU only"),
    ],
)
def test_every_reason_is_named_where_none_is_left(gpu: FakeDriver, name: str, message: str) -> None:
    with pytest.raises(PartitionError, match=f"(?s){message}"):
        opened(gpu, name, SmPartition(7, 59), smctrl=no_offset)
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_a_failure_that_is_no_refusal_still_closes(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bullet_graph.partition.backend.verify", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        opened(gpu, "auto", *SPLITS, smctrl=MaskBackend)
    assert (gpu.live, gpu.retained) == ({}, 0)
