"""Ranks of tensor parallelism that are threads of this process: quicker to start than processes, and no less apart."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from bullet_graph.config import EngineConfig
from bullet_graph.kernels.communicator import Communicator, Communicators
from bullet_graph.partition.masks import LANES
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime.build import BuiltRuntime, Start, build_executor
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.resolve import Runtime
from bullet_graph.runtime.step import Placement, Step, StepResult
from bullet_graph.runtime.tensor_parallel import of_rank


@dataclass
class Table:
    """Where the ranks of a lane lay what they exchange."""

    num_ranks: int
    given: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_ranks, timeout=20)

    def exchange(self, rank: int, x: Tensor) -> Tensor:
        """All ranks' tensors, stacked."""
        self.given[rank] = x
        self.barrier.wait()
        found = torch.stack([self.given[each] for each in range(self.num_ranks)])
        self.barrier.wait()
        return found


class ThreadCommunicator(Communicator):
    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(rank, table.num_ranks)
        self._table = table

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(self._table.exchange(self.rank, x).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._table.exchange(self.rank, x)


def thread_communicators(num_ranks: int) -> list[Communicators]:
    """Those of each rank."""
    tables = {lane: Table(num_ranks) for lane in LANES}
    return [{lane: ThreadCommunicator(tables[lane], rank) for lane in LANES} for rank in range(num_ranks)]


class ThreadedExecutor(Executor):
    """Runs every launch on all ranks at once; they must agree on its tokens."""

    max_in_flight = 1

    def __init__(self, ranks: Sequence[Executor], pool: ThreadPoolExecutor) -> None:
        self._ranks = ranks
        self._pool = pool

    def launch(self, step: Step, placement: Placement) -> int:
        tickets = set(self._pool.map(lambda rank: rank.launch(step, placement), self._ranks))
        assert len(tickets) == 1
        return tickets.pop()

    def wait_any(self, tickets: Sequence[int], until_s: float | None) -> int | None:
        return self._ranks[0].wait_any(tickets, until_s)

    def wait(self, ticket: int) -> StepResult:
        results = [rank.wait(ticket) for rank in self._ranks]
        assert all(result.token_ids.tolist() == results[0].token_ids.tolist() for result in results)
        return results[0]

    def drain(self) -> None:
        for rank in self._ranks:
            rank.drain()

    def shutdown(self, failure: BaseException | None = None) -> None:
        for rank in self._ranks:
            rank.shutdown(failure)
        self._pool.shutdown()


def _build(num_ranks: int, expert_parallel: bool, config: EngineConfig, runtime: Runtime, start: Start) -> BuiltRuntime:
    pool, communicators = ThreadPoolExecutor(num_ranks), thread_communicators(num_ranks)
    config = replace(config, tensor_parallel_size=num_ranks, expert_parallel=expert_parallel)

    def build(rank: int) -> BuiltRuntime:
        own = replace(start, clock=StartClock(), communicators=communicators[rank])
        return build_executor(config, of_rank(config, runtime, rank), own)

    built = list(pool.map(build, range(num_ranks)))
    return replace(built[0], executor=ThreadedExecutor([each.executor for each in built], pool))


def use_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that makes the next engines have this number of ranks; and whether each has whole experts."""
    build: Callable[..., BuiltRuntime] = build_executor

    def choose(num_ranks: int, expert_parallel: bool = False) -> None:
        chosen = build if num_ranks == 1 else partial(_build, num_ranks, expert_parallel)
        monkeypatch.setattr("bullet_graph.engine.engine.build_on_ranks", chosen)

    return choose
