"""Lays a step out as rows of one forward, in numpy; shared by the executors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.kernels import sampler
from bullet_graph.runtime.step import Adjustments, DecodeBatch, Int32Array, PrefillBatch, Scored, SlotInit, indptr_of

_NONE: Int32Array = np.empty(0, dtype=np.int32)

Chunk = tuple[int, int, bool]
"""Part of a prompt: its start, its number of tokens, and whether it ends the prompt, so that a token is sampled."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a forward: prefill chunks first, then decode rows.

    Attributes:
        token_ids: [num_prefill_rows]; decode rows take their slot's last token.
        kv_slots: [rows], place of each row's keys and values: block * block_tokens + offset.
        q_indptr: [n + 1] over all sequences.
        kv_lens: [n], tokens in each sequence's blocks, to which its rows attend.
        sample_rows: [s], rows whose next token is sampled: the last of their sequence.
        sample_indptr: [n + 1], place of each sequence's sampled row, if it has one, among them.
        sample_positions: [s], position that each sampled token will have.
        scored: that of the prefill batch.
        num_continued: prefill chunks up to the last one whose prompt an earlier step began. Chunks after it begin
            their prompts here and need no cache. An urgent prompt that begins here but stands before it is counted.
    """

    token_ids: Int32Array
    decode_slots: Int32Array
    positions: Int32Array
    kv_slots: Int32Array
    q_indptr: Int32Array
    kv_lens: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    sample_rows: Int32Array
    sample_indptr: Int32Array
    sample_slots: Int32Array
    sample_positions: Int32Array
    scored: Scored | None
    num_prefill: int
    num_continued: int

    @property
    def num_prefill_rows(self) -> int:
        return len(self.token_ids)

    def ended_prompts(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Indices [e] of the e chunks that end their prompt, and kv_indptr [e + 1] and kv_indices of their blocks.

        Their last rows come first among the sampled ones.
        """
        sequences = np.flatnonzero(np.diff(self.sample_indptr[: self.num_prefill + 1])).astype(np.int32)
        blocks = [self.kv_indices[self.kv_indptr[i] : self.kv_indptr[i + 1]] for i in sequences]
        return sequences, indptr_of(np.diff(self.kv_indptr)[sequences]), np.concatenate((_NONE, *blocks))


