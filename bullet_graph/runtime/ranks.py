"""The ranks of tensor parallelism: their processes, what they are told, and what happens when one of them fails.

Rank 0 is the engine's own process, and alone decides. It sends the others every call that changes the device, and they
replay these calls in order, so all ranks launch each lane's collectives in the same order. Ranks sample the same tokens
by themselves: only failures come back.
"""

import mmap
import pickle
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed

from bullet_graph.errors import BulletGraphError, LateError, RankError
from bullet_graph.kernels.communicator import Communicator, GlooCommunicator, OrderedCommunicator, collectives_begun
from bullet_graph.kernels.nccl import NcclCommunicator
from bullet_graph.partition.masks import LANES, Lane, SmPartition
from bullet_graph.runtime.executor import Executor, keep_for_ever
from bullet_graph.runtime.processes import start_process
from bullet_graph.runtime.step import Placement, Step, StepResult

_T = TypeVar("_T")

FOLLOWER = "bullet_graph.runtime.follower"

LAUNCH_TIMEOUT_S = 60.0
"""A launch without progress for this long has failed: some rank hangs."""
START_TIMEOUT_S = 600.0
"""Rank 0 waits this long for the others, which do the same work at the same time, in a start or a profile."""
_RENDEZVOUS_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_CHECK_S = 0.1
_VERDICT_S = 0.2
"""Once a rank has failed, how long others may report that they failed before it."""

Message = tuple[Any, ...]
"""A name, then values. To them: start, profile or build, connect, blocks, then launch and prepare, or capture, measure,
feed and times, and stop. Back: ready, blocks, built, times, failed."""


def shared_marks(folder: Path, num_ranks: int) -> "memoryview[int]":
    """The marks of :class:`OrderedCommunicator`, in memory that the ranks share."""
    with (folder / "marks").open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8 * num_ranks)).cast("q")


def make_communicators(
    folder: Path, rank: int, num_ranks: int, device: torch.device, made: dict[Lane, Communicator]
) -> None:
    """Make a rank's communicators, all ranks at the same time, in ``made``; ``folder`` is shared by them.

    On the CPU they check the order of collectives. Where GPUs reach each other's memory, decode sums by itself.
    RuntimeError where another rank does not come.
    """
    c10d: Any = torch.distributed
    store = c10d.FileStore(str(folder / "store"), num_ranks)
    first = (device.index or 0) - rank
    for lane in LANES:
        of_lane = c10d.PrefixStore(lane, store)
        of_lane.set_timeout(timedelta(seconds=_RENDEZVOUS_TIMEOUT_S))
        if device.type == "cpu":
            gloo = GlooCommunicator(of_lane, rank, num_ranks)
            made[lane] = OrderedCommunicator(gloo, lane, shared_marks(folder, num_ranks))
            continue
        # At once, so that a failure can end what follows.
        made[lane] = nccl = NcclCommunicator(of_lane, rank, num_ranks, device)
        if lane == "decode":
            # Published for Linux only.
            from bullet_graph.kernels import peer_reduce  # noqa: PLC0415

            if peer_reduce.can_reach(range(first, first + num_ranks)):
                made[lane] = peer_reduce.PeerCommunicator(nccl, of_lane, device)


