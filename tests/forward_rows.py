"""Batches and rows of a forward, from a description of its sequences."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from bullet_graph.runtime.rows import Rows, lay_out
from bullet_graph.runtime.step import DecodeBatch, Int32Array, PrefillBatch

Chunk = tuple[int, int, bool]
"""Where it starts in its prompt, its number of tokens, and whether it ends the prompt."""


def make_batches(
    chunks: Sequence[Chunk],
    decode: Sequence[int],
    *,
    blocks: np.ndarray,
    block_tokens: int,
    token_ids: np.ndarray | None = None,
    slots: Sequence[int] | None = None,
) -> tuple[PrefillBatch | None, DecodeBatch | None]:
    """The two batches of a step; None where there are no rows of the kind.

    Args:
        decode: position of each row.
        blocks: taken in this order.
        token_ids: of all chunks; None: ascending.
        slots: of chunks and decode rows; None: ascending.
    """
    ends = [start + tokens for start, tokens, _ in chunks] + [position + 1 for position in decode]
    counts = [-(-end // block_tokens) for end in ends]
    n, split = len(chunks), sum(counts[: len(chunks)])
    tokens = [tokens for _, tokens, _ in chunks]
    slots = range(len(ends)) if slots is None else slots
    prefill = PrefillBatch(
        slots=_int32(slots[:n]),
        token_ids=_int32(range(sum(tokens)) if token_ids is None else token_ids),
        q_indptr=_int32([0, *accumulate(tokens)]),
        starts=_int32([start for start, _, _ in chunks]),
        kv_indptr=_int32([0, *accumulate(counts[:n])]),
        kv_indices=_int32(blocks[:split]),
        samples=np.array([samples for _, _, samples in chunks], dtype=np.bool_),
    )
    decode_batch = DecodeBatch(
        slots=_int32(slots[n:]),
        positions=_int32(decode),
        kv_indptr=_int32([0, *accumulate(counts[n:])]),
        kv_indices=_int32(blocks[split : sum(counts)]),
    )
    return prefill if chunks else None, decode_batch if decode else None


def make_rows(
    chunks: Sequence[Chunk],
    decode: Sequence[int],
    *,
    num_blocks: int,
    block_tokens: int,
    blocks: np.ndarray | None = None,
    token_ids: np.ndarray | None = None,
) -> Rows:
    """Lay such a step out; without ``blocks`` they are scattered, and block 0 is nobody's."""
    if blocks is None:
        blocks = 1 + np.random.default_rng(7).permutation(num_blocks - 1)
    batches = make_batches(chunks, decode, blocks=blocks, block_tokens=block_tokens, token_ids=token_ids)
    return lay_out(*batches, block_tokens)


def _int32(values: object) -> Int32Array:
    return np.array(values, dtype=np.int32)
