"""The prompt tokens that wait, and how to cut them into chunks."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bullet_graph.perf.performance import PerformanceModel, attention_pairs
from bullet_graph.planner.plan import Load

LANE_CHUNK_TOKENS = 2048
"""Most rows that chunks of the prefill lane aim at on the whole GPU, and in proportion on a part of it: all of its
prompts get their first token when a chunk ends, and no other can begin before."""

WHOLE_QUEUE_RATIO = 1.25
"""Queues of up to so many times a chunk's size go into one chunk: a small rest would cost a chunk of its own."""

TTFT_SHARE = 0.95
"""Share of the time to a deadline that prefill may be planned to take."""


class Backlog:
    """The prompt tokens of a load, and what its next chunk could be.

    Attributes:
        tokens: of all waiting prompts in sight; of the chunk under way, where there is one.
        layers_left: layers that the next chunk, or the one under way, still has to run.
    """

    def __init__(self, load: Load, *, max_chunk_tokens: int, num_layers: int) -> None:
        self._load = load
        self._max_chunk_tokens = max_chunk_tokens
        self._ends: list[int] = []
        self._pairs: list[float] = []
        self._chunk = load.chunk
        self._num_layers = num_layers
        tokens, pairs = 0, 0.0
        if load.chunk is not None:
            tokens = load.chunk.tokens
        else:
            for prompt in load.prompts:
                tokens += prompt.tokens_left
                pairs += attention_pairs(prompt.tokens_left, prompt.tokens_cached)
                self._ends.append(tokens)
                self._pairs.append(pairs)
        self.tokens = tokens
        self.layers_left = num_layers if load.chunk is None else load.chunk.layers_left

    def pairs(self, tokens: int) -> float:
        """(query, key) pairs of a chunk of the first so many tokens, at most all of them."""
        if self._chunk is not None:
            return self._chunk.attention_pairs
        i = bisect_left(self._ends, tokens)
        before, pairs = (self._ends[i - 1], self._pairs[i - 1]) if i else (0, 0.0)
        return pairs + attention_pairs(tokens - before, self._load.prompts[i].tokens_cached)

    def lane_chunk(self, size: int) -> int:
        """Rows of a prefill-lane chunk that should be about ``size``; those of the chunk under way, if any."""
        whole = min(WHOLE_QUEUE_RATIO * size, self._max_chunk_tokens)
        return self.tokens if self._chunk is not None or self.tokens <= whole else size

    def demand(self, ms_per_token: float) -> "Demand":
        """What the deadlines ask for; those that would be missed even at ``ms_per_token`` are lost, and ask nothing."""
        load, tokens, first_ms = self._load, 0.0, math.inf
        tightest, some_late = (0.0, math.inf), False
        dues: list[tuple[float, float]] = []
        if load.chunk is not None:
            tokens = load.chunk.tokens * load.chunk.layers_left / self._num_layers
            dues.append((tokens, load.chunk.deadline_s))
        for prompt in load.prompts:
            tokens += prompt.tokens_left
            dues.append((tokens, prompt.deadline_s))
        for tokens, deadline_s in dues:
            ms = (deadline_s - load.now_s) * 1e3 * TTFT_SHARE
            if tokens * ms_per_token > ms:
                some_late = True
            elif ms < math.inf:
                first_ms = min(first_ms, ms)
                if tokens * tightest[1] > tightest[0] * ms:
                    tightest = (tokens, ms)
        return Demand(first_ms, *tightest, some_late)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the deadlines that can be met ask of prefill; without any, nothing.

    Attributes:
        first_ms: time to the earliest.
        tokens: to prefill by the one that asks for the highest rate.
        ms: time to that one.
        some_late: others are missed whatever is done, and wait for as high a rate as there can be.
    """

    first_ms: float
    tokens: float
    ms: float
    some_late: bool

    @property
    def tokens_per_ms(self) -> float:
        """The rate that meets them all."""
        return self.tokens / self.ms


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Chunks with the highest prefill rate, in rows.

    Attributes:
        whole: of a forward on the whole GPU.
        lane: of the prefill lane on the whole GPU.
        beside: of the prefill lane beside each size of the decode lane.
    """

    whole: int
    lane: int
    beside: Mapping[int, int]

    @classmethod
    def of(cls, model: PerformanceModel, max_chunk_tokens: int, decode_sms: Sequence[int]) -> "ChunkSizes":
        """Ask the model."""
        lane = min(max_chunk_tokens, LANE_CHUNK_TOKENS)
        others = {sms: model.num_sms - sms for sms in decode_sms}
        return cls(
            model.wave_chunk_tokens(max_chunk_tokens),
            model.wave_chunk_tokens(lane),
            {
                sms: model.wave_chunk_tokens(lane * rest // model.num_sms, rest)
                for sms, rest in others.items()
            },
        )
