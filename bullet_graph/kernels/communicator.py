"""Collectives between the ranks of tensor parallelism. A communicator belongs to one lane of one rank."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
import torch.distributed
from torch import Tensor

from bullet_graph.partition.masks import Lane

GROUP_TIMEOUT_S = 1800.0
"""Longest collective of a process group. Ranks that die or hang are noticed earlier, by the engine's own monitor."""
_POLL_S = 50e-6
_CLOSE_S = 5.0


class Communicator(ABC):
    """Sums and gathers over ``num_ranks`` ranks. All ranks call the same methods of a lane in the same order.

    Every rank gets the same bits, so that all choose the same experts and sample the same tokens.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up a contiguous tensor of all ranks, in place; returns it."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors of one shape, [num_ranks, *x.shape], in the order of ranks."""

    def abort(self) -> None:  # noqa: B027 - nothing to end where a broken connection ends a collective
        """End what waits for other ranks; safe in any thread."""

    def close(self) -> None:  # noqa: B027 - some have nothing to close
        """Wait for this rank's collectives, then disconnect; call it once no CUDA graph holds any of its kernels."""


Communicators = Mapping[Lane, Communicator]
"""A rank's, one for each lane: two streams must share neither a communicator nor its buffers."""

ALONE: Communicators = MappingProxyType({})
"""Those of an engine with one rank."""


def on_all_ranks(communicators: Communicators, holds: bool, device: torch.device) -> bool:
    """Whether something holds on every rank; all ranks must ask at the same time."""
    communicator = communicators.get("decode")
    if communicator is None:
        return holds
    return int(communicator.all_reduce(torch.tensor([int(holds)], device=device))) == communicator.num_ranks


class GroupCommunicator(Communicator):
    """The collectives of a process group of torch: gloo on the CPU, NCCL on GPUs.

    The group is known to nobody else: torch's default group, if the program has one, is left alone.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, device: torch.device) -> None:
        super().__init__(rank, num_ranks)
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        c10d: Any = torch.distributed.distributed_c10d
        group = c10d.ProcessGroupGloo if device.type == "cpu" else c10d.ProcessGroupNCCL
        options = group._Options() if device.type == "cpu" else group.Options()
        options._timeout = timeout
        if device.type == "cpu":
            # A machine may resolve its own name to an address that it cannot reach.
            options._devices = [group.create_device(hostname="127.0.0.1")]
        self._group = group(store, rank, num_ranks, options)
        # On the current stream, whose SMs are the lane's: a group's own stream would have all.
        self._reduce, self._gather = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        self._reduce.asyncOp = self._gather.asyncOp = False
        self._device = device
        self._ending: threading.Thread | None = None
        # Connects here: a capture cannot.
        self.all_reduce(torch.zeros(1, device=device))

    def all_reduce(self, x: Tensor) -> Tensor:
        # NCCL, on the current stream, gives nothing to wait for.
        if (work := self._group.allreduce([x], self._reduce)) is not None:
            work.wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.num_ranks, *x.shape)
        if (work := self._group._allgather_base(out.flatten(0, 1), x, self._gather)) is not None:
            work.wait()
        return out

    def abort(self) -> None:
        if self._device.type == "cuda" and self._ending is None:
            # In a thread: NCCL ends its kernels at once, and then waits until no graph holds any.
            self._ending = threading.Thread(target=self._group.abort, name="bullet-graph-nccl", daemon=True)
            self._ending.start()

    def close(self) -> None:
        if self._device.type == "cpu":
            # Waits for its threads: at the program's end, one that holds the last reference to a tensor would abort it.
            del self._group
            return
        torch.cuda.synchronize(self._device)
        # NCCL's threads would report that the other ranks and the store are gone.
        self.abort()
        if self._ending is not None:
            self._ending.join(_CLOSE_S)


class OrderedCommunicator(Communicator):
    """Checks before each collective that all ranks call the same one, on the same lane; RuntimeError if not.

    ``marks`` is shared memory of ``num_ranks`` 64-bit integers: each rank's count of collectives, and a checksum of
    the last. One checker serves all lanes of a rank: lanes in another order would wait for each other for ever.
    """

    def __init__(self, inner: Communicator, lane: str, marks: "memoryview[int]") -> None:
        super().__init__(inner.rank, inner.num_ranks)
        self._inner, self._lane, self._marks = inner, lane, marks
        self._aborted = False

    def all_reduce(self, x: Tensor) -> Tensor:
        self._meet("all_reduce", x)
        return self._inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self._meet("all_gather", x)
        return self._inner.all_gather(x)

    def abort(self) -> None:
        self._aborted = True
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()

    def _meet(self, name: str, x: Tensor) -> None:
        """Wait until every rank has come to this collective; no rank gets further, so that one mark each is enough."""
        what = f"{name} of {list(x.shape)} {x.dtype} on the {self._lane} lane"
        number = collectives_begun(self._marks[self.rank]) + 1
        mark = self._marks[self.rank] = number << 32 | crc32(what.encode())
        for rank in range(self.num_ranks):
            while collectives_begun(other := self._marks[rank]) < number:
                if self._aborted:
                    raise RuntimeError(f"{what} was aborted")
                time.sleep(_POLL_S)
            # A rank that has gone on to the next one found all marks right.
            if other != mark and collectives_begun(other) == number:
                raise RuntimeError(
                    f"ranks must begin the same collectives in the same order, but number {number} is {what} on rank "
                    f"{self.rank}, and another one on rank {rank}: please report this"
                )


def collectives_begun(mark: int) -> int:
    """How many collectives the rank of a mark has begun."""
    return mark >> 32
