"""Two ranks whose sums run while a kernel holds SMs, to prove that they keep to their lane, or behind a late rank."""

import ctypes
import time
from pathlib import Path

import torch

from bullet_graph.kernels.communicator import Communicator
from bullet_graph.kernels.gpu import captured
from bullet_graph.partition import smctrl
from bullet_graph.partition.backend import open_backend
from bullet_graph.partition.driver import CudaDriver
from bullet_graph.partition.masks import LANES, WHOLE_GPU, Lane, partition_of
from bullet_graph.runtime.cuda import lane_stream
from bullet_graph.runtime.ranks import make_communicators

# A block that takes all shared memory of its SM for a time, so that no other block fits.
PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry hold(.param .u64 param_ns)
{
    .reg .pred %p;
    .reg .b64 %ns, %start, %elapsed;
    ld.param.u64 %ns, [param_ns];
    mov.u64 %start, %globaltimer;
WAIT:
    mov.u64 %elapsed, %globaltimer;
    sub.u64 %elapsed, %elapsed, %start;
    setp.lt.u64 %p, %elapsed, %ns;
    @%p bra WAIT;
    ret;
}
\0"""
HELD_MS = 300


def run_sums_beside_held_sms(rank: int, folder: Path) -> None:
    """One of two ranks: captured sums on the decode lane, while its own SMs are held, and while all others are."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    partition = partition_of(32, num_sms=properties.multi_processor_count)
    backend, _ = open_backend("smctrl", (WHOLE_GPU, partition), device=rank)
    made: dict[Lane, Communicator] = {}
    make_communicators(folder, rank, 2, device, made)
    communicator = made["decode"]
    driver = CudaDriver()
    kernel = driver.call("cuLibraryGetKernel", driver.call("cuLibraryLoadData", PTX, [], [], 0, [], [], 0), b"hold")
    function = driver.api.CUfunction(int(kernel))
    shared_bytes = properties.shared_memory_per_block_optin
    attribute = driver.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.call("cuKernelSetAttribute", attribute, shared_bytes, kernel, driver.call("cuDeviceGet", rank))

    x = torch.ones(64, 8192, dtype=torch.bfloat16, device=device)
    lane = lane_stream(backend, "decode", partition, device)
    with torch.cuda.stream(lane):
        communicator.all_reduce(x)
        lane.synchronize()
        with captured(torch.cuda.graph_pool_handle()) as graph:
            communicator.all_reduce(x)
    finished = {}
    for held in LANES:
        blocker = driver.create_stream()
        smctrl.register(blocker)
        smctrl.bind(blocker, backend.offset, backend._mask(held, partition))  # type: ignore[attr-defined]
        # Both ranks begin at the same time.
        communicator.all_reduce(x)
        torch.cuda.synchronize()
        grid, hold_ns = (len(backend.expected_sms(held, partition)), 1, 1), ((HELD_MS * 10**6,), (ctypes.c_uint64,))
        driver.call("cuLaunchKernel", function, *grid, *(32, 1, 1), shared_bytes, blocker, hold_ns, 0)
        time.sleep(0.01)
        done = torch.cuda.Event()
        with torch.cuda.stream(lane):
            graph.replay()
            done.record()
        time.sleep(HELD_MS / 2e3)
        finished[held] = done.query()
        torch.cuda.synchronize()
    del graph
    for each in made.values():
        each.close()
    backend.close()
    assert finished == {"decode": False, "prefill": True}, finished


def run_sums_behind_a_late_rank(rank: int, folder: Path) -> None:
    """One of two ranks: a hundred captured sums, for which rank 1 comes 5 ms late every other time."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    made: dict[Lane, Communicator] = {}
    make_communicators(folder, rank, 2, device, made)
    x = torch.zeros(384, 8192, dtype=torch.bfloat16, device=device)
    stream, times_ms = torch.cuda.Stream(device), []
    with torch.cuda.stream(stream):
        made["decode"].all_reduce(x)
        stream.synchronize()
        with captured(torch.cuda.graph_pool_handle()) as graph:
            for _ in range(100):
                made["decode"].all_reduce(x)
        for late in (False, True) * 5:
            # Both ranks begin at the same time.
            made["prefill"].all_reduce(x)
            stream.synchronize()
            start_s = time.perf_counter()
            time.sleep(0.005 * late * rank)
            graph.replay()
            stream.synchronize()
            times_ms.append((time.perf_counter() - start_s) * 1e3)
    del graph
    for each in made.values():
        each.close()
    assert max(times_ms[1::2]) < min(times_ms) + 15, times_ms
