"""Tells cuBLAS how many SMs its kernels will really have."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from bullet_graph.errors import DeviceError


@contextmanager
def cublas_sm_count(num_sms: int | None) -> Iterator[None]:
    """Have cuBLAS choose and lay out its kernels for so many SMs; None leaves it as it is.

    A stream mask is invisible to cuBLAS: it fills the whole device with blocks, which then queue for the SMs of the
    lane. Told the number, a decode step of 64 rows takes 12 % less on 16 SMs, 14 % on 32, 10 % on 64; the matrix
    products of prefill gain nothing, so they are not told (bench/LOG.md). The handle is this thread's own, shared by
    its streams: the setting is undone at the end of the block.

    Raises:
        DeviceError: torch's cuBLAS cannot be found, or refuses.
    """
    if num_sms is None:
        yield
        return
    _set_sm_count(num_sms)
    try:
        yield
    finally:
        _set_sm_count(0)


def _set_sm_count(num_sms: int) -> None:
    status = _library().cublasSetSmCountTarget(
        ctypes.c_void_p(torch.cuda.current_blas_handle()), ctypes.c_int(num_sms)
    )
    if status != 0:
        raise DeviceError(f"cublasSetSmCountTarget({num_sms}) failed with cuBLAS status {status}")


@lru_cache
def _library() -> ctypes.CDLL:
    """The cuBLAS that torch has loaded: the loader knows it by its name."""
    name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DeviceError(f"decode graphs on part of the GPU need torch's {name}: {error}") from error
