"""All there is to do now, as the planner is told of it."""

from collections.abc import Iterable, Iterator, Sequence

from bullet_graph.engine.chunk import ChunkUnderWay
from bullet_graph.engine.in_flight import InFlight
from bullet_graph.engine.prompt_queue import PromptQueue
from bullet_graph.engine.sequence import Sequence as EngineSequence
from bullet_graph.planner.plan import DecodeLoad, Load, PromptLoad
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.slack import decode_load


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
    """What the loop could launch, and how much time its sequences leave.

    Args:
        now_s: on the executor's clock.
        decoding: want a token now.
        prompts: a chunk could take now, in the order to serve them.
        chunk: under way on the prefill lane.
        in_flight: what the device has; the prompts that its slices end decode next.
        planner: whose rates say what the future brings.
        queue: what waits for blocks.
        timed: count the targets of sequences that decode even if nothing contends with them.
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
    """Of any of them; where the longest come first, no other that waits has more."""
    return max((s.max_tokens - s.num_tokens for s in sequences), default=0)


def _decoding_next(in_flight: InFlight) -> Iterator[EngineSequence]:
    """What decodes as soon as the slices in flight are done."""
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
    )
