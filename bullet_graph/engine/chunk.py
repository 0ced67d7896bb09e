"""A prefill chunk: its size, and its way through the layers."""

from collections.abc import Callable
from dataclasses import dataclass

from bullet_graph.engine.sequence import ScheduledStep
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.planner.plan import ChunkLoad


def fill(chunk_tokens: int, decode_rows: int, max_rows: int, padded_rows: Callable[[int], int]) -> int:
    """Prompt rows of a chunk on the decode lane, and as many more as take the place of padding.

    Args:
        chunk_tokens: planned; 0: no chunk.
        decode_rows: beside it.
        max_rows: most rows of a forward.
        padded_rows: what a forward of so many rows is computed with.
    """
    if not chunk_tokens:
        return 0
    rows = chunk_tokens + decode_rows
    return min(padded_rows(rows), max(max_rows, rows)) - decode_rows


@dataclass(slots=True)
class ChunkUnderWay:
    """A chunk on the prefill lane, some of whose layers are still to launch.

    Attributes:
        scheduled: its step.
        tokens: its rows.
        pairs: (query, key) pairs of its attention.
        deadline_s: the earliest of its prompts.
        num_layers: of the model.
        next_layer: the first that is not launched.
    """

    scheduled: ScheduledStep
    tokens: int
    pairs: float
    deadline_s: float
    num_layers: int
    next_layer: int = 0

    @classmethod
    def of(cls, scheduled: ScheduledStep, num_layers: int) -> "ChunkUnderWay":
        """A step of the prefill lane, of which nothing is launched."""
        prefill = scheduled.step.prefill
        assert prefill is not None  # the prefill lane has nothing else
        lengths = (prefill.q_indptr[1:] - prefill.q_indptr[:-1]).tolist()
        cached = prefill.starts.tolist()
        return cls(
            scheduled,
            len(prefill.token_ids),
            sum(attention_pairs(tokens, before) for tokens, before in zip(lengths, cached, strict=True)),
            min(sequence.deadline_s for sequence in scheduled.touched),
            num_layers,
        )

    def load(self) -> ChunkLoad:
        """What the planner is told of it."""
        return ChunkLoad(self.tokens, self.pairs, self.num_layers - self.next_layer, self.deadline_s)
