"""Sums over ranks in one launch: each rank reads the others' rows from their memory, through NVLink.

This is a one-shot all-reduce. All ranks have mapped each other's memory. A program copies its block of the tensor
there, tells the other ranks, and waits for theirs. Then it adds up all ranks' blocks. A program waits only for its twin
on the other ranks, so any number of SMs will do. The memory has two halves, which take turns. A rank has read a half
before it tells the turn after, so nobody overwrites a half that is still read.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bullet_graph.errors import PartitionError
from bullet_graph.kernels.communicator import Communicator
from bullet_graph.kernels.launch import quick
from bullet_graph.partition.driver import CudaDriver

MAX_PROGRAMS = 1024
BLOCK_BYTES = 8192
"""The most that a program shares at a time."""
SHARED_BYTES = 2 * MAX_PROGRAMS * BLOCK_BYTES
"""What ranks share of their rows. Behind it: each program's turns so far, and the last turn that each rank told it."""
ENDED = 2**62
"""A turn that no rank reaches. A program that is told it ends its sum, and touches no other memory from then on."""
_FEW_PROGRAMS = 64
_MIN_BLOCK = 1024
_WORD_BYTES = 8
_LOOKS = 2**17
"""A program that waits reads the host's word after so many looks of 0.4 to 0.8 µs. A launch's reads take turns, 0.8 µs
a warp, 10 ms in all for 512 rows. The other rank waits for them at the next sum, and must not read in that time. After
256 looks it did, then this rank did: 384 rows took 1.4 s a step instead of 35 ms (bench/LOG.md)."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PROGRAMS, _BLOCK, _SHARED, _ENDED = (tl.constexpr(n) for n in (MAX_PROGRAMS, BLOCK_BYTES, SHARED_BYTES, ENDED))


def memory_bytes(num_ranks: int) -> int:
    """Size of a rank's memory that all ranks map."""
    return SHARED_BYTES + MAX_PROGRAMS * (1 + num_ranks) * _WORD_BYTES