def make_batches(
    chunks: Sequence[Chunk],
    decode: Sequence[int],
    *,
    blocks: NDArray[Any],
    token_ids: NDArray[Any] | None = None,
    block_tokens: int = KV_BLOCK_TOKENS,
    slots: Sequence[int] | None = None,
) -> tuple[PrefillBatch | None, DecodeBatch | None]:
    """The batches of a step that no scheduler made; None where there are no rows of the kind.

    ``decode`` are the rows' positions. ``blocks`` are taken in this order, as many as the sequences need. ``token_ids``
    are of all chunks (None: zeros), ``slots`` of chunks and decode rows (None: ascending).
    """
    ends = [start + tokens for start, tokens, _ in chunks] + [position + 1 for position in decode]
    block_counts = np.array([-(-end // block_tokens) for end in ends], dtype=np.int32)
    lengths = np.array([tokens for _, tokens, _ in chunks], dtype=np.int32)
    n, split = len(chunks), int(block_counts[: len(chunks)].sum())
    all_slots = np.array(range(len(ends)) if slots is None else slots, dtype=np.int32)
    prefill = PrefillBatch(
        slots=all_slots[:n],
        token_ids=np.array(np.zeros(lengths.sum()) if token_ids is None else token_ids, dtype=np.int32),
        q_indptr=indptr_of(lengths),
        starts=np.array([start for start, _, _ in chunks], dtype=np.int32),
        kv_starts=np.zeros(n, dtype=np.int32),
        kv_indptr=indptr_of(block_counts[:n]),
        kv_indices=np.array(blocks[:split], dtype=np.int32),
        samples=np.array([samples for _, _, samples in chunks], dtype=np.bool_),
    )
    decode_batch = DecodeBatch(
        slots=all_slots[n:],
        positions=np.array(decode, dtype=np.int32),
        kv_starts=np.zeros(len(decode), dtype=np.int32),
        kv_indptr=indptr_of(block_counts[n:]),
        kv_indices=np.array(blocks[split : block_counts.sum()], dtype=np.int32),
    )
    return prefill if n else None, decode_batch if len(decode) else None


def lay_out(prefill: PrefillBatch | None, decode: DecodeBatch | None, block_tokens: int) -> Rows:
    """Join a step's prefill chunks and decode rows; at least one of the two must be given."""
    # Slots, starts, lengths, whether each samples, positions of first blocks, numbers of blocks, and block ids.
    parts: list[tuple[NDArray[Any], ...]] = []
    if prefill is not None:
        blocks = prefill.kv_starts, np.diff(prefill.kv_indptr), prefill.kv_indices
        parts.append((prefill.slots, prefill.starts, np.diff(prefill.q_indptr), prefill.samples, *blocks))
    if decode is not None:
        ones = np.ones_like(decode.positions)
        blocks = decode.kv_starts, np.diff(decode.kv_indptr), decode.kv_indices
        parts.append((decode.slots, decode.positions, ones, ones.astype(np.bool_), *blocks))
    slots, start, length, sampled, kv_start, blocks_of, kv_indices = map(np.concatenate, zip(*parts, strict=True))
    q_indptr, kv_indptr = indptr_of(length), indptr_of(blocks_of)
    end = start + length
    sequence = np.repeat(np.arange(len(length), dtype=np.int32), length)
    positions = np.arange(q_indptr[-1], dtype=np.int32) - q_indptr[:-1][sequence] + start[sequence]
    block_ids = kv_indices[(kv_indptr[:-1] - kv_start // block_tokens)[sequence] + positions // block_tokens]
    num_prefill = 0 if prefill is None else len(prefill.slots)
    continued = np.flatnonzero(start[:num_prefill])
    return Rows(
        token_ids=_NONE if prefill is None else prefill.token_ids,
        decode_slots=_NONE if decode is None else decode.slots,
        positions=positions,
        kv_slots=block_ids * np.int32(block_tokens) + positions % np.int32(block_tokens),
        q_indptr=q_indptr,
        kv_lens=end - kv_start,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        sample_rows=(q_indptr[1:] - 1)[sampled],
        sample_indptr=indptr_of(sampled.astype(np.int32)),
        sample_slots=slots[sampled],
        sample_positions=end[sampled],
        scored=None if prefill is None else prefill.scored,
        num_prefill=num_prefill,
        num_continued=int(continued[-1]) + 1 if len(continued) else 0,
    )


def settings_row(init: SlotInit) -> Int32Array:
    """The settings of a sequence that enters a slot, as a row of the sampler's: [SETTINGS_COLUMNS]."""
    row = np.full(sampler.SETTINGS_COLUMNS, -1, dtype=np.int32)
    row[[0, 2, 3]] = np.array([init.temperature, init.top_p, init.min_p], dtype=np.float32).view(np.int32)
    row[[1, 6]] = init.top_k, init.masked_until
    row[4:6] = np.array([init.seed], dtype=np.int64).view(np.int32)
    row[7] = sampler.USES_BITMASK * init.uses_bitmask
    if (adjust := init.adjustments) is not None:
        row[7] |= sampler.USES_MARKS | sampler.USES_BAD_WORDS * any(len(word) > 1 for word in adjust.bad_words)
        row[8:11] = np.array(adjust.params.penalties, dtype=np.float32).view(np.int32)
    first = sampler.MASKED_IDS_COLUMN
    row[first : first + len(init.masked_token_ids)] = init.masked_token_ids
    return row


def adjustments_row(adjust: Adjustments, vocab_size: int) -> Int32Array:
    """What a sequence that enters a slot starts from: the sampler's [vocab_size + TABLE_COLUMNS]."""
    counts = np.bincount(adjust.output_token_ids, minlength=vocab_size)
    marks = (counts.clip(max=sampler.MAX_OUTPUT_COUNT) * sampler.ONE_OUTPUT).astype(np.int32)
    marks[adjust.prompt_token_ids] |= sampler.IN_PROMPT
    table = np.full(sampler.TABLE_COLUMNS, -1, dtype=np.int32)
    table[: sampler.RECENT_COLUMN] = 0
    for index, (token_id, bias) in enumerate(adjust.params.biases, start=1):
        marks[token_id] += index * sampler.FIRST_BIAS
        table[index] = np.float32(bias).view(np.int32)
    output = adjust.output_token_ids[-sampler.RECENT_TOKENS :]
    end = len(adjust.prompt_token_ids) + len(adjust.output_token_ids)
    table[sampler.RECENT_COLUMN + np.arange(end - len(output), end) % sampler.RECENT_TOKENS] = output
    words = table[sampler.WORDS_COLUMN :].reshape(-1, 1 + sampler.RECENT_TOKENS)
    # A token that is banned everywhere stays so whatever precedes it.
    banned = {word[0] for word in adjust.bad_words if len(word) == 1}
    conditional = [word for word in adjust.bad_words if word[-1] not in banned]
    for row, (*before, last) in zip(words, conditional, strict=False):
        row[0], row[1 + sampler.RECENT_TOKENS - len(before) :] = last, before
        if output[-len(before) :].tolist() == before:
            banned.add(last)
    marks[sorted(banned)] |= np.int32(-(2**31))
    return np.concatenate((marks, table))
