"""Green contexts: the driver's own way to confine work to some of the SMs."""

from contextlib import ExitStack
from math import ceil
from typing import Any

from bullet_graph.errors import PartitionError
from bullet_graph.partition.driver import create_lane_streams
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, GpcLayout, Lane, SmPartition, lane_tpcs, sm_ranges
from bullet_graph.partition.probe import SmidProbe

_GreenStream = tuple[int, frozenset[int]]
"""A CUstream, and the SMs on which the probe saw its work."""


class GreenBackend:
    """Gives each lane of a partition a stream in a green context of its own, made at first use.

    Decode takes the first SMs of a split, prefill the remainder, so the two lanes of a partition that fills the GPU
    come from one split. The driver chooses which SMs these are, and the probe reports them; :meth:`close` closes it. A
    driver without green contexts, or one that does not report their granularity, is a PartitionError.
    """

    name = "green"

    def __init__(self, probe: SmidProbe) -> None:
        self._probe = probe
        self._driver = probe.driver
        with ExitStack() as undo:
            undo.callback(probe.close)
            kind = probe.driver.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            self._all = probe.driver.call("cuDeviceGetDevResource", probe.device, kind)
            self.num_sms = int(self._all.sm.smCount)
            self.granularity_sms = int(self._all.sm.smCoscheduledAlignment)
            if self.granularity_sms < 1:
                raise PartitionError(
                    "green contexts need a driver that reports their granularity (CUDA 13.0 or later), but this one "
                    "does not: update the driver or use --partition-backend smctrl"
                )
            granularity, least = self.granularity_sms, int(self._all.sm.minSmPartitionSize)
            self._split_sizes = range(max(1, ceil(least / granularity)) * granularity, self.num_sms, granularity)
            self._splits: dict[int, tuple[Any, Any]] = {}
            self._streams: dict[tuple[Lane, int], _GreenStream] = {}
            for lane, stream in create_lane_streams(probe.driver, undo).items():
                self._streams[lane, self.num_sms] = (stream, frozenset(range(self.num_sms)))
            self._resources = undo.pop_all()

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        return self._green_stream(lane, partition)[0]

    def expected_sms(self, lane: Lane, partition: SmPartition) -> frozenset[int]:
        return self._green_stream(lane, partition)[1]

    def gpc_layout(self) -> GpcLayout:
        """Groups of TPCs that share a GPC, in the driver's order; the last holds the TPCs left over, of any GPC."""
        size = self._split_sizes[0]
        groups, num_groups, _ = self._driver.call(
            "cuDevSmResourceSplitByCount", self.num_sms // size, self._all, 0, size
        )
        layout = []
        for group in groups[:num_groups]:
            with ExitStack() as undo:
                _, sms = self._open(group, "decode", size, undo)
            tpcs = tuple(sorted({sm // SMS_PER_TPC for sm in sms}))
            if len(tpcs) * SMS_PER_TPC != len(sms):
                raise PartitionError(
                    "a green context has to consist of whole TPCs to be followed by a mask, but has SMs "
                    f"{sm_ranges(sms)}: use masks of neighbouring TPCs on this GPU"
                )
            layout.append(tpcs)
        left_over = set(range(self.num_sms // SMS_PER_TPC)).difference(*layout)
        return (*layout, tuple(sorted(left_over))) if left_over else tuple(layout)

    def close(self) -> None:
        self._streams.clear()
        self._resources.close()

    def _green_stream(self, lane: Lane, partition: SmPartition) -> _GreenStream:
        tpcs = lane_tpcs(partition, lane)
        key = (lane, self.num_sms if tpcs is None else tpcs * SMS_PER_TPC)
        if key not in self._streams:
            self._streams[key] = self._open(self._resource(*key), *key, self._resources)
        return self._streams[key]

    def _resource(self, lane: Lane, num_sms: int) -> Any:
        """The first SMs of the GPU for decode, the last for prefill, as a CUdevResource."""
        first = num_sms if lane == "decode" else self.num_sms - num_sms
        if first not in self._split_sizes:
            sizes = [size if lane == "decode" else self.num_sms - size for size in self._split_sizes]
            nearest = sorted(sizes, key=lambda size: abs(size - num_sms))[:2]
            raise PartitionError(
                f"green contexts split this GPU's {self.num_sms} SMs in steps of {self.granularity_sms}, but the "
                f"{lane} lane was to have {num_sms}: choose "
                f"{' or '.join(f'{size} ({size // SMS_PER_TPC} TPCs)' for size in sorted(nearest))}, "
                "or --partition-backend smctrl"
            )
        if first not in self._splits:
            groups, _, remainder = self._driver.call("cuDevSmResourceSplitByCount", 1, self._all, 0, first)
            self._splits[first] = (groups[0], remainder)
        return self._splits[first][LANES.index(lane)]

    def _open(self, resource: Any, lane: Lane, num_sms: int, undo: ExitStack) -> _GreenStream:
        """A stream in a new green context, both of which ``undo`` destroys."""
        call, api = self._driver.call, self._driver.api
        descriptor = call("cuDevResourceGenerateDesc", [resource], 1)
        flags = api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", descriptor, self._probe.device, flags)
        undo.callback(call, "cuGreenCtxDestroy", context)
        non_blocking = api.CUstream_flags.CU_STREAM_NON_BLOCKING
        priority = self._driver.stream_priority(urgent=lane == "decode")
        stream = int(call("cuGreenCtxStreamCreate", context, non_blocking, priority))
        undo.callback(call, "cuStreamDestroy", stream)
        sms = self._probe.run(stream)
        if len(sms) != num_sms:
            raise PartitionError(
                f"a green context of {num_sms} SMs was asked for, but the driver made one of "
                f"{int(resource.sm.smCount)} and its work ran on {len(sms)} (SMs {sm_ranges(sms)}): choose another "
                "size, leave the GPU to this process, or use --partition-backend smctrl"
            )
        return stream, sms
