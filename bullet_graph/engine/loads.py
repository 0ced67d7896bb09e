"""What the loop tells the planner: sequences that decode, prompts that wait, and the chunk under way."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bullet_graph.engine.in_flight import InFlight
from bullet_graph.engine.prompt_queue import PromptQueue
from bullet_graph.engine.sequence import ScheduledStep
from bullet_graph.engine.sequence import Sequence as EngineSequence
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.planner.plan import ChunkLoad, DecodeLoad, Load, PromptLoad
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.slack import decode_load


def fill(chunk_tokens: int, decode_rows: int, max_rows: int, padded_rows: Callable[[int], int]) -> int:
    """Prompt rows of a chunk on the decode lane, those that replace padding included.

    Args:
        chunk_tokens: planned prompt rows; 0 for no chunk.
        decode_rows: decode rows of the same forward.
        max_rows: most rows of a forward.
        padded_rows: rows that a forward is padded to.
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
        tokens: number of its rows.
        pairs: (query, key) pairs of its attention.
        deadline_s: earliest deadline of its prompts.
        num_layers: layers of the model.
        next_layer: first layer that is not launched.
    """

    scheduled: ScheduledStep
    tokens: int
    pairs: float
    deadline_s: float
    num_layers: int
    next_layer: int = 0

    @classmethod
    def of(cls, scheduled: ScheduledStep, num_layers: int) -> "ChunkUnderWay":
        """A step of the prefill lane before its first launch."""
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
        """As the planner sees it."""
        return ChunkLoad(self.tokens, self.pairs, self.num_layers - self.next_layer, self.deadline_s)


def load_of(
    now_s: float,
    *,
    decoding: Sequence[EngineSequence],
    prompts: Sequence[EngineSequence],
    chunk: ChunkUnderWay | None,
    in_flight: InFlight,
    planner: Planner,
    queue: PromptQueue,
    timed: bool,
) -> Load:
    """What the loop could launch now, and how much time its sequences leave.

    Args:
        now_s: on the executor's clock.
        decoding: sequences that want a token now.
        prompts: prompts that a chunk could take now, in the order to serve them.
        chunk: the chunk under way on the prefill lane.
        in_flight: launches; prompts whose last slice is among them decode next.
        planner: predicts decode steps.
        queue: sequences that wait for blocks.
        timed: count TPOT targets even if nothing competes with decode.
    """
    rows = [*decoding, *_decoding_next(in_flight)]
    # Targets matter only where there is something to share the device with.
    bound = rows if timed or prompts or chunk is not None else ()
    return Load(
        now_s=now_s,
        decode=_decode_load(rows, bound, in_flight.decode_due_s(now_s), planner) if rows else None,
        prompts=tuple(PromptLoad(s.num_tokens - s.num_cached, s.num_cached, s.deadline_s) for s in prompts),
        queued_tokens=queue.num_tokens,
        chunk=None if chunk is None else chunk.load(),
        steps_left=_most_steps((*rows, *prompts)) if queue.longest_first else None,
    )


def _most_steps(sequences: Iterable[EngineSequence]) -> int:
    """Most tokens that any of them may still generate; with the longest first, no other prompt has more."""
    return max((s.max_tokens - s.num_tokens for s in sequences), default=0)


def _decoding_next(in_flight: InFlight) -> Iterator[EngineSequence]:
    """Sequences that decode as soon as the slices in flight are done."""
    for launch in in_flight["prefill"]:
        if launch.ends_chunk:
            for sequence in launch.scheduled.sampled:
                if sequence.prompt_launched and sequence.num_tokens < sequence.max_tokens:
                    yield sequence


def _decode_load(
    rows: Sequence[EngineSequence], bound: Iterable[EngineSequence], due_s: float, planner: Planner
) -> DecodeLoad:
    return decode_load(
        [
            (
                due_s if s.first_token_s is None else s.first_token_s,
                s.num_tokens - len(s.prompt_token_ids) or 1,
                s.max_tokens - s.num_tokens,
                tpot_ms,
            )
            for s in bound
            if (tpot_ms := s.slo.tpot_ms) is not None
        ],
        len(rows),
        sum([s.num_tokens for s in rows]),
        due_s,
        solo_ms=None if planner.model is None else planner.decode_ms,
        tuning=planner.tuning,
    )
