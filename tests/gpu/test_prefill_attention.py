"""Attention of all kinds of rows in one forward on the GPU, against the reference over the cache in float32."""

from dataclasses import replace

import pytest
import torch
from forward_rows import make_rows

from bullet_graph.kernels.attention import LayerRows, MixedAttention, ReferenceAttention
from bullet_graph.kernels.decode_attention import DecodeBatch, TritonDecodeAttention, window_indptr
from bullet_graph.kernels.flashinfer_attention import PagedBatch, PrefillAttention, cached_modules, fresh_modules
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.ops import RowInputs
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import cos_sin_tables
from bullet_graph.models.presets import PRESETS
from bullet_graph.runtime.memory import prefill_workspace_bytes
from bullet_graph.runtime.rows import Rows

DEVICE = torch.device("cuda")
UNUSED = torch.empty(0)
NUM_BLOCKS, BLOCK_TOKENS, MAX_LEN, LAYER = 1500, 16, 8192, 1

MODELS = {
    "heads of 128": PRESETS["llama-3.1-8b"],
    "heads of 64": PRESETS["llama-3.2-1b"],
    "one key head": replace(PRESETS["llama-3.1-8b"], num_heads=6, num_kv_heads=1),
    "a window of 1": replace(PRESETS["llama-3.1-8b"], layer_windows=(None, 1)),
    "a window of 100": replace(PRESETS["llama-3.1-8b"], layer_windows=(None, 100)),
    "an FP8 cache": replace(PRESETS["llama-3.1-8b"], fp8_kv=True),
    "an FP8 cache and a window": replace(PRESETS["llama-3.2-1b"], fp8_kv=True, layer_windows=(None, 100)),
    "a window of 1000": replace(PRESETS["llama-3.2-1b"], layer_windows=(100, 1000)),
}


class Kernels:
    """What one lane has for prefill chunks and decode rows."""

    def __init__(self, config: ModelConfig, cache: KVCache, dtype: torch.dtype) -> None:
        scratch = torch.zeros(prefill_workspace_bytes(config), dtype=torch.uint8, device=DEVICE)
        gpu = Gpu.of(DEVICE)
        cached = cached_modules(gpu, dtype, config)
        self._cached, self._fresh = (
            PrefillAttention(config, cache, modules=modules, float_workspace=scratch)
            for modules in (cached, fresh_modules(gpu, dtype, config) or cached)
        )
        self._decode = TritonDecodeAttention(config, cache, max_rows=64, gpu=Gpu.of(DEVICE))
        self._block_tokens = cache.block_tokens
        self._windows = {w for w in cache.windows if w is not None}

    def plan(self, rows: Rows) -> MixedAttention:
        n, c = rows.num_prefill, rows.num_continued
        q_indptr, kv_indptr, kv_lens, kv_indices = (
            torch.from_numpy(a).to(DEVICE) for a in (rows.q_indptr, rows.kv_indptr, rows.kv_lens, rows.kv_indices)
        )
        last_block = (kv_lens - 1) % self._block_tokens + 1
        cached = fresh = decode = None
        if c:
            cached = self._cached.plan(
                PagedBatch(
                    q_indptr=q_indptr[: c + 1],
                    kv_indptr=kv_indptr[: c + 1],
                    kv_indices=kv_indices,
                    last_block_tokens=last_block[:c],
                    host_q_indptr=torch.from_numpy(rows.q_indptr[: c + 1]),
                    host_kv_indptr=torch.from_numpy(rows.kv_indptr[: c + 1]),
                    host_kv_lens=torch.from_numpy(rows.kv_lens[:c]),
                )
            )
        if c < n:
            fresh = self._fresh.plan_ragged(q_indptr[c : n + 1], torch.from_numpy(rows.q_indptr[c : n + 1]))
        if len(rows.decode_slots):
            decode = self._decode.plan(
                DecodeBatch(
                    kv_indptr[n:] - int(rows.kv_indptr[n]),
                    kv_indices[rows.kv_indptr[n] :],
                    last_block[n:],
                    {
                        w: torch.from_numpy(window_indptr(rows.kv_lens[n:], w, self._block_tokens)).to(DEVICE)
                        for w in self._windows
                    },
                )
            )
        return MixedAttention(cached, fresh, decode, int(rows.q_indptr[c]), rows.num_prefill_rows)


