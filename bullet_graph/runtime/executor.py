"""The interface between the engine loop and a device."""

import ctypes
import gc
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence

from bullet_graph.config import EngineConfig
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition, lane_sms
from bullet_graph.perf.roofline import DecoderShape
from bullet_graph.runtime.step import Placement, Step, StepResult


class Executor(ABC):
    """Runs steps on two lanes at the same time, each lane in the order of its launches.

    A decode row takes the token that an earlier step sampled for its slot. On the decode lane, a step may be launched
    before the tokens of the previous step have reached the host. A row whose prompt ran on the prefill lane may be
    launched once that prompt's last slice is done.
    """

    max_in_flight: int = 2
    """Most launches worth queueing on each lane: 1 where a launch runs to its end at once."""
    num_sms: int | None = None
    """SMs of the GPU; None on the CPU."""
    has_prefill_lane: bool = True
    """Steps may be placed on the prefill lane."""
    lone_rows: int = 1
    """Rows of the step that costs least energy for a sequence alone: 2 where a row of padding saves some."""
    partitions: Sequence[SmPartition] = (WHOLE_GPU,)
    """Partitions that steps may be placed on, the whole GPU among them."""

    def max_batch_size(self, partition: SmPartition) -> int | None:  # noqa: ARG002 - for executors with graphs
        """Most rows of a decode step on one of :attr:`partitions`; None where only the slots limit them.

        A partition smaller than the GPU takes more as :meth:`prepare_next` captures its graphs; 0 means none yet.
        """
        return None

    def padded_rows(self, rows: int) -> int:
        """Rows after padding of a forward with prompt rows on the decode lane; more prompt rows up to it are free."""
        return rows

    @property
    def num_missing_graphs(self) -> int:
        """Graphs that :meth:`prepare_next` still has to capture."""
        return 0

    def prepare_next(self) -> bool:
        """Capture the next missing graph, between launches, in about 20 ms at most; returns False once none is missing.

        Does nothing where the device must be idle for it and is not.
        """
        return False

    @abstractmethod
    def launch(self, step: Step, placement: Placement) -> int:
        """Enqueue a step or its next layers, and return a ticket, without waiting for the device."""

    @abstractmethod
    def wait_any(self, tickets: Sequence[int], until_s: float | None) -> int | None:
        """Wait until one launch of at least one has finished, and return the first ticket in the list that has.

        Returns None at ``until_s`` on the clock of :meth:`now`; None waits without limit.
        """

    @abstractmethod
    def wait(self, ticket: int) -> StepResult:
        """Wait for a launch and read its tokens; each ticket can be read once."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for all launches, also that of an interrupted call, and forget them."""

    def now(self) -> float:
        """Seconds on the clock that request metrics use (virtual in a simulation)."""
        return time.perf_counter()

    def sleep_until(self, time_s: float) -> None:
        """Sleep to this time of :meth:`now`, with no launch under way."""
        time.sleep(max(time_s - time.perf_counter(), 0.0))

    @abstractmethod
    def shutdown(self, failure: BaseException | None = None) -> None:
        """Free the device memory; no launch may follow. Never raises, even on a failed device.

        The frames in the traceback of ``failure``, which ended the engine, may hold device memory. They are cleared,
        but kept for ever if the device has failed: freeing its memory would abort the process.
        """


def gpu_lone_rows(config: EngineConfig, shape: DecoderShape, batch_sizes: Sequence[int]) -> int:
    """:attr:`Executor.lone_rows` with graphs of these sizes: one is fastest, but takes more energy (bench/LOG.md)."""
    # With experts, a row of padding reads more weights.
    return 2 if config.cuda_graphs and 2 in batch_sizes and not shape.num_experts else 1


def keep_for_ever(what: object) -> None:
    """Never free an object, not even at the end of the process: a failed device may still use its memory."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def clear_frames(failure: BaseException | None) -> None:
    """Free what the tracebacks of an error and of its causes hold, and everything else that only cycles hold."""
    cleared: list[BaseException] = []  # causes may form a ring
    while failure is not None and failure not in cleared:
        cleared.append(failure)
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__
    gc.collect()


def max_batch_sizes(executor: Executor) -> dict[int, int]:
    """Most rows of a decode step by SMs of the decode lane, for partitions with such a limit."""
    limits = ((lane_sms(p), executor.max_batch_size(p)) for p in executor.partitions)
    return {sms: rows for sms, rows in limits if sms is not None and rows is not None}