@triton.jit
def all_reduce_kernel(
    x_ptr, bases_ptr, num_elements, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, LOOKS: tl.constexpr
):
    """Add up all ranks' x in float32, in the order of ranks, in place.

    ``bases_ptr`` has the ranks' memories, and behind them the host's word, which becomes ENDED when all shall end. It
    is read after LOOKS looks for another rank.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    offsets = program * BLOCK + columns
    inside = offsets < num_elements
    values = tl.pointer_type(x_ptr.dtype.element_ty)
    words = tl.pointer_type(tl.int64)
    own = tl.load(bases_ptr + RANK)
    turns = (own + _SHARED).to(words) + program
    told = (own + _SHARED).to(words) + _PROGRAMS + program * RANKS
    turn = tl.load(turns) + 1
    at = (turn % 2) * (_SHARED // 2) + program * _BLOCK
    shared = tl.multiple_of((own + at).to(values), 16)
    tl.store(shared + columns, tl.load(x_ptr + offsets, mask=inside, other=0.0), mask=inside)
    # All threads have written before one of them tells.
    tl.debug_barrier()
    # A rank never tells itself a turn: a program that sees the host's word notes it here.
    ended = tl.load(told + RANK)
    if ended < _ENDED:
        for other in tl.static_range(RANKS):
            if other != RANK:
                tell = (tl.load(bases_ptr + other) + _SHARED).to(words) + _PROGRAMS + program * RANKS + RANK
                tl.atomic_xchg(tell, turn, sem="release", scope="sys")
    for other in tl.static_range(RANKS):
        if other != RANK:
            last = tl.maximum(tl.atomic_add(told + other, 0, sem="acquire", scope="sys"), ended)
            looks = 0
            while last < turn:
                looks += 1
                # The atomic operation gives all threads one value: the last look's.
                if looks % LOOKS == 0:
                    word = tl.load(tl.load(bases_ptr + RANKS).to(words), volatile=True)
                    ended = tl.atomic_max(told + RANK, word)
                last = tl.maximum(tl.atomic_add(told + other, 0, sem="acquire", scope="sys"), ended)
    tl.debug_barrier()
    # An ended program keeps its turn, so that no one waits for a later one.
    if ended < _ENDED:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for other in tl.static_range(RANKS):
            shared = tl.multiple_of((tl.load(bases_ptr + other) + at).to(values), 16)
            total += tl.load(shared + columns, mask=inside, other=0.0, volatile=True).to(tl.float32)
        tl.store(x_ptr + offsets, total.to(x_ptr.dtype.element_ty), mask=inside)
        tl.store(turns, turn)


class PeerCommunicator(Communicator):
    """Sums what fits into shared memory with :func:`all_reduce_kernel`; leaves the rest to ``inner``.

    All ranks make theirs at the same time, each on its current device, with ``inner`` and ``store`` (torch's) of their
    own. The memory is freed with the communicator.
    """

    def __init__(self, inner: Communicator, store: Any, device: torch.device) -> None:
        super().__init__(inner.rank, inner.num_ranks)
        self._inner, self._driver = inner, CudaDriver()
        call, size = self._driver.call, memory_bytes(self.num_ranks)
        with torch.cuda.device(device):
            # Pinned memory has one address for the host and the device.
            self._ended = torch.zeros(1, dtype=torch.int64).pin_memory()
            self._own = int(call("cuMemAlloc", size))
            context = call("cuCtxGetCurrent")
            bases: dict[int, int] = {}
            self._free = weakref.finalize(self, _free, self._driver, context, self._own, bases)
            # The driver frees the memory when the process ends, even if a kernel never does.
            self._free.atexit = False
            call("cuMemsetD8", self._own, 0, size)
            torch.cuda.synchronize(device)
            store.set(f"memory {self.rank}", bytes(call("cuIpcGetMemHandle", self._own).reserved))
            for rank in set(range(self.num_ranks)) - {self.rank}:
                handle = self._driver.api.CUipcMemHandle()
                handle.reserved = store.get(f"memory {rank}")
                flags = self._driver.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
                bases[rank] = int(call("cuIpcOpenMemHandle", handle, flags))
            every = [bases.get(rank, self._own) for rank in range(self.num_ranks)]
            self._bases = torch.tensor([*every, self._ended.data_ptr()], dtype=torch.int64, device=device)

    def all_reduce(self, x: Tensor) -> Tensor:
        block = block_size(x, self.num_ranks)
        if block is None:
            return self._inner.all_reduce(x)
        quick(all_reduce_kernel)[(triton.cdiv(x.numel(), block),)](
            *(x, self._bases, x.numel()),
            RANK=self.rank,
            RANKS=self.num_ranks,
            BLOCK=block,
            LOOKS=_LOOKS,
            num_warps=block // 256,
        )
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def abort(self) -> None:
        # Without the driver, which a launch may hold until the sums before it are over.
        self._ended.fill_(ENDED)
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
        self._free()


def can_reach(gpus: Sequence[int]) -> bool:
    """Whether each of these GPUs can map the others' memory, with atomic operations: by NVLink, not by PCIe."""
    driver = CudaDriver()
    attribute = driver.api.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return all(driver.call("cuDeviceGetP2PAttribute", attribute, *pair) for pair in itertools.permutations(gpus, 2))


def block_size(x: Tensor, num_ranks: int) -> int | None:
    """Elements of a tensor that one program adds up; None leaves the tensor to NCCL.

    That is so for other dtypes, and where a rank would read more than one half from the others: NCCL's ring moves less.
    """
    block, most = _MIN_BLOCK, BLOCK_BYTES // x.element_size()
    while x.numel() > block * _FEW_PROGRAMS and block < most:
        block *= 2
    return block if x.dtype in _DTYPES and x.numel() * (num_ranks - 1) <= block * MAX_PROGRAMS else None


def _free(driver: CudaDriver, context: Any, own: int, others: Mapping[int, int]) -> None:
    # Where the device has failed, or is gone at the end of the process.
    with suppress(PartitionError):
        driver.call("cuCtxPushCurrent", context)
        for name, address in [*(("cuIpcCloseMemHandle", other) for other in others.values()), ("cuMemFree", own)]:
            with suppress(PartitionError):
                driver.call(name, address)
        driver.call("cuCtxPopCurrent")
