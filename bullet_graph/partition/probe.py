"""The SMs on which a stream's work really runs: a kernel that spreads out and records ``%smid``."""

import ctypes
from array import array
from collections.abc import Sequence
from contextlib import ExitStack

from bullet_graph.errors import PartitionError
from bullet_graph.partition.driver import CudaDriver

# Why every SM that a launch may use takes at least one of its blocks. A block has 1024 threads, all of which stay
# until its end, and an SM holds at most 2048: at most two blocks fit on an SM at a time. The grid has four blocks for
# each SM of the GPU, so at least half of it waits at first, however few SMs the launch may use. While blocks wait, the
# hardware fills free room on a usable SM in well under a microsecond. An SM could stay without a block only if the
# others ran the whole grid, two full rounds of HOLD_NS each, before it got its first. The caller must keep the SM free:
# a kernel that occupies it for longer than the probe runs would hide it.
BLOCKS_PER_SM = 4
THREADS_PER_BLOCK = 1024
HOLD_NS = 20_000
PATIENCE_NS = 100_000_000
"""How long launches that must run at the same time wait for one another."""
MAX_TOGETHER = 8

_UNWRITTEN = 0xFFFF_FFFF
_ALONE = 0x8000_0000
_KERNEL = b"record_sms"
# Bit i of `arrived` is set once launch i has a block running; a block holds its SM only once all bits in `all` are
# set. A block that waited in vain flags its record, and sets all bits so that no other waits again.
PTX = b"""
.version 7.0
.target sm_75
.address_size 64

.visible .entry record_sms(
    .param .u64 param_records,
    .param .u64 param_arrived,
    .param .u32 param_mine,
    .param .u32 param_all,
    .param .u64 param_hold_ns,
    .param .u64 param_patience_ns
)
.maxntid 1024, 1, 1
{
    .reg .pred %p;
    .reg .b32 %mine, %all, %seen, %record, %index;
    .reg .b64 %records, %arrived, %hold, %patience, %start, %elapsed, %offset;

    mov.u32 %index, %tid.x;
    setp.ne.u32 %p, %index, 0;
    @%p bra LEAVE;

    ld.param.u64 %records, [param_records];
    ld.param.u64 %arrived, [param_arrived];
    ld.param.u32 %mine, [param_mine];
    ld.param.u32 %all, [param_all];
    ld.param.u64 %hold, [param_hold_ns];
    ld.param.u64 %patience, [param_patience_ns];
    cvta.to.global.u64 %records, %records;
    cvta.to.global.u64 %arrived, %arrived;

    mov.u32 %record, %smid;
    mov.u64 %start, %globaltimer;
    red.relaxed.gpu.global.or.b32 [%arrived], %mine;
MEET:
    ld.relaxed.gpu.global.u32 %seen, [%arrived];
    and.b32 %seen, %seen, %all;
    setp.eq.u32 %p, %seen, %all;
    @%p bra HOLD;
    mov.u64 %elapsed, %globaltimer;
    sub.u64 %elapsed, %elapsed, %start;
    setp.lt.u64 %p, %elapsed, %patience;
    @%p bra MEET;
    or.b32 %record, %record, 0x80000000;
    red.relaxed.gpu.global.or.b32 [%arrived], %all;
HOLD:
    mov.u64 %start, %globaltimer;
SPIN:
    mov.u64 %elapsed, %globaltimer;
    sub.u64 %elapsed, %elapsed, %start;
    setp.lt.u64 %p, %elapsed, %hold;
    @%p bra SPIN;

    mov.u32 %index, %ctaid.x;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %records, %records, %offset;
    st.global.u32 [%records], %record;
LEAVE:
    barrier.sync 0;
    ret;
}
\0"""


