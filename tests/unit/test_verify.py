"""Verification: what holds is proven, what does not is named with the SMs seen."""

import pytest
from fakes.fake_driver import FakeDriver
from fakes.mask_backend import MaskBackend, fake_probe

from bullet_graph.errors import PartitionError
from bullet_graph.partition.backend import verify
from bullet_graph.partition.masks import LANES, WHOLE_GPU, Lane, SmPartition, sm_ranges
from bullet_graph.partition.probe import SmidProbe

PARTITION = SmPartition(8, 58)
ALL = frozenset(range(132))


@pytest.fixture
def gpu() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def backend(gpu: FakeDriver) -> MaskBackend:
    return MaskBackend(fake_probe(gpu))


@pytest.fixture
def probe(gpu: FakeDriver) -> SmidProbe:
    return fake_probe(gpu)


@pytest.mark.parametrize("decode_tpcs", [1, 8, 33, 65])
def test_disjoint_lanes(backend: MaskBackend, probe: SmidProbe, decode_tpcs: int) -> None:
    partition = SmPartition(decode_tpcs, 66 - decode_tpcs)
    verified = verify(backend, partition, probe)
    assert verified.partition == partition
    assert verified.decode_sms == frozenset(range(2 * decode_tpcs))
    assert verified.prefill_sms == ALL - verified.decode_sms
    assert verified.together
    assert 0 < verified.seconds < 5


@pytest.mark.parametrize(
    "partition", [WHOLE_GPU, SmPartition(None, 58), SmPartition(66, 8), SmPartition(40, 30)]
)
def test_overlapping_lanes_are_not_looked_at_together(
    gpu: FakeDriver, backend: MaskBackend, probe: SmidProbe, partition: SmPartition
) -> None:
    # Such lanes can starve each other, so that they never run at the same time.
    gpu.serial = True
    verified = verify(backend, partition, probe)
    assert not verified.together
    assert verified.decode_sms & verified.prefill_sms


def test_lanes_have_the_whole_gpu_afterwards(backend: MaskBackend, probe: SmidProbe) -> None:
    verify(backend, PARTITION, probe)
    assert [backend.bound_sms(lane) for lane in LANES] == [ALL, ALL]
    backend.planted["prefill"] = frozenset({0})
    with pytest.raises(PartitionError):
        verify(backend, PARTITION, probe)
    assert backend.bound_sms("decode") == ALL


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    ("outside", "missing"),
    [({130}, set()), (set(), {4}), ({126, 127, 128}, {0, 1}), (set(range(16, 132)), set())],
)
def test_a_wrong_mask(
    backend: MaskBackend, probe: SmidProbe, lane: Lane, outside: set[int], missing: set[int]
) -> None:
    partition = SmPartition(8, 58) if lane == "decode" else SmPartition(58, 8)
    if lane == "prefill":
        # Prefill has the last SMs: the same mistakes, seen from the other end.
        outside, missing = {131 - sm for sm in outside}, {131 - sm for sm in missing}
    backend.planted[lane] = (backend.expected_sms(lane, partition) | outside) - missing
    with pytest.raises(PartitionError) as caught:
        verify(backend, partition, probe)
    message = str(caught.value)
    seen = sm_ranges(backend.planted[lane])
    assert f"the {lane} lane of {partition} must" in message
    assert f"but an eager launch ran on SMs {seen} " in message
    assert f"(outside: {sm_ranges(outside)}; missing: {sm_ranges(missing)})" in message


def test_a_mask_that_graphs_do_not_keep(gpu: FakeDriver, backend: MaskBackend, probe: SmidProbe) -> None:
    gpu.graphs_ignore_masks = True
    with pytest.raises(
        PartitionError, match=r"decode lane .* a graph launched on an unmasked stream ran on SMs 0-131"
    ):
        verify(backend, PARTITION, probe)


def test_a_busy_sm(gpu: FakeDriver, backend: MaskBackend, probe: SmidProbe) -> None:
    gpu.busy_sms = frozenset({77})
    with pytest.raises(PartitionError, match=r"prefill lane .*missing: 77\): leave the GPU to this process"):
        verify(backend, PARTITION, probe)


def test_lanes_that_never_run_at_the_same_time(
    gpu: FakeDriver, backend: MaskBackend, probe: SmidProbe
) -> None:
    gpu.serial = True
    with pytest.raises(PartitionError, match="had to run at the same time"):
        verify(backend, PARTITION, probe)


def test_lanes_that_disturb_each_other(
    backend: MaskBackend, probe: SmidProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_together = probe.run_together

    def disturbed(streams: list[int]) -> list[frozenset[int]]:
        decode, *prefill = run_together(streams)
        return [decode, *(ALL for _ in prefill)]

    monkeypatch.setattr(probe, "run_together", disturbed)
    with pytest.raises(
        PartitionError, match=r"prefill lane .* an eager launch beside the other lane's ran on"
    ):
        verify(backend, PARTITION, probe)


def test_lanes_with_one_stream(backend: MaskBackend, probe: SmidProbe) -> None:
    backend.share_a_stream()
    for partition in (PARTITION, SmPartition(40, 40), WHOLE_GPU):
        with pytest.raises(PartitionError, match="each lane needs a stream of its own, but fake gives both"):
            verify(backend, partition, probe)


def test_a_back_end_that_gives_both_lanes_one_sm(
    backend: MaskBackend, probe: SmidProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "expected_sms", lambda *_: frozenset(range(16)))
    with pytest.raises(PartitionError, match="must not share an SM, but fake gives both SMs 0-15"):
        verify(backend, PARTITION, probe)


@pytest.mark.parametrize("partition", [SmPartition(0, 66), SmPartition(8, -1), SmPartition(67, None)])
def test_a_partition_that_cannot_be(backend: MaskBackend, probe: SmidProbe, partition: SmPartition) -> None:
    with pytest.raises(PartitionError, match="from 1 to 66 TPCs"):
        verify(backend, partition, probe)
