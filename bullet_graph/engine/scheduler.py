"""Decides what each step runs: continuous batching over a paged KV cache."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bullet_graph.config import Arm
from bullet_graph.engine.block_pool import BlockPool
from bullet_graph.engine.sequence import Sequence, Status
from bullet_graph.runtime.step import DecodeBatch, Int32Array, PrefillBatch, SlotInit, Step
from bullet_graph.sampling_params import GREEDY_BELOW_TEMPERATURE

_INT32_MAX = 2**31 - 1

# No vocabulary is so large that its most probable token has less, so it keeps that one alone, as less would.
_TOP_P_MIN = 1e-9


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step and whose it is.

    Attributes:
        step: what the executor runs.
        admitted: sequences that got their slot in this step.
        touched: sequences whose blocks the step reads or writes.
        sampled: sequences that get a token, in the order of the result's rows.
    """

    step: Step
    admitted: tuple[Sequence, ...]
    touched: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    sequence: Sequence
    start: int
    stop: int
    ends_prompt: bool


class Scheduler:
    """Admits sequences in order of arrival, gives them blocks, and fills steps as the arm says.

    When blocks run out, the sequence that came last loses its blocks and is recomputed later: nothing is
    lost. Blocks of a sequence that ends while steps that touch them are in flight are given back only when
    those steps have been retired.

    Args:
        arm: how prefill and decode share a step.
        chunk_tokens: most rows of a step; at least a block's worth goes to a waiting prompt, however many
            decode rows there are.
        max_num_seqs: most sequences running at once.
        max_model_len: most tokens of a sequence.
        pool: the KV cache's blocks; must hold one sequence of ``max_model_len``.
    """

    def __init__(
        self, *, arm: Arm, chunk_tokens: int, max_num_seqs: int, max_model_len: int, pool: BlockPool
    ) -> None:
        self._arm = arm
        self._chunk_tokens = chunk_tokens
        self._max_model_len = max_model_len
        self._pool = pool
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}
        self._admitted: list[Sequence] = []
        self._held: Sequence | None = None
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and want more tokens."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, ended or aborted; its blocks follow once no step in flight touches them."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            del self._running[sequence]
        sequence.status = Status.FINISHED
        self._release_if_idle(sequence)

    def retire(self, scheduled: ScheduledStep) -> None:
        """Note that a launched step is over; call before looking at the tokens it sampled."""
        for sequence in scheduled.touched:
            sequence.num_pending_steps -= 1
            if sequence.status is Status.FINISHED:
                self._release_if_idle(sequence)
        for sequence in scheduled.sampled:
            sequence.num_in_flight -= 1

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when there is nothing to launch before a step in flight is retired."""
        self._held = None
        if self._arm.name == "serial":
            chunks = self._take_prefill(self._chunk_tokens)
            decoding = [] if chunks else self._take_decode()
        else:
            decoding = self._take_decode()
            floor = min(self._chunk_tokens, self._pool.block_tokens)
            chunks = self._take_prefill(max(self._chunk_tokens - len(decoding), floor))
        if not chunks and not decoding:
            return None
        prefill = self._prefill_batch(chunks) if chunks else None
        decode = self._decode_batch(decoding) if decoding else None
        sampled = tuple([c.sequence for c in chunks if c.ends_prompt] + decoding)
        touched = tuple([c.sequence for c in chunks] + decoding)
        admitted, self._admitted = tuple(self._admitted), []
        for chunk in chunks:
            chunk.sequence.num_cached = chunk.stop
            chunk.sequence.decoding = chunk.ends_prompt
        for sequence in decoding:
            sequence.num_cached += 1
        for sequence in touched:
            sequence.num_pending_steps += 1
        for sequence in sampled:
            sequence.num_in_flight += 1
        wanted = [s.params.logprobs for s in sampled if s.params.logprobs is not None]
        inits = tuple(_slot_init(s) for s in admitted)
        step = Step(inits, prefill, decode, max(wanted) if wanted else None)
        return ScheduledStep(step, admitted, touched, sampled)

    # ---- decode rows ----

    def _take_decode(self) -> list[Sequence]:
        """Running sequences that can take a token now, each with a block for it."""
        rows: list[Sequence] = []
        for sequence in list(self._running):
            if (
                sequence.status is Status.RUNNING
                and self._wants_token(sequence)
                and self._find_block(sequence)
            ):
                rows.append(sequence)
        return rows

    def _find_block(self, sequence: Sequence) -> bool:
        """Give the sequence room for one more token, at the cost of those that came last.

        A victim must have all its tokens on the host before it can be recomputed, so one with steps in
        flight is held out of this step instead; the caller's next tries find it idle.
        """
        while sequence.status is Status.RUNNING and not self._pool.grow(sequence.slot, sequence.num_tokens):
            victim = next(reversed(self._running))
            if victim.num_pending_steps:
                self._held = victim
                return False
            self._preempt(victim)
        return sequence.status is Status.RUNNING

    def _wants_token(self, sequence: Sequence) -> bool:
        return (
            sequence.decoding
            and sequence is not self._held
            and len(sequence.output_token_ids) + sequence.num_in_flight < sequence.params.max_tokens
            and sequence.num_tokens < self._max_model_len
        )

    def _decode_batch(self, sequences: list[Sequence]) -> DecodeBatch:
        slots = np.array([s.slot for s in sequences], dtype=np.int32)
        kv_lens = np.array([s.num_tokens for s in sequences], dtype=np.int32)
        indptr, indices = self._pool.flatten(slots, kv_lens)
        return DecodeBatch(slots, kv_lens - 1, indptr, indices)

    # ---- prefill chunks ----

    def _take_prefill(self, budget: int) -> list[_Chunk]:
        """Chunks of prompts under way, then of waiting ones while slots, blocks and budget last."""
        chunks: list[_Chunk] = []
        for sequence in self._prefilling():
            target = sequence.num_tokens
            stop = min(sequence.num_cached + budget, target)
            chunks.append(_Chunk(sequence, sequence.num_cached, stop, stop == target))
            budget -= stop - sequence.num_cached
            # Asked here, not above: going on would admit a sequence for which there is no budget left.
            if budget <= 0:
                break
        return chunks

    def _prefilling(self) -> Iterator[Sequence]:
        yield from [s for s in self._running if not s.decoding and s is not self._held]
        while self._waiting and self._admit(self._waiting[0]):
            yield next(reversed(self._running))

    def _admit(self, sequence: Sequence) -> bool:
        """Move the head of the queue to running if a slot and the blocks of all its tokens are free.

        One block a running sequence is kept back, so that the newcomer is not preempted at once.
        """
        need = self._pool.blocks_for(sequence.num_tokens)
        if not self._free_slots or need + len(self._running) > self._pool.num_free:
            return False
        self._waiting.popleft()
        sequence.slot = self._free_slots.pop()
        self._pool.grow(sequence.slot, sequence.num_tokens)
        sequence.status = Status.RUNNING
        self._running[sequence] = None
        self._admitted.append(sequence)
        return True

    def _prefill_batch(self, chunks: list[_Chunk]) -> PrefillBatch:
        slots = np.array([c.sequence.slot for c in chunks], dtype=np.int32)
        starts = np.array([c.start for c in chunks], dtype=np.int32)
        stops = np.array([c.stop for c in chunks], dtype=np.int32)
        q_indptr: Int32Array = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(stops - starts, out=q_indptr[1:])
        kv_indptr, kv_indices = self._pool.flatten(slots, stops)
        return PrefillBatch(
            slots=slots,
            token_ids=np.concatenate([c.sequence.known_token_ids(c.start, c.stop) for c in chunks]),
            q_indptr=q_indptr,
            starts=starts,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            samples=np.array([c.ends_prompt for c in chunks], dtype=np.bool_),
        )

    # ---- leaving ----

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        del self._running[sequence]
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.num_cached = 0
        sequence.decoding = False
        self._waiting.appendleft(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        if sequence.slot >= 0 and sequence.num_pending_steps == 0:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1


def _slot_init(sequence: Sequence) -> SlotInit:
    """Settings in the device's 32-bit numbers; what these cannot hold has the same effect as their limit."""
    params = sequence.params
    return SlotInit(
        slot=sequence.slot,
        temperature=params.temperature if params.temperature >= GREEDY_BELOW_TEMPERATURE else 0.0,
        top_k=min(max(params.top_k, 0), _INT32_MAX),
        top_p=max(params.top_p, _TOP_P_MIN),
        min_p=params.min_p,
        seed=sequence.seed,
        masked_token_ids=tuple(sorted(sequence.stop_token_ids)) if params.min_tokens else (),
        masked_until=min(len(sequence.prompt_token_ids) + params.min_tokens, _INT32_MAX),
    )
