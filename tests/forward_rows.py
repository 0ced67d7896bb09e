"""Rows of a forward, from a description of its sequences."""

from collections.abc import Sequence

import numpy as np

from bullet_graph.runtime.rows import Chunk, Rows, lay_out, make_batches


def make_rows(
    chunks: Sequence[Chunk],
    decode: Sequence[int],
    *,
    num_blocks: int,
    block_tokens: int,
    blocks: np.ndarray | None = None,
    token_ids: np.ndarray | None = None,
) -> Rows:
    """Lay out chunks with ascending token ids and decode rows, by their positions.

    Without ``blocks`` they are scattered, and block 0 is nobody's.
    """
    if blocks is None:
        blocks = 1 + np.random.default_rng(7).permutation(num_blocks - 1)
    if token_ids is None:
        token_ids = np.arange(sum(tokens for _, tokens, _ in chunks))
    batches = make_batches(chunks, decode, blocks=blocks, block_tokens=block_tokens, token_ids=token_ids)
    return lay_out(*batches, block_tokens)
