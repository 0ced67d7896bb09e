"""The queue of sequences that wait for KV blocks, and the order in which they are served."""

import math
from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice

from bullet_graph.config import PromptOrder
from bullet_graph.engine.sequence import Sequence, Status
from bullet_graph.planner.plan import PromptLoad
from bullet_graph.planner.slack import order_prompts

QUEUE_IN_SIGHT = 64
"""Prompts at the head of the queue that a tick considers: more of usual length than a chunk holds."""


class PromptQueue:
    """Sequences without blocks; a sequence may return after a preemption.

    ``num_tokens`` adds up what the prefix cache lacks of their tokens. ``writers`` are the prompts under way that will
    write the block of a key. A sequence that awaits one is passed over, and lends its deadline if that is earlier.
    """

    def __init__(self, prompt_order: PromptOrder) -> None:
        self._prompt_order = prompt_order
        self.writers: dict[bytes | None, Sequence] = {}
        self._waiting: dict[Sequence, PromptLoad] = {}
        self._by_awaited: dict[bytes, dict[Sequence, None]] = {}
        self._num_with_deadline = 0
        self._num_preempted = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def longest_first(self) -> bool:
        """Whether prompts are ordered by the most tokens they may generate, the longest first."""
        return self._prompt_order == "longest-output" and not self._num_with_deadline

    @property
    def loads(self) -> Iterable[PromptLoad]:
        """What the planner knows of each, in no order."""
        return self._waiting.values()

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = prompt_load(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        del self._waiting[sequence]

    def expect(self, sequence: Sequence, num_cached: int, awaited_key: bytes | None) -> None:
        """Note what a waiting sequence is expected to find in the prefix cache; it keeps its place."""
        self._count(sequence, -1)
        sequence.num_cached, sequence.awaited_key = num_cached, awaited_key
        self.add(sequence)

    def written(self, keys: Iterable[bytes]) -> None:
        """Note that these blocks are written, or that their writer has gone."""
        for key in keys:
            self.writers.pop(key, None)

    def awaiting(self, keys: Iterable[bytes]) -> list[Sequence]:
        """Sequences that await one of these keys."""
        return [sequence for key in keys for sequence in self._by_awaited.get(key, ())]

    def ordered(self, started: list[Sequence], now_s: float, ms_per_token: float) -> Iterable[Sequence]:
        """Prompts under way and the head of the queue, in the order to serve them.

        With targets :func:`~bullet_graph.planner.slack.order_prompts` decides. Else it is ``prompt_order``,
        with prompts under way and preempted ones first.
        """
        writers = self.writers
        if self._num_with_deadline or any(s.deadline_s < math.inf for s in started):
            loads = {s: prompt_load(s) for s in started}
            for sequence, load in self._waiting.items():
                writer = writers.get(sequence.awaited_key)
                if writer is None:
                    loads[sequence] = load
                elif writer in loads and load.deadline_s < loads[writer].deadline_s:
                    loads[writer] = loads[writer]._replace(deadline_s=load.deadline_s)
            unordered = list(loads)
            return (unordered[i] for i in order_prompts(list(loads.values()), now_s, ms_per_token))
        # Preemption takes the last to come first, so the reverse order is the order of arrival.
        preempted = [s for s in reversed(self._waiting) if s.preempted] if self._num_preempted else []
        fresh: Iterable[Sequence] = (s for s in self._waiting if not s.preempted and s.awaited_key not in writers)
        if self.longest_first:
            fresh = nsmallest(QUEUE_IN_SIGHT, fresh, key=lambda s: s.num_tokens - s.max_tokens)
        return [*started, *preempted, *islice(fresh, QUEUE_IN_SIGHT)]

    def _count(self, sequence: Sequence, change: int) -> None:
        self.num_tokens += change * self._waiting[sequence].tokens_left
        self._num_with_deadline += change * (sequence.deadline_s < math.inf)
        self._num_preempted += change * sequence.preempted
        key = sequence.awaited_key
        if key is None:
            return
        if change > 0:
            self._by_awaited.setdefault(key, {})[sequence] = None
        else:
            del self._by_awaited[key][sequence]
            if not self._by_awaited[key]:
                del self._by_awaited[key]


def prompt_load(sequence: Sequence) -> PromptLoad:
    """What the planner knows of a prompt; constant while the sequence waits for blocks."""
    return PromptLoad(
        sequence.num_tokens - sequence.num_cached,
        sequence.num_cached,
        sequence.deadline_s,
        sequence.arrival_s,
        started=sequence.status is Status.RUNNING,
        resumed=sequence.preempted,
    )
