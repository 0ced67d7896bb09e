"""A GPU behind the functions of ``cuda.bindings.driver`` that partitions use: streams, graphs, green contexts.

Kernels run when they are launched. Of a kernel only the probe's effect is known: the SMs that its blocks get.
"""
# ruff: noqa: N802, N815 - the names are CUDA's.

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from types import SimpleNamespace
from typing import Any

from fakes.fake_streams import FakeLibcuda, honoured_sms, object_address, point_to

from bullet_graph.partition.driver import CudaDriver
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, Lane, SmPartition, lane_masks
from bullet_graph.partition.probe import SmidProbe

NUM_GPCS = 8
PRIMARY_CONTEXT = 0xC0


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100


# Named and valued as in CUDA.
CUdevice_attribute = IntEnum("CUdevice_attribute", {"CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16})
CUstream_flags = IntEnum("CUstream_flags", {"CU_STREAM_NON_BLOCKING": 1})
CUstreamCaptureMode = IntEnum("CUstreamCaptureMode", {"CU_STREAM_CAPTURE_MODE_RELAXED": 2})
CUdevResourceType = IntEnum("CUdevResourceType", {"CU_DEV_RESOURCE_TYPE_SM": 1})
CUgreenCtxCreate_flags = IntEnum("CUgreenCtxCreate_flags", {"CU_GREEN_CTX_DEFAULT_STREAM": 1})


@dataclass
class DevResource:
    sms: tuple[int, ...]
    sm: SimpleNamespace


@dataclass
class Stream:
    """``sms``: what its context and its mask, if any, leave it."""

    sms: frozenset[int]
    priority: int
    captured: list[Callable[[frozenset[int]], None]] | None = None
    captured_sms: frozenset[int] = frozenset()


@dataclass
class Graph:
    kernels: list[Callable[[frozenset[int]], None]]
    sms: frozenset[int]


def _destroyer(kind: type) -> Callable[["FakeDriver", int], None]:
    def destroy(gpu: "FakeDriver", handle: int) -> None:
        assert isinstance(gpu.live.pop(handle), kind)

    return destroy


@dataclass
class FakeDriver:
    """The module and the GPU in one."""

    num_sms: int = 132
    granularity: int = 8  # SMs by which green contexts grow: 0 for a driver that does not tell it
    fail: dict[str, CUresult] = field(default_factory=dict)  # what these functions return from now on
    missing: set[str] = field(default_factory=set)  # functions that this libcuda does not have
    graphs_ignore_masks: bool = False  # a graph's kernels obey the stream it is launched on
    busy_sms: frozenset[int] = frozenset()  # taken by somebody else; no block gets there
    serial: bool = False  # launches never run at the same time
    lost_blocks: int = 0  # how many blocks leave no record
    green_extra: tuple[int, ...] = ()  # SMs that a green context has beyond the split's
    current_context: int = 0
    current_device: int = 0
    retained: int = 0
    live: dict[int, Any] = field(default_factory=dict)  # what was created and not destroyed
    # Makes the streams, whose objects hold a mask at this offset; None: streams know no masks.
    libcuda: FakeLibcuda | None = None
    mask_offset: int = 0x51C
    shared: int | None = None  # a handle whose object all streams of ``libcuda`` have

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUstream_flags = CUstream_flags
    CUstreamCaptureMode = CUstreamCaptureMode
    CUdevResourceType = CUdevResourceType
    CUgreenCtxCreate_flags = CUgreenCtxCreate_flags
    CUfunction = int

    def __post_init__(self) -> None:
        self._handles = count(0x1000, 0x10)

    def __getattribute__(self, name: str) -> Any:
        if name[:2] == "cu" and name[2].isupper():
            if name in self.missing:
                raise RuntimeError(f'Function "{name}" not found')
            if name in self.fail:
                return lambda *_: (self.fail[name],)
            function = object.__getattribute__(self, name)
            return lambda *arguments: (CUresult.CUDA_SUCCESS, *(function(*arguments) or ()))
        return object.__getattribute__(self, name)

    def _create(self, thing: Any) -> int:
        handle = next(self._handles)
        self.live[handle] = thing
        return handle

    # Devices and contexts.
    def cuInit(self, flags: int) -> None:
        assert flags == 0

    def cuDeviceGet(self, ordinal: int) -> tuple[int]:
        return (ordinal,)

    def cuDeviceGetAttribute(self, attribute: IntEnum, device: int) -> tuple[int]:
        assert (attribute, device) == (16, 0)
        return (self.num_sms,)

    def cuCtxGetCurrent(self) -> tuple[int]:
        return (self.current_context,)

    def cuCtxSetCurrent(self, context: int) -> None:
        self.current_context = context

    def cuCtxGetDevice(self) -> tuple[int]:
        return (self.current_device,)

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return 0, -5

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        assert device == 0
        self.retained += 1
        return (PRIMARY_CONTEXT,)

    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        assert device == 0
        self.retained -= 1
        # What lives in it would go with it.
        assert self.retained > 0 or not self.live

    # Code and memory.
    def cuLibraryLoadData(self, image: bytes, *options: Any) -> tuple[int]:
        assert image.endswith(b"\0")
        assert options == ([], [], 0, [], [], 0)
        return (self._create(image),)

    def cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int]:
        assert b".entry " + name in self.live[library]
        return (library + 1,)

    cuLibraryUnload = _destroyer(bytes)

    def cuMemAlloc(self, num_bytes: int) -> tuple[int]:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.live[ctypes.addressof(buffer)] = buffer
        return (ctypes.addressof(buffer),)

    cuMemFree = _destroyer(ctypes.Array)

    def cuMemsetD32Async(self, address: int, value: int, num_words: int, stream: int) -> None:
        assert stream in self.live
        words = (ctypes.c_uint32 * num_words).from_address(address)
        words[:] = [value] * num_words

    def cuMemcpyDtoHAsync(self, host: Any, address: int, num_bytes: int, stream: int) -> None:
        assert stream in self.live
        ctypes.memmove(host.buffer_info()[0], address, num_bytes)

    # Streams, kernels, graphs.
    def _stream(self, handle: int) -> Stream:
        stream = self.live[handle]
        assert isinstance(stream, Stream)
        return stream

    def cuStreamCreateWithPriority(self, flags: IntEnum, priority: int) -> tuple[int]:
        assert flags == CUstream_flags.CU_STREAM_NON_BLOCKING
        assert self.current_context
        stream = Stream(frozenset(range(self.num_sms)), priority)
        if self.libcuda is None:
            return (self._create(stream),)
        handle = self.libcuda.stream()
        if self.shared is not None:
            point_to(handle, object_address(self.shared))
        self.live[handle] = stream
        return (handle,)

    @property
    def streams(self) -> dict[int, Stream]:
        """Those of ``live``."""
        return {handle: thing for handle, thing in self.live.items() if isinstance(thing, Stream)}

    def _sms(self, handle: int) -> frozenset[int]:
        """The SMs that the stream may use."""
        if self.libcuda is None:
            return self._stream(handle).sms
        return honoured_sms(handle, self.mask_offset, num_sms=self.num_sms)

    cuStreamDestroy = _destroyer(Stream)

    def cuStreamSynchronize(self, stream: int) -> None:
        assert self._stream(stream).captured is None

    def cuLaunchKernel(self, function: int, *arguments: Any) -> None:
        *sizes, shared_bytes, handle, (values, types), extra = arguments
        assert function - 1 in self.live
        assert (sizes[1:], shared_bytes, extra) == ([1, 1, 1024, 1, 1], 0, 0)
        assert [ctypes.sizeof(kind) for kind in types] == [8, 8, 4, 4, 8, 8]
        records, _, mine, everyone, hold_ns, _ = values
        assert hold_ns > 0

        def run(sms: frozenset[int]) -> None:
            free = sorted(sms - self.busy_sms)
            alone = 0x8000_0000 if self.serial and mine != everyone else 0
            words = (ctypes.c_uint32 * sizes[0]).from_address(records)
            for block in range(sizes[0] - self.lost_blocks if free else 0):
                words[block] = free[block % len(free)] | alone

        stream = self._stream(handle)
        if stream.captured is None:
            run(self._sms(handle))
        else:
            stream.captured.append(run)

    def cuStreamBeginCapture(self, handle: int, mode: IntEnum) -> None:
        assert mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        stream = self._stream(handle)
        stream.captured, stream.captured_sms = [], self._sms(handle)

    def cuStreamEndCapture(self, handle: int) -> tuple[int]:
        stream = self._stream(handle)
        assert stream.captured is not None
        graph = Graph(stream.captured, stream.captured_sms)
        stream.captured = None
        return (self._create(graph),)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int]:
        assert flags == 0
        return (self._create(self.live[graph]),)

    def cuGraphLaunch(self, executable: int, stream: int) -> None:
        graph = self.live[executable]
        for kernel in graph.kernels:
            kernel(self._sms(stream) if self.graphs_ignore_masks else graph.sms)

    cuGraphExecDestroy = _destroyer(Graph)
    cuGraphDestroy = _destroyer(Graph)

    # Green contexts.
    def _resource(self, sms: tuple[int, ...]) -> DevResource:
        step = self.granularity
        sm = SimpleNamespace(smCount=len(sms), minSmPartitionSize=step, smCoscheduledAlignment=step)
        return DevResource(sms, sm)

    def cuDeviceGetDevResource(self, device: int, kind: IntEnum) -> tuple[DevResource]:
        assert (device, kind) == (0, CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        return (self._resource(tuple(range(self.num_sms))),)

    def cuDevSmResourceSplitByCount(
        self, num_groups: int, resource: DevResource, flags: int, min_count: int
    ) -> tuple[list[DevResource], int, DevResource]:
        assert flags == 0
        assert 0 < min_count <= resource.sm.smCount
        step = self.granularity // 2
        # Of each GPC in turn, as many TPCs as share a granule; what fills no granule comes last.
        gpcs = [range(gpc, self.num_sms // 2, NUM_GPCS) for gpc in range(NUM_GPCS)]
        granules = [gpc[at : at + step] for at in range(0, self.num_sms, step) for gpc in gpcs]
        whole = [granule for granule in granules if len(granule) == step]
        rest = [granule for granule in granules if len(granule) < step]
        sms = [sm for granule in whole + rest for tpc in granule for sm in (2 * tpc, 2 * tpc + 1)]
        size = -(-min_count // self.granularity) * self.granularity
        num_groups = min(num_groups, len(sms) // size)
        groups = [self._resource(tuple(sms[i * size : (i + 1) * size])) for i in range(num_groups)]
        return groups, num_groups, self._resource(tuple(sms[num_groups * size :]))

    def cuDevResourceGenerateDesc(self, resources: list[DevResource], number: int) -> tuple[DevResource]:
        assert number == len(resources) == 1
        return (resources[0],)

    def cuGreenCtxCreate(self, descriptor: DevResource, device: int, flags: IntEnum) -> tuple[int]:
        assert (device, flags) == (0, CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        return (self._create(descriptor),)

    cuGreenCtxDestroy = _destroyer(DevResource)

    def cuGreenCtxStreamCreate(self, context: int, flags: IntEnum, priority: int) -> tuple[int]:
        assert flags == CUstream_flags.CU_STREAM_NON_BLOCKING
        return (self._create(Stream(frozenset(self.live[context].sms + self.green_extra), priority)),)


class MaskBackend:
    """A back end whose masks can be wrong: ``planted`` has a lane's SMs in place of the right ones."""

    name = "fake"
    granularity_sms = SMS_PER_TPC

    def __init__(self, probe: SmidProbe) -> None:
        self.num_sms = probe.num_sms
        self.planted: dict[Lane, frozenset[int]] = {}
        self._probe = probe
        self.streams = {lane: probe.driver.create_stream() for lane in LANES}

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        stream = self.streams[lane]
        self._probe.driver.api.live[stream].sms = self.planted.get(lane, self.expected_sms(lane, partition))
        return stream

    def expected_sms(self, lane: Lane, partition: SmPartition) -> frozenset[int]:
        return lane_masks(partition, num_tpcs=self.num_sms // SMS_PER_TPC)[lane].sms

    def close(self) -> None:
        for stream in set(self.streams.values()):
            self._probe.driver.call("cuStreamDestroy", stream)
        self._probe.close()


def fake_probe(gpu: FakeDriver) -> SmidProbe:
    return SmidProbe(driver=CudaDriver(gpu))