class SmidProbe:
    """Launches a kernel that reports the SMs it ran on; only the thread that made the probe may use it.

    It works in the thread's current CUDA context, and makes the device's primary context current where there is none.
    Nothing else should run on the GPU meanwhile: a busy SM may take no block of the probe. Raises PartitionError
    where a CUDA call fails, and when made without cuda-python, driver or GPU, or in another GPU's context.
    """

    def __init__(self, device: int = 0, *, driver: CudaDriver | None = None) -> None:
        self.driver = driver or CudaDriver()
        call, api = self.driver.call, self.driver.api
        self.device = call("cuDeviceGet", device)
        attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.num_sms = int(call("cuDeviceGetAttribute", attribute, self.device))
        self._num_blocks = BLOCKS_PER_SM * self.num_sms
        with ExitStack() as undo:
            # Retained even where it is current already, so that it outlives whoever made it so.
            context = call("cuDevicePrimaryCtxRetain", self.device)
            undo.callback(call, "cuDevicePrimaryCtxRelease", self.device)
            if not int(call("cuCtxGetCurrent")):
                call("cuCtxSetCurrent", context)
            if int(found := call("cuCtxGetDevice")) != int(self.device):
                raise PartitionError(
                    f"the probe of GPU {device} needs that GPU's context, but the current one is of GPU {int(found)}: "
                    "make the right device current first"
                )
            library = call("cuLibraryLoadData", PTX, [], [], 0, [], [], 0)
            undo.callback(call, "cuLibraryUnload", library)
            # A kernel belongs to no context: a launch takes the stream's, with green contexts not the current one.
            self._function = api.CUfunction(int(call("cuLibraryGetKernel", library, _KERNEL)))
            # `arrived`, then the records of each launch: 32 bits each.
            self._num_words = 1 + MAX_TOGETHER * self._num_blocks
            memory = call("cuMemAlloc", 4 * self._num_words)
            undo.callback(call, "cuMemFree", memory)
            self._arrived = int(memory)
            self._resources = undo.pop_all()

    def run(self, stream: int) -> frozenset[int]:
        """The SMs that an eager launch on ``stream`` (a CUstream) uses."""
        return self.run_together([stream])[0]

    def run_together(self, streams: Sequence[int]) -> list[frozenset[int]]:
        """The SMs of eager launches on several CUstreams; PartitionError unless they run at the same time.

        Each stream needs at least one SM that no other takes.
        """
        if not 0 < len(set(streams)) == len(streams) <= MAX_TOGETHER:
            raise PartitionError(
                f"the probe needs 1 to {MAX_TOGETHER} different streams, but found {list(streams)}: "
                "give each lane a stream of its own"
            )
        self._erase(streams[0])
        for index, stream in enumerate(streams):
            self._launch(stream, index, len(streams))
        return [self._read(stream, index, len(streams)) for index, stream in enumerate(streams)]

    def run_captured(self, stream: int, launch_stream: int | None = None) -> frozenset[int]:
        """The SMs of a CUDA graph whose one kernel was captured on a CUstream, and launched on it or another."""
        launch_stream = stream if launch_stream is None else launch_stream
        call = self.driver.call
        self._erase(launch_stream)
        with ExitStack() as undo:
            # Relaxed: the kernel may be loaded into the stream's context only now, which other modes refuse.
            call("cuStreamBeginCapture", stream, self.driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                self._launch(stream, 0, 1)
            finally:
                graph = call("cuStreamEndCapture", stream)
                undo.callback(call, "cuGraphDestroy", graph)
            executable = call("cuGraphInstantiate", graph, 0)
            undo.callback(call, "cuGraphExecDestroy", executable)
            call("cuGraphLaunch", executable, launch_stream)
            return self._read(launch_stream, 0, 1)

    def _records(self, index: int) -> int:
        return self._arrived + 4 * (1 + index * self._num_blocks)

    def _erase(self, stream: int) -> None:
        self.driver.call("cuMemsetD32Async", self._arrived, 0, 1, stream)
        self.driver.call("cuMemsetD32Async", self._records(0), _UNWRITTEN, self._num_words - 1, stream)
        self.driver.call("cuStreamSynchronize", stream)

    def _launch(self, stream: int, index: int, num_launches: int) -> None:
        mine, everyone = 1 << index, (1 << num_launches) - 1
        values = (self._records(index), self._arrived, mine, everyone, HOLD_NS, PATIENCE_NS)
        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        types = (u64, u64, u32, u32, u64, u64)
        grid, block = (self._num_blocks, 1, 1), (THREADS_PER_BLOCK, 1, 1)
        self.driver.call("cuLaunchKernel", self._function, *grid, *block, 0, stream, (values, types), 0)

    def _read(self, stream: int, index: int, num_launches: int) -> frozenset[int]:
        records = array("I", bytes(4 * self._num_blocks))
        self.driver.call("cuMemcpyDtoHAsync", records, self._records(index), len(records) * records.itemsize, stream)
        self.driver.call("cuStreamSynchronize", stream)
        if _UNWRITTEN in records:
            raise PartitionError(
                f"all {self._num_blocks} blocks of the probe had to run on stream {stream:#x}, but "
                f"{records.count(_UNWRITTEN)} left no record: report this with the output of `bullet-graph doctor`"
            )
        if any(record & _ALONE for record in records):
            raise PartitionError(
                f"the probe's launches on {num_launches} streams had to run at the same time, but the one on stream "
                f"{stream:#x} waited {PATIENCE_NS / 1e6:g} ms in vain: leave the GPU to this process, and give "
                "each lane SMs of its own"
            )
        return frozenset(records)

    def close(self) -> None:
        """Free the kernel and its memory, and release the context."""
        self._resources.close()
