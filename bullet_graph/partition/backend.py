"""The back ends there are, and the choice of one that verifies."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType

from bullet_graph.errors import PartitionError
from bullet_graph.partition.green import GreenBackend
from bullet_graph.partition.masks import LANES, Lane
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.protocol import PartitionBackend
from bullet_graph.partition.smctrl import SmctrlBackend
from bullet_graph.partition.spec import WHOLE_GPU, SmPartition
from bullet_graph.partition.verify import verify

AUTO = "auto"


class NoneBackend:
    """No partitions: a plain stream for each lane.

    Args:
        probe: of the GPU; closed with the back end.
    """

    name = "none"

    def __init__(self, probe: SmidProbe) -> None:
        self.num_sms = self.granularity_sms = probe.num_sms
        with ExitStack() as undo:
            undo.callback(probe.close)
            self._streams: dict[Lane, int] = {}
            for lane in LANES:
                self._streams[lane] = probe.driver.create_stream(urgent=lane == "decode")
                undo.callback(probe.driver.call, "cuStreamDestroy", self._streams[lane])
            self._resources = undo.pop_all()

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        """See :meth:`PartitionBackend.stream`."""
        _require_whole_gpu(partition)
        return self._streams[lane]

    def expected_sms(self, lane: Lane, partition: SmPartition) -> frozenset[int]:  # noqa: ARG002 - protocol
        """See :meth:`PartitionBackend.expected_sms`."""
        _require_whole_gpu(partition)
        return frozenset(range(self.num_sms))

    def close(self) -> None:
        """See :meth:`PartitionBackend.close`."""
        self._resources.close()


def _require_whole_gpu(partition: SmPartition) -> None:
    if partition != WHOLE_GPU:
        raise PartitionError(
            f"partition back end none has the whole GPU only, but {partition} was asked for: "
            "use --partition-backend smctrl, green or auto"
        )


def open_smctrl(probe: SmidProbe) -> SmctrlBackend:
    """Stream masks in the order of the GPCs, which a short-lived split into green contexts tells.

    Args:
        probe: of the GPU; the back end owns it from then on.

    Raises:
        PartitionError: the driver's offset is not known, or it has no green contexts to learn the GPCs from.
    """
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


def open_backend(
    name: str,
    partitions: Sequence[SmPartition],
    *,
    device: int = 0,
    openers: Mapping[str, BackendOpener] = OPENERS,
    make_probe: Callable[[int], SmidProbe] = SmidProbe,
) -> tuple[PartitionBackend, str]:
    """Open a back end that holds all the partitions, each proven on this GPU.

    Args:
        name: of the back end; "auto" takes the first that can be opened and verifies.
        partitions: that will be used. For none but the whole GPU "auto" takes "none".
        device: ordinal of the GPU; nothing else may run on it meanwhile.
        openers: the back ends to choose from, the preferred first.
        make_probe: of the device.

    Returns:
        The back end, to be closed by the caller, and a line for people: which, and why not those before it.

    Raises:
        PartitionError: no such back end, or it cannot be opened here, or a partition does not hold.
    """
    if name != AUTO and name not in openers:
        raise PartitionError(
            f"the partition back end must be one of {', '.join((AUTO, *openers))}, but found {name!r}: choose one"
        )
    candidates = [name] if name != AUTO else list(openers)
    if name == AUTO and set(partitions) <= {WHOLE_GPU}:
        candidates = ["none"]
    refused: list[str] = []
    with closing(make_probe(device)) as probe:
        for candidate in candidates:
            try:
                backend = _verified(openers[candidate](make_probe(device)), partitions, probe)
            except PartitionError as error:
                refused.append(f"{candidate} refused: {error}")
                continue
            return backend, "; ".join([f"{candidate}: {len(partitions)} partitions verified", *refused])
    raise PartitionError(
        f"--partition-backend {name} has to hold {', '.join(map(str, partitions))}, but {'; '.join(refused)}"
    )


def _verified(
    backend: PartitionBackend, partitions: Sequence[SmPartition], probe: SmidProbe
) -> PartitionBackend:
    with ExitStack() as undo:
        undo.callback(backend.close)
        for partition in partitions:
            verify(backend, partition, probe)
        undo.pop_all()
    return backend
