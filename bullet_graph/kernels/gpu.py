"""A GPU as its kernels see it, the library of its matrix products, laid out for how many SMs, and captures."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from bullet_graph.errors import DeviceError, io_errors

_LT_ROWS = (17, 112)
"""First and last number of rows for which cublasLt chooses faster kernels than cuBLAS."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """SMs of the whole device, and compute capability as (major, minor); asked once, and not at each launch."""

    num_sms: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(num_sms, torch.cuda.get_device_capability(device))

    @property
    def is_hopper(self) -> bool:
        """FlashInfer's fa3 and the fused SwiGLU product are written for compute capability 9.0 alone."""
        return self.capability == (9, 0)

    @property
    def overlaps_launches(self) -> bool:
        """Programs of a launch can start while the one before runs (programmatic dependent launch)."""
        return self.capability >= (9, 0)


def _set_sm_count(num_sms: int) -> None:
    status = _library().cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), ctypes.c_int(num_sms))
    if status != 0:
        raise DeviceError(f"cublasSetSmCountTarget({num_sms}) failed with cuBLAS status {status}")


@lru_cache
def _library() -> ctypes.CDLL:
    """The cuBLAS that torch has loaded, by its name."""
    name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    with io_errors(f"decode graphs on part of the GPU need torch's {name}", DeviceError):
        return ctypes.CDLL(name)


@contextmanager
def fitting_blas(rows: int, num_sms: int | None) -> Iterator[None]:
    """Have torch's matrix products of ``rows`` rows run in the faster library in the block, laid out for ``num_sms``.

    On the whole GPU (None), cublasLt is 3 to 6 % faster at 32 to 112 rows on an H200, and level elsewhere. It ignores
    the number of SMs, so a lane with a part of them keeps cuBLAS.

    cuBLAS does not see a stream's mask: it fills the whole device with blocks, which then queue for the SMs of the
    lane. With the right number, a decode step of 64 rows takes 12 % less on 16 SMs, 14 % on 32 and 10 % on 64; the
    products of prefill gain nothing (bench/LOG.md). The setting is that of this thread's handle, for all its streams.
    """
    if num_sms is not None:
        _set_sm_count(num_sms)
        try:
            yield
        finally:
            _set_sm_count(0)
    elif _LT_ROWS[0] <= rows <= _LT_ROWS[1]:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)
    else:
        yield


@contextmanager
def captured(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what the block launches on the current stream; yields the graph, which is complete after the block.

    ``torch.cuda.graph`` would synchronize and empty the allocator's cache for every graph. Python's cyclic garbage
    collector is paused: it may unload a kernel, which ends a capture with an error.
    """
    graph = torch.cuda.CUDAGraph()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()
    finally:
        if was_enabled:
            gc.enable()


def wait_for_device(device: torch.device, timeout_s: float) -> None:
    """Wait until a device is idle. RuntimeError if it has failed, TimeoutError if one of its kernels does not end."""
    idle: Future[None] = Future()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
            idle.set_result(None)
        except RuntimeError as error:
            idle.set_exception(error)

    # Nothing can end such a wait: the thread is left behind.
    threading.Thread(target=wait, name="bullet-graph-idle", daemon=True).start()
    idle.result(timeout_s)
