"""Which library of matrix kernels serves a decode step, and how many SMs it is told it has."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from bullet_graph.errors import DeviceError

_LT_ROWS = (17, 112)
"""Rows of a matrix product, from and to, for which cublasLt chooses better."""


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


@contextmanager
def fitting_blas(rows: int, num_sms: int | None) -> Iterator[None]:
    """Let torch's matrix products of so many rows go to the library whose choice of kernels is faster.

    Measured on an H200 (bench/results/h200/layer_rows.json): cublasLt's is 3 to 6 % faster at 32 to 112 rows, level
    elsewhere. It does not heed :func:`cublas_sm_count`, so a part of the GPU keeps cuBLAS.

    Args:
        rows: of the products.
        num_sms: SMs of the lane, None for all.
    """
    if num_sms is not None or not _LT_ROWS[0] <= rows <= _LT_ROWS[1]:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
