"""Sequences that wait for blocks, and the order in which they are to be served."""

from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice

from bullet_graph.config import PromptOrder
from bullet_graph.engine.sequence import Sequence, Status
from bullet_graph.planner.slack import QueuedPrompt, order_prompts
from bullet_graph.planner.tuning import PlannerTuning

QUEUE_IN_SIGHT = 64
"""Prompts at the head of the queue that a tick looks at: more than any chunk holds of usual lengths."""

_NEVER = float("inf")


class PromptQueue:
    """Sequences without blocks; a dequeued one may come back.

    Args:
        prompt_order: of those without targets; see :class:`~bullet_graph.config.EngineConfig`.

    Attributes:
        num_tokens: of their prompts.
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
        """Whether prompts come in the order of what they may generate, the longest output first."""
        return self._prompt_order == "longest-output" and not self._num_with_deadline

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end."""
        self._waiting[sequence] = _queued(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands."""
        del self._waiting[sequence]
        self._count(sequence, -1)

    def ordered(self, started: list[Sequence], now_s: float, ms_per_token: float) -> Iterable[Sequence]:
        """The head of the queue behind prompts under way, or among them, in the order to serve them.

        By slack (:func:`~bullet_graph.planner.slack.order_prompts`) where there are targets, else by ``prompt_order``,
        those under way and preempted ones before the others.

        Args:
            started: under way.
            now_s: on the clock of arrivals and deadlines.
            ms_per_token: prefill time of a token, for predicting who will be late.
        """
        if self._num_with_deadline or any(s.deadline_s < _NEVER for s in started):
            unordered = [*started, *self._waiting]
            queued = [*(_queued(s) for s in started), *self._waiting.values()]
            order = order_prompts(queued, now_s, ms_per_token, self._tuning)
            return (unordered[i] for i in order)
        # Victims were the last to come, the latest of them first.
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
    """What the order of prompts depends on; stays the same while the sequence waits for blocks."""
    return QueuedPrompt(
        sequence.num_tokens - sequence.num_cached,
        sequence.arrival_s,
        sequence.deadline_s,
        started=sequence.status is Status.RUNNING,
        resumed=sequence.preempted,
    )
