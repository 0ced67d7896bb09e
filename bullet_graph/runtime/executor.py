"""What the engine loop may ask of a device."""

import ctypes
from collections.abc import Sequence
from typing import Protocol

from bullet_graph.partition.masks import SMS_PER_TPC, SmPartition
from bullet_graph.runtime.step import Placement, Step, StepResult


class Executor(Protocol):
    """Carries steps out on two lanes, each in the order of its launches; the lanes run at the same time.

    A decode row takes the token that an earlier step sampled for its slot. On the decode lane a step may be launched
    before the tokens of the one before it have reached the host; a row whose prompt ran on the prefill lane may be
    launched when that prompt's last slice is done.
    """

    @property
    def max_in_flight(self) -> int:
        """Most launches worth having ahead on each lane: 1 where a launch already runs to its end."""

    @property
    def num_sms(self) -> int | None:
        """SMs of the GPU; None where there is none to divide."""

    @property
    def has_prefill_lane(self) -> bool:
        """Whether steps may be placed on the prefill lane."""

    @property
    def partitions(self) -> Sequence[SmPartition]:
        """Partitions that steps may be placed on, the whole GPU among them."""

    def max_batch_size(self, partition: SmPartition) -> int | None:
        """Most rows of a decode step that may be placed on one of :attr:`partitions`; None: as many as there are slots.

        The whole GPU takes any. A part of it takes more while :meth:`prepare_next` captures its graphs; with 0 it takes
        none yet.
        """

    def padded_rows(self, rows: int) -> int:
        """Rows that a forward of so many, prompt rows among them, is computed with on the decode lane; no fewer.

        Prompt rows in the place of padding cost no more matrix products.
        """

    @property
    def num_missing_graphs(self) -> int:
        """Graphs that :meth:`prepare_next` has still to capture."""

    def prepare_next(self) -> bool:
        """Capture the next missing graph, or do nothing where the device would have to be idle for it and is not.

        To be called between launches, in about 20 ms at most.

        Returns:
            False once nothing is left to be done.
        """

    def launch(self, step: Step, placement: Placement) -> int:
        """Enqueue a step, or the next of its layers, and return a ticket; does not wait for the device."""

    def done(self, ticket: int) -> bool:
        """Whether the launch has finished, without waiting."""

    def wait_any(self, tickets: Sequence[int], until_s: float | None) -> int | None:
        """Wait until one of the launches has finished, and return its ticket; the first of the list wins a tie.

        Args:
            tickets: at least one.
            until_s: give up at this time of :meth:`now` and return None; None waits as long as it takes.
        """

    def wait(self, ticket: int) -> StepResult:
        """Wait for a launch and read its tokens; each ticket can be read once."""

    def now(self) -> float:
        """Seconds on the clock that request metrics use (virtual in a simulation)."""

    def sleep_until(self, time_s: float) -> None:
        """Let time pass with nothing under way, to this time of :meth:`now`."""

    def shutdown(self) -> bool:
        """Give back the device memory; nothing may be launched afterwards. Does not fail, even on a dead device.

        Returns:
            False where the device has failed: what uses its memory, or memory pinned for it, must not be freed any
            more, since that would abort the process.
        """


def keep_for_ever(what: object) -> None:
    """Never free an object, not even when the process ends: for what a failed device may still write to or refuse."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def max_batch_sizes(executor: Executor) -> dict[int, int]:
    """Most rows of a decode step by SMs of the decode lane, where there are fewer than slots."""
    limits = ((p.decode_tpcs, executor.max_batch_size(p)) for p in executor.partitions)
    return {SMS_PER_TPC * tpcs: rows for tpcs, rows in limits if tpcs is not None and rows is not None}
