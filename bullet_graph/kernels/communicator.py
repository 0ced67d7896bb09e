"""Collectives between the ranks of tensor parallelism. A communicator belongs to one lane of one rank."""

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

_POLL_S = 50e-6


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


class GlooCommunicator(Communicator):
    """Collectives of gloo, on the CPU.

    The group is known to nobody else: torch's default group, if the program has one, is left alone.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        group: Any = torch.distributed.distributed_c10d.ProcessGroupGloo
        options = group._Options()
        options._timeout = store.timeout
        # A machine may resolve its own name to an address that it cannot reach.
        options._devices = [group.create_device(hostname="127.0.0.1")]
        self._group = group(store, rank, num_ranks, options)
        # Connects here, while all ranks are there.
        self.all_reduce(torch.zeros(1))
        # Ranks that die or hang are noticed earlier, by the engine's own monitor.
        self._group._set_default_timeout(timedelta(minutes=30))

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.num_ranks, *x.shape)
        self._group._allgather_base(out.flatten(0, 1), x).wait()
        return out

    def close(self) -> None:
        # Waits for its threads: at the program's end, one that holds the last reference to a tensor would abort it.
        del self._group


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
