"""Continuous batching over a paged KV cache: admits, preempts and finishes sequences, and fills steps."""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice

import numpy as np

from bullet_graph.config import KV_BLOCK_TOKENS, PromptOrder
from bullet_graph.engine.block_pool import BlockPool, BlocksStored, chained_keys, root_key
from bullet_graph.engine.prompt_queue import QUEUE_IN_SIGHT, PromptQueue, prompt_load
from bullet_graph.engine.sequence import ScheduledStep, Sequence, Status
from bullet_graph.partition.masks import Lane
from bullet_graph.planner.plan import PromptLoad
from bullet_graph.runtime.step import Bitmasks, DecodeBatch, Int32Array, PrefillBatch, Scored, Step, indptr_of

AWAITED_BLOCKS = 4
"""Blocks that a sequence leaves to another one which is about to write them: fewer are quicker written again."""

_Chunk = tuple[Sequence, int]
"""A prompt under way, and the position at which its rows of a step end."""


class Scheduler:
    """Queues sequences, gives them slots and blocks, and fills steps with the requested rows.

    When blocks run out, the sequence that came last loses its blocks and is recomputed later; no token is lost. When a
    sequence ends, its blocks are released only after all launched steps that touch them have been retired.
    ``num_blocks``, which includes the padding block, must hold a sequence of ``max_model_len``.

    ``window`` is the widest of all layers, None where a layer has none. Blocks before it are given back once no
    launched step reads them. So a sequence holds at most ``held_tokens`` tokens at once (None: ``max_model_len``),
    which then is what ``num_blocks`` must hold.

    With ``prefix_caching``, sequences that begin with the same tokens share full blocks. A block is shared once no
    launch writes it. The block of a prompt's last token is always computed, for its row gives the next token.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        prompt_order: PromptOrder = "arrival",
        block_tokens: int = KV_BLOCK_TOKENS,
        window: int | None = None,
        held_tokens: int | None = None,
        prefix_caching: bool = False,
    ) -> None:
        if prefix_caching and window is not None:
            raise ValueError("blocks before a window are given back, so they cannot be cached as a prefix")
        self.queue = PromptQueue(prompt_order)
        self.prefix_caching = prefix_caching
        self.max_model_len = max_model_len
        self._window = window
        self._held_tokens = held_tokens or max_model_len
        self.pool = BlockPool(
            num_blocks=num_blocks,
            num_slots=max_num_seqs,
            max_blocks_per_seq=-(-max_model_len // block_tokens),
            block_tokens=block_tokens,
        )
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._running: dict[Sequence, None] = {}
        self._admitted: list[Sequence] = []
        self._held: Sequence | None = None
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_found_tokens = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and want more tokens."""
        return len(self._running)

    def add(self, *samples: Sequence) -> None:
        """Queue sequences that have one prompt, such as the samples of a request."""
        for sequence in samples:
            sequence.max_tokens = min(sequence.max_tokens, self.max_model_len)
            sequence.block_keys = list(samples[0].block_keys)
            self._extend_keys(sequence)
            self._enqueue(sequence)

    def tokens_cached_for(self, sequence: Sequence) -> int:
        """Tokens that a sequence, queued or not, would find in the prefix cache now."""
        self._extend_keys(sequence)
        return len(self.pool.find(self._keys_to_find(sequence))) * self.pool.block_tokens

    def finish(self, sequence: Sequence) -> None:
        """Remove an ended or aborted sequence; its blocks follow when no step in flight touches them."""
        if sequence.status is Status.WAITING:
            self.queue.remove(sequence)
        elif sequence.status is Status.RUNNING:
            del self._running[sequence]
        sequence.status = Status.FINISHED
        self._release_if_idle(sequence)

    def retire(self, scheduled: ScheduledStep) -> None:
        """Note that a launched step is over; call it before handling the step's tokens."""
        for sequence, end in zip(scheduled.touched, scheduled.ends, strict=True):
            sequence.num_pending_steps -= 1
            if sequence.status is Status.FINISHED:
                self._release_if_idle(sequence)
            elif self._window is not None:
                # Later steps of the sequence run after this one on the device, from this position on.
                self.pool.slide(sequence.slot, end + 1 - self._window, sequence.num_tokens)
                sequence.kv_capacity = self.pool.capacity(sequence.slot)
        for sequence, end in zip(scheduled.prompts, scheduled.ends, strict=False):
            if sequence.slot >= 0:
                self._cache(sequence, end)
        for sequence in scheduled.sampled:
            sequence.num_in_flight -= 1
            # Decode rows of a prompt on the prefill lane have waited for this.
            sequence.decoding = sequence.prompt_launched

    # ---- what there is to do ----

    def decoding(self) -> list[Sequence]:
        """Running sequences that can decode now."""
        held = self._held if self._held is not None and self._held.num_pending_steps else None
        return [s for s in self._running if s.decoding and s.num_tokens < s.max_tokens and s is not held]

    def prompt_loads(self) -> list[PromptLoad]:
        """Every prompt with tokens that are in no launched step."""
        return [*(prompt_load(s) for s in self._running if not s.prompt_launched), *self.queue.loads]

    def prompts(self, now_s: float, ms_per_token: float) -> list[Sequence]:
        """Prompts that a chunk could take now, in serving order (:meth:`PromptQueue.ordered`).

        A waiting prompt is included while slots and blocks last for all before it. ``ms_per_token`` predicts late ones.
        """
        started = [
            s
            for s in self._running
            # One with a window may have to wait until steps in flight give its blocks back.
            if not s.prompt_launched and s.num_cached < s.kv_capacity and not self._is_held(s)
        ]
        return list(islice(self._admissible(self.queue.ordered(started, now_s, ms_per_token)), QUEUE_IN_SIGHT))

    def _admissible(self, queue: Iterable[Sequence]) -> Iterator[Sequence]:
        """Started prompts, and waiting ones up to the first without a slot or blocks."""
        slots, blocks, running = len(self._free_slots), self.pool.num_free, len(self._running)
        blocked = False
        awaited = set[bytes]()
        for sequence in queue:
            key = sequence.awaited_key
            if sequence.status is Status.RUNNING:
                yield sequence
            elif not blocked and not (key in awaited or key in self.queue.writers):
                need = self._blocks_to_start(sequence)
                if need + running > blocks:
                    need -= self.pool.num_held(self.pool.find(self._keys_to_find(sequence)))
                # One block per running sequence is kept back, so that the newcomer is not preempted at once.
                if slots and need + running <= blocks:
                    slots, blocks, running = slots - 1, blocks - need, running + 1
                    if key is not None:
                        awaited.add(key)
                    yield sequence
                else:
                    blocked = True

    def schedule(
        self,
        *,
        decode: Iterable[Sequence] = (),
        prompts: Iterable[Sequence] = (),
        chunk_tokens: int = 0,
        lane: Lane = "decode",
    ) -> ScheduledStep | None:
        """Fill a step of a lane; None if it would have no rows.

        ``decode`` and ``prompts`` are what :meth:`decoding` and :meth:`prompts` returned, with nothing retired or
        finished since then. Sequences without a block for the next token are left out.
        """
        decoding = self._take_decode(decode) if decode else []
        if self.prefix_caching:
            # Neighbours that begin with the same blocks may read them once.
            decoding.sort(key=lambda sequence: self.pool.first_block(sequence.slot))
        chunks = self._take_prefill(prompts, chunk_tokens) if chunk_tokens else []
        if not chunks and not decoding:
            return None
        scored = tuple((s, *span) for s, stop in chunks if (span := s.to_score(stop)) is not None)
        prefill = self._prefill_batch(chunks, scored) if chunks else None
        batch = self._decode_batch(decoding) if decoding else None
        sampled = tuple([s for s, stop in chunks if stop == s.num_tokens] + decoding)
        touched = tuple([s for s, _ in chunks] + decoding)
        admitted, self._admitted = tuple(self._admitted), []
        for sequence, stop in chunks:
            sequence.num_cached = stop
            sequence.prompt_launched = stop == sequence.num_tokens
            sequence.decoding = sequence.prompt_launched and lane == "decode"
        for sequence, _, end in scored:
            sequence.num_scored = end
        for sequence in decoding:
            sequence.num_cached += 1
        for sequence in touched:
            sequence.num_pending_steps += 1
        for sequence in sampled:
            sequence.num_in_flight += 1
            sequence.num_tokens += 1
        structured = [s for s in sampled if s.matcher is not None]
        for sequence in structured:
            sequence.decoding = False
        wanted = [s.params.logprobs for s in sampled if s.params.logprobs is not None]
        inits = tuple(s.slot_init() for s in admitted)
        step = Step(inits, prefill, batch, max(wanted) if wanted else None, _bitmasks(structured))
        return ScheduledStep(step, admitted, touched, sampled, tuple([s.num_cached for s in touched]), scored)

    # ---- decode rows ----

    def _take_decode(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The sequences that have, or get, a block for their next token."""
        self._held = None
        return [
            s
            for s in sequences
            # An earlier sequence of the list may have preempted this one, or holds it until it can be preempted.
            if s is not self._held
            and ((s.num_tokens <= s.kv_capacity and s.status is Status.RUNNING) or self._find_block(s))
        ]

    def _find_block(self, sequence: Sequence) -> bool:
        """Give the sequence room for one more token; the sequences that came last may lose their blocks for it."""
        while sequence.status is Status.RUNNING and not self._grow(sequence, sequence.num_tokens):
            victim = next(reversed(self._running))
            if victim.num_pending_steps:
                # Not all its tokens are on the host yet. Held out of this step, it is idle at a later call.
                self._held = victim
                return False
            self._preempt(victim)
        return sequence.status is Status.RUNNING

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        if not self.pool.grow(sequence.slot, num_tokens):
            return False
        sequence.kv_capacity = self.pool.capacity(sequence.slot)
        return True

    def _blocks_to_start(self, sequence: Sequence) -> int:
        """Blocks for its whole prompt: later ones take the place of those that its window has passed."""
        return self.pool.blocks_for(min(sequence.num_tokens, self._held_tokens))

    def _is_held(self, sequence: Sequence) -> bool:
        return sequence is self._held and sequence.num_pending_steps > 0

    def _decode_batch(self, sequences: list[Sequence]) -> DecodeBatch:
        slots = np.array([s.slot for s in sequences], dtype=np.int32)
        kv_lens = np.array([s.num_tokens for s in sequences], dtype=np.int32)
        return DecodeBatch(slots, kv_lens - 1, *self._blocks(slots, kv_lens - 1, kv_lens))

    # ---- prefill chunks ----

    def _take_prefill(self, prompts: Iterable[Sequence], budget: int) -> list[_Chunk]:
        """Take prompt rows in the order given, while slots, blocks and budget last."""
        chunks: list[_Chunk] = []
        for sequence in prompts:
            # Decode rows of the same step may have taken the prompt's blocks, or preempted it.
            if self._is_held(sequence) or (sequence.status is Status.WAITING and not self._admit(sequence)):
                continue
            stop = min(sequence.num_cached + budget, sequence.num_tokens, sequence.kv_capacity)
            chunks.append((sequence, stop))
            budget -= stop - sequence.num_cached
            # Checked here, as the next turn would admit a sequence without budget for it.
            if budget <= 0:
                break
        return chunks

    def _admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence if a slot and blocks for all its tokens are free and none is about to be written."""
        found = self._look_up(sequence)
        need = self._blocks_to_start(sequence) - self.pool.num_held(found)
        awaits = sequence.awaited_key in self.queue.writers
        if awaits or not self._free_slots or need + len(self._running) > self.pool.num_free:
            return False
        self.queue.remove(sequence)
        sequence.slot = self._free_slots.pop()
        self.pool.share(sequence.slot, found)
        self._grow(sequence, min(sequence.num_tokens, self._held_tokens))
        sequence.num_keyed = len(found)
        self.queue.writers.update(dict.fromkeys(sequence.block_keys[len(found) :], sequence))
        if not sequence.preempted:
            sequence.num_found = sequence.num_cached
            self.num_queried_tokens += sequence.num_tokens if self.prefix_caching else 0
            self.num_found_tokens += sequence.num_found
        sequence.status = Status.RUNNING
        self._running[sequence] = None
        self._admitted.append(sequence)
        return True

    def _prefill_batch(self, chunks: list[_Chunk], scored: tuple[tuple[Sequence, int, int], ...]) -> PrefillBatch:
        slots = np.array([s.slot for s, _ in chunks], dtype=np.int32)
        starts = np.array([s.num_cached for s, _ in chunks], dtype=np.int32)
        stops = np.array([stop for _, stop in chunks], dtype=np.int32)
        q_indptr = indptr_of(stops - starts)
        kv_starts, kv_indptr, kv_indices = self._blocks(slots, starts, stops)
        rows = None
        if scored:
            before = {s: row - s.num_cached for (s, _), row in zip(chunks, q_indptr.tolist(), strict=False)}
            rows = Scored(
                np.concatenate([np.arange(i, j, dtype=np.int32) + before[s] for s, i, j in scored]),
                np.concatenate([s.prompt_token_ids[i + 1 : j + 1] for s, i, j in scored]),
                max(s.params.prompt_logprobs or 0 for s, *_ in scored),
            )
        return PrefillBatch(
            slots=slots,
            token_ids=np.concatenate([s.known_token_ids(s.num_cached, stop) for s, stop in chunks]),
            q_indptr=q_indptr,
            starts=starts,
            kv_starts=kv_starts,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            samples=np.array([stop == s.num_tokens for s, stop in chunks], dtype=np.bool_),
            scored=rows,
        )

    def _blocks(
        self, slots: Int32Array, starts: Int32Array, stops: Int32Array
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Blocks that rows at positions from ``starts`` to ``stops`` read, as from :meth:`BlockPool.flatten`."""
        return self.pool.flatten(slots, stops, None if self._window is None else starts + 1 - self._window)

    # ---- the prefix cache ----

    def _keys_to_find(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks that a waiting sequence may share; a prompt that is scored needs all its rows."""
        return sequence.block_keys[: (0 if sequence.is_scored else (sequence.num_tokens - 1) // self.pool.block_tokens)]

    def _look_up(self, sequence: Sequence, least: int = AWAITED_BLOCKS) -> list[int]:
        """Find the blocks that a waiting sequence can share, and the key that it awaits."""
        keys = self._keys_to_find(sequence)
        found = self.pool.find(keys)
        # It awaits ``least`` blocks that it lacks. The sequence that writes the last of them also writes the others.
        last = len(found) + least - 1
        self.queue.expect(sequence, len(found) * self.pool.block_tokens, keys[last] if last < len(keys) else None)
        return found

    def _cache(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the sequence's blocks that ``num_tokens`` fill: no launch in flight writes them."""
        first = sequence.num_keyed
        keys = sequence.block_keys[first : num_tokens // self.pool.block_tokens]
        new = self.pool.cache(sequence.slot, first, keys)
        if self.pool.listener is not None:
            self._tell_stored(sequence, first, new)
        sequence.num_keyed += len(keys)
        self.queue.written(keys)
        for waiting in self.queue.awaiting(keys):
            # After a long wait, the few blocks that are left cost little more.
            self._look_up(waiting, least=1)

    def _tell_stored(self, sequence: Sequence, first: int, new: list[bool]) -> None:
        """Tell of the sequence's blocks from its ``first`` on that are ``new``, each run without a gap at once."""
        assert self.pool.listener is not None
        keys, size, start = sequence.block_keys, self.pool.block_tokens, first
        for is_new, run in groupby(new):
            stop = start + len(list(run))
            if is_new:
                parent = keys[start - 1] if start else None
                token_ids = sequence.known_token_ids(start * size, stop * size)
                self.pool.listener(BlocksStored(parent, tuple(keys[start:stop]), token_ids, sequence.params.cache_salt))
            start = stop

    def _extend_keys(self, sequence: Sequence) -> None:
        """Give the sequence keys for all full blocks of the tokens on the host."""
        keys, block_tokens = sequence.block_keys, self.pool.block_tokens
        start, stop = len(keys) * block_tokens, sequence.num_known
        if self.prefix_caching and stop - start >= block_tokens:
            parent = keys[-1] if keys else root_key(sequence.params.cache_salt)
            keys += chained_keys(parent, sequence.known_token_ids(start, stop), block_tokens)

    # ---- leaving ----

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        del self._running[sequence]
        self._release(sequence)
        sequence.prompt_launched = sequence.decoding = False
        sequence.preempted = True
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        sequence.num_cached, sequence.awaited_key = 0, None
        self.queue.add(sequence)
        self._look_up(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        if sequence.slot >= 0 and sequence.num_pending_steps == 0:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take slot and blocks of a sequence without steps in flight; others may find all that it has written."""
        self._extend_keys(sequence)
        self._cache(sequence, min(sequence.num_cached, sequence.num_known))
        self.queue.written(sequence.block_keys[sequence.num_keyed :])
        self.pool.clear(sequence.slot)
        sequence.kv_capacity = 0
        self._free_slots.append(sequence.slot)
        sequence.slot = -1


def _bitmasks(sequences: list[Sequence]) -> Bitmasks | None:
    """What the structured outputs of a step may go on with."""
    matchers = [s.matcher for s in sequences if s.matcher is not None]
    if not matchers:
        return None
    return Bitmasks(np.array([s.slot for s in sequences], dtype=np.int32), matchers[0].bitmasks(matchers))
