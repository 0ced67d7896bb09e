"""Rows of a forward, from a description of its sequences."""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bullet_graph.runtime.rows import Rows, lay_out
from bullet_graph.runtime.step import DecodeBatch, Int32Array, PrefillBatch


def make_rows(
    chunks: list[tuple[int, int, bool]],
    decode: list[int],
    *,
    num_blocks: int,
    block_tokens: int,
    blocks: NDArray[np.int64] | None = None,
    token_ids: NDArray[np.int64] | None = None,
) -> Rows:
    """Lay out prefill chunks and decode rows; their blocks are scattered, and block 0 is nobody's.

    Args:
        chunks: (start, tokens, whether it ends the prompt) of each.
        decode: position of each row.
        blocks: the order in which blocks are taken; None: a fixed random one.
        token_ids: of all chunks; None: ascending.
    """
    ends = [start + tokens for start, tokens, _ in chunks] + [position + 1 for position in decode]
    counts = [-(-end // block_tokens) for end in ends]
    if blocks is None:
        blocks = 1 + np.random.default_rng(7).permutation(num_blocks - 1)
    n, split = len(chunks), sum(counts[: len(chunks)])
    tokens = [tokens for _, tokens, _ in chunks]
    prefill = PrefillBatch(
        slots=_int32(range(n)),
        token_ids=_int32(range(sum(tokens)) if token_ids is None else token_ids),
        q_indptr=_int32([0, *accumulate(tokens)]),
        starts=_int32([start for start, _, _ in chunks]),
        kv_indptr=_int32([0, *accumulate(counts[:n])]),
        kv_indices=_int32(blocks[:split]),
        samples=np.array([samples for _, _, samples in chunks], dtype=np.bool_),
    )
    decode_batch = DecodeBatch(
        slots=_int32(range(n, n + len(decode))),
        positions=_int32(decode),
        kv_indptr=_int32([0, *accumulate(counts[n:])]),
        kv_indices=_int32(blocks[split : sum(counts)]),
    )
    return lay_out(prefill if chunks else None, decode_batch if decode else None, block_tokens)


def _int32(values: object) -> Int32Array:
    return np.array(values, dtype=np.int32)