class Ranks:
    """Rank 0's view of the others; a thread watches them, and ends all of them once one has failed.

    ``failure`` says which rank failed, and why; ``folder`` is for files that the ranks share.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.failure: Exception | None = None
        self.communicators: dict[Lane, Communicator] = {}
        self._own_folder = tempfile.TemporaryDirectory(prefix="bullet_graph_ranks_")
        self.folder = Path(self._own_folder.name)
        (self.folder / "marks").write_bytes(bytes(8 * num_ranks))
        self._marks = shared_marks(self.folder, num_ranks)
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._arrived: dict[str, dict[int, Message]] = {}
        self._changed, self._aborting = threading.Condition(), threading.Lock()
        self._is_stopping = False
        self._entered_s: float | None = None
        self._watcher = threading.Thread(target=self._watch, name="bullet-graph-ranks", daemon=True)
        try:
            for rank in range(1, num_ranks):
                connection, process = start_process(FOLLOWER, str(rank), str(self.folder))
                self._connections.append(connection)
                self._processes.append(process)
        except BaseException:
            self.stop()
            raise
        self._watcher.start()

    # ---- messages ----

    def send(self, *message: Any, only: int | None = None) -> None:
        """Send the others, or ``only`` one of them, a message; raises what :meth:`check` does."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for rank, connection in enumerate(self._connections, start=1):
            if only in (None, rank):
                try:
                    connection.send_bytes(data)
                except OSError as error:
                    self.explain(error)

    def gather(self, name: str) -> list[Message]:
        """Wait for such a message from each of the others, by rank; raises as :meth:`check`, or if one stays away."""
        with self._changed:
            arrived, num_others = self._arrived.setdefault(name, {}), self.num_ranks - 1
            self._changed.wait_for(lambda: self.failure is not None or len(arrived) == num_others, START_TIMEOUT_S)
            del self._arrived[name]
        if self.failure is None and (silent := {*range(1, self.num_ranks)} - arrived.keys()):
            who = f"rank {', '.join(map(str, sorted(silent)))} hangs, or is far slower than rank 0"
            self.fail(RankError(f"{who}: {name!r} did not come within {START_TIMEOUT_S:g} s. Make a new engine"))
        self.check()
        return [message for _, message in sorted(arrived.items())]

    def check(self) -> None:
        """Raise the failure of another rank, if there is one."""
        if self.failure is not None:
            raise self.failure

    def explain(self, error: BaseException) -> NoReturn:
        """Raise why this rank got an error: the failure of another one, if one comes soon, or else the error itself."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, timeout=2.0)
        failure = self.failure
        if failure is None:
            self.fail(RankError(f"rank 0 failed: {error}"))
        if failure in (None, error):
            raise error  # not from itself
        raise failure from error

    def connect(self, device: torch.device) -> None:
        """Make rank 0's communicators, together with the others, once these are ready."""
        self.gather("ready")
        self.send("connect")
        try:
            make_communicators(self.folder, 0, self.num_ranks, device, self.communicators)
        except BulletGraphError:
            raise
        except RuntimeError as error:
            self.explain(RankError(f"the ranks did not connect (they have {_RENDEZVOUS_TIMEOUT_S:g} s): {error}"))
        self.check()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The watcher takes the block for a hang if it makes no progress for :data:`LAUNCH_TIMEOUT_S`."""
        self._entered_s = time.monotonic()
        try:
            yield
        finally:
            self._entered_s = None

    # ---- failures ----

    def fail(self, failure: Exception) -> None:
        """End the other ranks, and what waits for them."""
        with self._changed:
            if self.failure is None:
                self.failure = failure
            self._changed.notify_all()
            for process in self._processes:
                process.kill()
        with self._aborting:
            for communicator in list(self.communicators.values()):
                communicator.abort()

    def stop(self) -> None:
        """End the other ranks, gently if they follow; a second call does nothing."""
        self._is_stopping = True
        if self.failure is None:
            with suppress(Exception):
                self.send("stop")
        deadline_s = time.monotonic() + (_STOP_TIMEOUT_S if self.failure is None else 0.0)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0.0))
            process.kill()
            process.wait()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        for connection in self._connections:
            connection.close()
        self._own_folder.cleanup()

    def close(self) -> None:
        """Let go of the communicators, once no graph holds any of their kernels; the other ranks have ended."""
        for communicator in self.communicators.values():
            try:
                communicator.close()
            except (RuntimeError, TimeoutError):
                keep_for_ever(communicator)
        self.communicators = {}

    def _watch(self) -> None:
        """Take what the others send, until one fails or all have ended."""
        open_ones = dict(zip(self._connections, range(1, self.num_ranks), strict=True))
        last_marks, progress_s = self._marks.tolist(), time.monotonic()
        while open_ones:
            ended = self._receive(open_ones, min(1.0, LAUNCH_TIMEOUT_S / 4))
            if self._is_stopping:
                continue
            if ended:
                self.fail(self._verdict(open_ones, ended))
                return
            entered_s, now_s = self._entered_s, time.monotonic()
            if (marks := self._marks.tolist()) != last_marks or entered_s is None:
                last_marks, progress_s = marks, now_s
            elif now_s - max(entered_s, progress_s) > LAUNCH_TIMEOUT_S:
                self.fail(self._hang(marks))
                return

    def _receive(self, open_ones: dict[Connection, int], timeout_s: float) -> list[tuple[float, int, Message | None]]:
        """Note arrivals; returns those ranks that ended, with their last message: (when, rank, failed or None)."""
        ended: list[tuple[float, int, Message | None]] = []
        for connection in wait(list(open_ones), timeout_s):
            assert isinstance(connection, Connection)
            rank = open_ones[connection]
            try:
                message = connection.recv()
            except Exception:
                # The end of the pipe, or of a message. Who ends without a word did not fail because of another.
                message = None
            if message is None or message[0] == "failed":
                del open_ones[connection]
                ended.append((0.0 if message is None else message[1], rank, message))
                continue
            with self._changed:
                self._arrived.setdefault(message[0], {})[rank] = message
                self._changed.notify_all()
        return ended

    def _verdict(self, open_ones: dict[Connection, int], ended: list[tuple[float, int, Message | None]]) -> Exception:
        """The failure that came first; the others' collectives broke because of it."""
        until_s = time.monotonic() + _VERDICT_S
        while open_ones and (left_s := until_s - time.monotonic()) > 0:
            ended += self._receive(open_ones, left_s)
        _, rank, message = min(ended, key=lambda each: each[:2])
        if message is not None:
            return as_failure(rank, message[2], message[3])
        process = self._processes[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(3.0)  # its GPU's memory goes first
        code = process.poll()
        how = "no exit code yet" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return RankError(
            f"rank {rank} (process {process.pid}) ended with {how}, and without a message: see its output and the "
            "kernel's log (out of memory?), then make a new engine"
        )

    def _hang(self, marks: Sequence[int]) -> RankError:
        counts = [collectives_begun(mark) for mark in marks]
        behind = [str(rank) for rank, count in enumerate(counts) if count == min(counts)]
        who = f"rank {', '.join(behind)} is behind" if len(behind) < len(counts) else "no rank is behind"
        return RankError(
            f"a launch made no progress for {LAUNCH_TIMEOUT_S:g} s; {who} in the order of collectives: make a new "
            "engine, and please report this"
        )


def as_failure(rank: int, kind: type[BaseException], text: str) -> Exception:
    """Another rank's error, of its own kind where that is one of ours."""
    if issubclass(kind, BulletGraphError) and not issubclass(kind, LateError):
        return kind(f"rank {rank}: {text}")
    return RankError(f"rank {rank} failed: {kind.__name__}: {text}")


class RankedExecutor(Executor):
    """Rank 0's executor: tells the other ranks of each call that changes the device, and then makes it here.

    Once a rank has failed, every call raises that rank's error. So it is after an interrupt in the middle of a launch,
    which leaves the ranks at different collectives.
    """

    def __init__(self, local: Executor, ranks: Ranks) -> None:
        self._local = local
        self._ranks = ranks
        self.max_in_flight = local.max_in_flight
        self.num_sms = local.num_sms
        self.has_prefill_lane = local.has_prefill_lane
        self.partitions, self.lone_rows = local.partitions, local.lone_rows

    def max_batch_size(self, partition: SmPartition) -> int | None:
        return self._local.max_batch_size(partition)

    def padded_rows(self, rows: int) -> int:
        return self._local.padded_rows(rows)

    @property
    def num_missing_graphs(self) -> int:
        return self._local.num_missing_graphs

    def prepare_next(self) -> bool:
        self._ranks.check()
        return self.num_missing_graphs > 0 and self._on_all_ranks(self._local.prepare_next, "prepare")

    def launch(self, step: Step, placement: Placement) -> int:
        return self._on_all_ranks(lambda: self._local.launch(step, placement), "launch", step, placement)

    def _on_all_ranks(self, call: Callable[[], _T], *message: Any) -> _T:
        self._ranks.check()
        try:
            with self._ranks.watched():
                self._ranks.send(*message)
                return call()
        except Exception as error:
            self._ranks.explain(error)
        except BaseException:
            self._ranks.fail(RankError("an interrupt left the ranks in the middle of a launch: make a new engine"))
            raise

    def wait_any(self, tickets: Sequence[int], until_s: float | None) -> int | None:
        with self._ranks.watched():
            while True:
                self._ranks.check()
                limit_s = self.now() + _CHECK_S
                if until_s is not None and until_s <= limit_s:
                    return self._local.wait_any(tickets, until_s)
                if (ticket := self._local.wait_any(tickets, limit_s)) is not None:
                    return ticket

    def wait(self, ticket: int) -> StepResult:
        self.wait_any([ticket], None)
        result = self._local.wait(ticket)
        # A launch that a failure has ended has wrong sums.
        self._ranks.check()
        return result

    def drain(self) -> None:
        with self._ranks.watched():
            self._local.drain()

    def shutdown(self, failure: BaseException | None = None) -> None:
        self._ranks.stop()
        self._local.shutdown(failure)
        self._ranks.close()
        self.__dict__.clear()