def rows_of(chunks: list[tuple[int, int]], decode: list[int]) -> Rows:
    return make_rows(
        [(start, tokens, True) for start, tokens in chunks], decode, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS
    )


def project(config: ModelConfig, cache: KVCache, rows: Rows, dtype: torch.dtype) -> tuple[LayerRows, RowInputs]:
    """Random queries, keys and values of a forward whose sequences have random prefixes in the cache."""
    for half in cache.layer(LAYER):
        half.copy_(torch.randn(half.shape, device=DEVICE))
    qkv = torch.randn(len(rows.positions), config.q_size + 2 * config.kv_size, device=DEVICE).to(dtype)
    inputs = RowInputs(
        torch.from_numpy(rows.positions).to(DEVICE),
        torch.from_numpy(rows.kv_slots).to(DEVICE),
        cos_sin_tables(config, MAX_LEN, DEVICE)[0],
    )
    return LayerRows.of(TritonOps().rope_and_cache(qkv, inputs, cache.layer(LAYER), None), qkv), inputs


def expected_attention(config: ModelConfig, cache: KVCache, rows: Rows, q: torch.Tensor) -> torch.Tensor:
    clean = KVCache(config, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, dtype=torch.float32, device=DEVICE)
    for target, source in zip(clean.layer(LAYER), cache.layer(LAYER), strict=True):
        target.copy_(source)
    reference = ReferenceAttention(
        clean,
        q_indptr=rows.q_indptr.tolist(),
        kv_lens=rows.kv_lens.tolist(),
        kv_indptr=rows.kv_indptr.tolist(),
        kv_indices=torch.from_numpy(rows.kv_indices).long().to(DEVICE),
    )
    return reference.run(LAYER, LayerRows(q.float(), UNUSED, UNUSED))


def assert_close_in_each_row(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Row by row: one wrong row among thousands must not drown."""
    errors = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < tolerance, f"row {int(errors.argmax())}: {float(errors.max()):.3g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_mixtures_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    config = replace(MODELS[name], num_layers=LAYER + 1)
    cache = KVCache(config, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, dtype=dtype, device=DEVICE)
    kernels = Kernels(config, cache, dtype)
    for chunks, decode in [
        ([(0, 1)], []),
        ([(0, 2048)], []),
        ([(0, 127), (0, 128), (0, 129), (0, 1)], []),
        ([(0, 500), (0, 33)], [0, 700]),
        ([(1000, 300), (0, 700), (0, 9)], [3, 900, 64]),
        ([(0, 80), (37, 129), (0, 1000)], []),
        ([(512, 640), (5, 1)], [17]),
        ([(6000, 176)], [40, 2000]),
        ([(0, 4000), (0, 191), (0, 193)], [1500]),
    ]:
        rows = rows_of(chunks, decode)
        layer_rows, inputs = project(config, cache, rows, dtype)
        planned = kernels.plan(rows)
        expected = expected_attention(config, cache, rows, layer_rows.q)
        # Rows that begin here must be read here.
        begin = int(rows.q_indptr[rows.num_continued])
        for half in cache.layer(LAYER):
            half.flatten(0, 1)[inputs.kv_slots[begin : rows.num_prefill_rows].long()] = torch.nan
        # Over FP8 keys, queries and weights are rounded to FP8, too.
        limit = 0.08 if config.fp8_kv else {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        assert_close_in_each_row(planned.run(LAYER, layer_rows), expected, limit)
