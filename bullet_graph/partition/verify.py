"""Proof that a partition holds: where its lanes' work really runs, eagerly, in a graph, and both at once."""

import time
from dataclasses import dataclass

from bullet_graph.errors import PartitionError
from bullet_graph.partition.masks import LANES, Lane, asks_for_disjoint_lanes, sm_ranges
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.protocol import PartitionBackend
from bullet_graph.partition.spec import SMS_PER_TPC, WHOLE_GPU, SmPartition


@dataclass(frozen=True, slots=True)
class VerifiedPartition:
    """What was seen of a partition that holds.

    Attributes:
        partition: which one.
        decode_sms: SMs of the decode lane, as ``%smid`` names them.
        prefill_sms: SMs of the prefill lane.
        together: the two lanes were also seen on disjoint SMs while both ran; not for lanes that overlap.
        seconds: the verification took.
    """

    partition: SmPartition
    decode_sms: frozenset[int]
    prefill_sms: frozenset[int]
    together: bool
    seconds: float


def verify(backend: PartitionBackend, partition: SmPartition, probe: SmidProbe) -> VerifiedPartition:
    """Prove a partition, for eager launches and CUDA graphs of both lanes.

    Each lane's graph is launched on the lane's own stream and on an unmasked one: the SMs of the capture must
    hold on both. Afterwards both lanes have the whole GPU.

    Args:
        backend: gives the lanes their streams.
        partition: to prove.
        probe: looks; nothing else may run on the GPU meanwhile.

    Raises:
        PartitionError: work ran on an SM outside the partition, or left one of its SMs out; the lanes share a
            stream, or share SMs that they should not; or the back end cannot make the partition.
    """
    started = time.perf_counter()
    expected = {lane: backend.expected_sms(lane, partition) for lane in LANES}
    disjoint = asks_for_disjoint_lanes(partition, num_tpcs=backend.num_sms // SMS_PER_TPC)
    if disjoint and (shared := expected["decode"] & expected["prefill"]):
        raise PartitionError(
            f"the lanes of {partition} must not share an SM, but {backend.name} gives both SMs {sm_ranges(shared)}: "
            "choose another partition or --partition-backend"
        )
    try:
        for lane, other in zip(LANES, reversed(LANES), strict=True):
            unmasked = backend.stream(other, WHOLE_GPU)
            stream = backend.stream(lane, partition)
            if stream == unmasked:
                raise PartitionError(
                    f"each lane needs a stream of its own, but {backend.name} gives both lanes {stream:#x}: "
                    "report this with the output of `bullet-graph doctor`"
                )
            for how, seen in (
                ("an eager launch", probe.run(stream)),
                ("a graph launched on the lane's stream", probe.run_captured(stream)),
                ("a graph launched on an unmasked stream", probe.run_captured(stream, unmasked)),
            ):
                _check(partition, lane, how, seen, expected[lane])
        if disjoint:
            streams = [backend.stream(lane, partition) for lane in LANES]
            for lane, seen in zip(LANES, probe.run_together(streams), strict=True):
                _check(partition, lane, "an eager launch beside the other lane's", seen, expected[lane])
    finally:
        for lane in LANES:
            backend.stream(lane, WHOLE_GPU)
    seconds = time.perf_counter() - started
    return VerifiedPartition(partition, expected["decode"], expected["prefill"], disjoint, seconds)


def _check(
    partition: SmPartition, lane: Lane, how: str, seen: frozenset[int], expected: frozenset[int]
) -> None:
    if seen != expected:
        raise PartitionError(
            f"the {lane} lane of {partition} must run on exactly SMs {sm_ranges(expected)}, but {how} ran on SMs "
            f"{sm_ranges(seen)} (outside: {sm_ranges(seen - expected)}; missing: {sm_ranges(expected - seen)}): "
            "leave the GPU to this process, or choose another --partition-backend"
        )
