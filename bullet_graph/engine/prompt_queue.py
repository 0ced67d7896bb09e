"""Sequences that wait for KV blocks, and the order to serve them."""

from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice

from bullet_graph.config import PromptOrder
from bullet_graph.engine.sequence import Sequence, Status
from bullet_graph.planner.slack import QueuedPrompt, order_prompts
from bullet_graph.planner.tuning import PlannerTuning

QUEUE_IN_SIGHT = 64
"""Prompts at the head of the queue that a tick considers: more of usual length than a chunk holds."""

_NEVER = float("inf")


class PromptQueue:
    """Sequences without blocks; a sequence may return after a preemption.

    Args:
        prompt_order: order of prompts without targets; see :class:`~bullet_graph.config.EngineConfig`.

    Attributes:
        num_tokens: tokens of their prompts.
    """

    def __init__(self, prompt_order: PromptOrder, tuning: PlannerTuning) -> None:
        self._prompt_order = prompt_order
        self._tuning = tuning
        self._waiting: dict[Sequence, QueuedPrompt] = {}
        self._num_with_deadline = 0
        self._num_preempted = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def longest_first(self) -> bool:
        """Whether prompts are ordered by the most tokens they may generate, the longest first."""
        return self._prompt_order == "longest-output" and not self._num_with_deadline

    def add(self, sequence: Sequence) -> None:
        """Add a sequence at the end."""
        self._waiting[sequence] = _queued(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        del self._waiting[sequence]
        self._count(sequence, -1)

    def ordered(self, started: list[Sequence], now_s: float, ms_per_token: float) -> Iterable[Sequence]:
        """Prompts under way and the head of the queue, in the order to serve them.

        With targets :func:`~bullet_graph.planner.slack.order_prompts` decides. Else it is ``prompt_order``,
        with prompts under way and preempted ones first.

        Args:
            started: prompts under way.
            now_s: on the clock of arrivals and deadlines.
            ms_per_token: prefill time per token, to predict which prompts will be late.
        """
        if self._num_with_deadline or any(s.deadline_s < _NEVER for s in started):
            unordered = [*started, *self._waiting]
            queued = [*(_queued(s) for s in started), *self._waiting.values()]
            order = order_prompts(queued, now_s, ms_per_token, self._tuning)
            return (unordered[i] for i in order)
        # Preemption takes the last to come first, so the reverse order is the order of arrival.
        preempted = [s for s in reversed(self._waiting) if s.preempted] if self._num_preempted else []
        fresh: Iterable[Sequence] = (s for s in self._waiting if not s.preempted)
        if self.longest_first:
            fresh = nsmallest(QUEUE_IN_SIGHT, fresh, key=lambda s: s.num_tokens - s.max_tokens)
        return [*started, *preempted, *islice(fresh, QUEUE_IN_SIGHT)]

    def _count(self, sequence: Sequence, change: int) -> None:
        self.num_tokens += change * sequence.num_tokens
        self._num_with_deadline += change * (sequence.deadline_s < _NEVER)
        self._num_preempted += change * sequence.preempted


def _queued(sequence: Sequence) -> QueuedPrompt:
    """The numbers that decide the order of prompts; constant while the sequence waits for blocks."""
    return QueuedPrompt(
        sequence.num_tokens - sequence.num_cached,
        sequence.arrival_s,
        sequence.deadline_s,
        started=sequence.status is Status.RUNNING,
        resumed=sequence.preempted,
    )
