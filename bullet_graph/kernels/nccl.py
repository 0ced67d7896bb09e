"""NCCL's collectives by its C interface, from the library that torch has loaded.

torch's process group watches each collective in threads of its own. Once another rank is gone, they hold the locks
that an abort needs, or end the process. Here nothing stands between a failure and NCCL's abort.
"""

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from bullet_graph.errors import DeviceError
from bullet_graph.kernels.communicator import Communicator
from bullet_graph.kernels.gpu import wait_for_device

_DTYPES = {torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""ncclDataType_t."""
_SUM = 0  # ncclRedOp_t
_CALL_S, _CLOSE_S = 0.5, 5.0


class _UniqueId(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * 128),)


def load_nccl() -> ctypes.CDLL:
    """The library, with the types of the functions that we call; DeviceError if torch has none."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise DeviceError(f"ranks need NCCL, which torch did not load ({error}): install torch from PyPI") from None
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    nccl.ncclGetUniqueId.argtypes = [pointer]
    nccl.ncclCommInitRank.argtypes = [pointer, number, _UniqueId, number]
    nccl.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    nccl.ncclAllGather.argtypes = [pointer, pointer, size, number, pointer, pointer]
    nccl.ncclCommAbort.argtypes = [pointer]
    nccl.ncclGetLastError.argtypes = [pointer]
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    return nccl


class NcclCommunicator(Communicator):
    """Collectives on the current stream, whose SMs are the lane's; DeviceError where NCCL reports one.

    All ranks make theirs at the same time, with a ``store`` (torch's) of their own.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, device: torch.device, nccl: Any = None) -> None:
        super().__init__(rank, num_ranks)
        self._nccl = load_nccl() if nccl is None else nccl
        self._device = device
        self._comm = ctypes.c_void_p()
        self._calls = threading.Lock()
        self._ending = threading.Thread(target=self._end, name="bullet-graph-nccl", daemon=True)
        self._is_aborted = False
        if rank == 0:
            unique = _UniqueId()
            self._call("ncclGetUniqueId", ctypes.byref(unique))
            store.set("nccl", bytes(unique))
        with torch.cuda.device(device):
            unique = _UniqueId.from_buffer_copy(store.get("nccl"))
            self._call("ncclCommInitRank", ctypes.byref(self._comm), num_ranks, unique, rank)
            # The first ones connect: a capture cannot.
            self.all_gather(self.all_reduce(torch.zeros(1, device=device)))

    def all_reduce(self, x: Tensor) -> Tensor:
        at = x.data_ptr()
        self._call("ncclAllReduce", at, at, x.numel(), _DTYPES[x.dtype], _SUM, self._comm, self._stream())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.num_ranks, *x.shape)
        at = x.contiguous().data_ptr(), out.data_ptr()
        self._call("ncclAllGather", *at, x.numel(), _DTYPES[x.dtype], self._comm, self._stream())
        return out

    def abort(self) -> None:
        if not self._is_aborted:
            self._is_aborted = True
            # In a thread: NCCL ends its kernels at once, and then waits until no graph holds any.
            self._ending.start()

    def close(self) -> None:
        wait_for_device(self._device, _CLOSE_S)
        # Not ncclCommDestroy, which may wait for ranks that are gone.
        self.abort()
        self._ending.join(_CLOSE_S)

    def _end(self) -> None:
        # The abort frees memory that a call uses, so the call ends first. It cannot while its launch waits for room.
        if self._calls.acquire(timeout=_CALL_S):
            self._calls.release()
        self._nccl.ncclCommAbort(self._comm)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _call(self, name: str, *arguments: Any) -> None:
        with self._calls:
            if self._is_aborted:
                raise DeviceError(f"{name} was aborted")
            code = getattr(self._nccl, name)(*arguments)
        if code:
            raise DeviceError(f"{name} failed with code {code}: {self._nccl.ncclGetLastError(None).decode()}")
