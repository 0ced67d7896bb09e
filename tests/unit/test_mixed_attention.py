"""Attention split by kinds of rows against the reference, which knows but one kind."""

from itertools import pairwise

import torch
from forward_rows import make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.kernels.attention import LayerRows, MixedAttention, ReferenceAttention
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.ops import RowInputs, TorchOps
from bullet_graph.models.presets import PRESETS
from bullet_graph.runtime.rows import Rows

CPU = torch.device("cpu")
CONFIG = PRESETS["tiny"]
NUM_BLOCKS, BLOCK_TOKENS = 64, 4
LAYER = 1


class CachedRows:
    """The reference, for some of a forward's sequences."""

    def __init__(self, cache: KVCache, rows: Rows, sequences: slice) -> None:
        first, last = sequences.start, sequences.stop
        q_indptr, kv_indptr = rows.q_indptr[first : last + 1], rows.kv_indptr[first : last + 1]
        self._reference = ReferenceAttention(
            cache,
            q_indptr=(q_indptr - q_indptr[0]).tolist(),
            kv_lens=rows.kv_lens[sequences].tolist(),
            kv_indptr=kv_indptr.tolist(),
            kv_indices=torch.from_numpy(rows.kv_indices).long(),
        )

    def run_into(self, layer: int, rows: LayerRows, out: torch.Tensor) -> None:
        out.copy_(self._reference.run(layer, rows).view_as(out))


class FreshRows:
    """Causal attention of each sequence's rows to one another."""

    def __init__(self, indptr: list[int]) -> None:
        self._indptr = indptr

    def run_into(self, layer: int, rows: LayerRows, out: torch.Tensor) -> None:  # noqa: ARG002
        for start, stop in pairwise(self._indptr):
            q, k, v = (tensor[start:stop].transpose(0, 1)[None] for tensor in (rows.q, rows.k, rows.v))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out[start:stop] = attended[0].transpose(0, 1)


@settings(max_examples=60)
@given(
    chunks=st.lists(st.tuples(st.sampled_from([0, 0, 3, 4, 9]), st.integers(1, 9), st.just(True)), max_size=5),
    decode=st.lists(st.integers(0, 10), max_size=3),
    seed=st.integers(0, 9),
)
@torch.inference_mode()
def test_kinds_of_rows_make_the_whole(chunks: list[tuple[int, int, bool]], decode: list[int], seed: int) -> None:
    if not chunks and not decode:
        return
    rows = make_rows(chunks, decode, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS)
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(CONFIG, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, dtype=torch.float32, device=CPU)
    for half in cache.layer(LAYER):
        half.normal_(generator=generator)
    qkv = torch.randn(len(rows.positions), CONFIG.q_size + 2 * CONFIG.kv_size, generator=generator)
    inputs = RowInputs(
        torch.from_numpy(rows.positions).long(),
        torch.from_numpy(rows.kv_slots).long(),
        torch.randn(32, CONFIG.head_dim, generator=generator),
    )
    q = TorchOps().rope_and_cache(qkv, inputs, cache.layer(LAYER), None)
    layer_rows = LayerRows.of(q, qkv)

    n, c = rows.num_prefill, rows.num_continued
    mixed = MixedAttention(
        CachedRows(cache, rows, slice(0, c)) if c else None,
        FreshRows(rows.q_indptr[c : n + 1].tolist()) if c < n else None,
        CachedRows(cache, rows, slice(n, len(rows.kv_lens))) if decode else None,
        int(rows.q_indptr[c]),
        rows.num_prefill_rows,
    )
    whole = torch.full_like(q, torch.nan)
    CachedRows(cache, rows, slice(0, len(rows.kv_lens))).run_into(LAYER, layer_rows, whole)
    torch.testing.assert_close(mixed.run(LAYER, layer_rows), whole.flatten(1))
