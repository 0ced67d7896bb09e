"""Partition back ends: what they offer, the proof that a partition holds, and the choice of a back end."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType
from typing import Protocol

from bullet_graph.errors import PartitionError
from bullet_graph.partition.driver import create_lane_streams
from bullet_graph.partition.green import GreenBackend
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, WHOLE_GPU, Lane, SmPartition, fits_side_by_side, sm_ranges
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.smctrl import SmctrlBackend

AUTO = "auto"


class PartitionBackend(Protocol):
    """Gives each lane a stream whose work stays on the lane's SMs; a lane's size is a multiple of ``granularity_sms``.

    Both questions raise PartitionError for a partition that the back end cannot make.
    """

    name: str
    num_sms: int
    granularity_sms: int

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        """The CUstream on which the lane's work for this partition must be captured or launched.

        Valid until the lane's next call, which may bind the same stream to other SMs. Captured graphs keep theirs.
        """

    def expected_sms(self, lane: Lane, partition: SmPartition) -> frozenset[int]:
        """The SMs, as ``%smid`` names them, on which that work must run."""

    def close(self) -> None:
        """Free the streams, whose work must have finished."""


class NoneBackend:
    """No partitions: a plain stream for each lane; closes its probe."""

    name = "none"

    def __init__(self, probe: SmidProbe) -> None:
        self.num_sms = self.granularity_sms = probe.num_sms
        with ExitStack() as undo:
            undo.callback(probe.close)
            self._streams = create_lane_streams(probe.driver, undo)
            self.close = undo.pop_all().close

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        self.expected_sms(lane, partition)  # refuses a part of the GPU
        return self._streams[lane]

    def expected_sms(self, lane: Lane, partition: SmPartition) -> frozenset[int]:  # noqa: ARG002 - protocol
        if partition != WHOLE_GPU:
            raise PartitionError(
                f"partition back end none has the whole GPU only, but {partition} was asked for: "
                "use --partition-backend smctrl, green or auto"
            )
        return frozenset(range(self.num_sms))


def verify(backend: PartitionBackend, partition: SmPartition, probe: SmidProbe) -> Mapping[Lane, frozenset[int]]:
    """Prove a partition, for eager launches and CUDA graphs of both lanes, with nothing else on the GPU.

    Each lane's graph is launched on the lane's own stream and on an unmasked one: the SMs of the capture must hold on
    both. Lanes that do not overlap must also run at the same time. Afterwards both lanes have the whole GPU. Returns
    the SMs of each lane, as ``%smid`` names them.

    Raises PartitionError where work ran on an SM outside the partition, or left one of its SMs out; the lanes share a
    mask, or SMs that they should not; or the back end cannot make the partition.
    """
    expected = {lane: backend.expected_sms(lane, partition) for lane in LANES}
    disjoint = fits_side_by_side(partition, num_tpcs=backend.num_sms // SMS_PER_TPC)
    if disjoint and (shared := expected["decode"] & expected["prefill"]):
        raise PartitionError(
            f"the lanes of {partition} must not share an SM, but {backend.name} gives both SMs {sm_ranges(shared)}: "
            "choose another partition or --partition-backend"
        )
    try:
        for lane, other in zip(LANES, reversed(LANES), strict=True):
            unmasked = backend.stream(other, WHOLE_GPU)
            stream = backend.stream(lane, partition)
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
    return expected


def _check(partition: SmPartition, lane: Lane, how: str, seen: frozenset[int], expected: frozenset[int]) -> None:
    if seen != expected:
        raise PartitionError(
            f"the {lane} lane of {partition} must run on exactly SMs {sm_ranges(expected)}, but {how} ran on SMs "
            f"{sm_ranges(seen)} (outside: {sm_ranges(seen - expected)}; missing: {sm_ranges(expected - seen)}): "
            "leave the GPU to this process, or choose another --partition-backend"
        )


def open_smctrl(probe: SmidProbe) -> SmctrlBackend:
    """Stream masks in GPC order, which a short-lived split into green contexts reveals."""
    with ExitStack() as undo:
        undo.callback(probe.close)
        with closing(GreenBackend(SmidProbe(int(probe.device), driver=probe.driver))) as green:
            layout = green.gpc_layout()
        backend = SmctrlBackend(probe, layout=layout)
        undo.pop_all()
    return backend


BackendOpener = Callable[[SmidProbe], PartitionBackend]
"""Opens a back end, which owns the probe from then on."""

OPENERS: Mapping[str, BackendOpener] = MappingProxyType(
    {"smctrl": open_smctrl, "green": GreenBackend, "none": NoneBackend}
)
"""By name, the preferred first."""


def open_backend(name: str, partitions: Sequence[SmPartition], *, device: int = 0) -> tuple[PartitionBackend, str]:
    """Open a back end that holds all the partitions, each proven on this GPU, and say why in one line.

    The name "auto" takes the first that can be opened and verifies; for the whole GPU alone it takes "none". Nothing
    else may run on the GPU, named by its ordinal, meanwhile.

    Raises PartitionError where it cannot be opened here, or a partition does not hold.
    """
    candidates = [name] if name != AUTO else list(OPENERS)
    if name == AUTO and set(partitions) <= {WHOLE_GPU}:
        candidates = ["none"]
    refused: list[str] = []
    with closing(SmidProbe(device)) as probe:
        for candidate in candidates:
            try:
                with ExitStack() as undo:
                    backend = OPENERS[candidate](SmidProbe(device))
                    undo.callback(backend.close)
                    for partition in partitions:
                        verify(backend, partition, probe)
                    undo.pop_all()
            except PartitionError as error:
                refused.append(f"{candidate} refused: {error}")
                continue
            return backend, "; ".join([f"{candidate}: {len(partitions)} partitions verified", *refused])
    raise PartitionError(
        f"--partition-backend {name} has to hold {', '.join(map(str, partitions))}, but {'; '.join(refused)}"
    )
