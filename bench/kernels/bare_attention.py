"""Attention of the steps that ``bare_work.py`` measures."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench.kernels.bare_steps import BareStep
from bench.kernels.decode_inputs import DEVICE, DTYPE, Cache
from bench.kernels.decode_kernels import decode_batch, paged_batch
from bench.kernels.prefill_layers import BLOCK_TOKENS, CONFIG, LAYERS, normal
from bullet_graph.kernels.attention import LayerRows
from bullet_graph.kernels.decode_attention import TritonDecodeAttention
from bullet_graph.kernels.flashinfer_attention import (
    AttentionLane,
    RaggedBatch,
    prefill_backend,
)
from bullet_graph.kernels.shapes import prefill_workspace_bytes

SIDE_SMS = 64
"""For which attention is laid out where products run beside it: what is left to them without waiting."""


class Attention:
    """Attention of a step: decode rows and a prompt that goes on to scattered blocks, fresh prompts to themselves.

    There is a cache for each layer.
    """

    def __init__(self, step: BareStep) -> None:
        num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self._parts: dict[int | None, list[Callable[[int], None]]] = {None: [], SIDE_SMS: []}
        if step.decode_rows:
            self._add_decode(step, num_sms)
        if step.continued_tokens:
            self._add_continued(step)
        if step.prompt_lens:
            self._add_fresh(step)

    def _add_decode(self, step: BareStep, num_sms: int) -> None:
        blocks_a_row = -(-step.context // BLOCK_TOKENS)
        cache = Cache.random(
            CONFIG, step.decode_rows * blocks_a_row * BLOCK_TOKENS, BLOCK_TOKENS, LAYERS, hnd=False
        )
        lane = TritonDecodeAttention(
            CONFIG,
            cache,  # type: ignore[arg-type]
            max_rows=step.decode_rows,
            num_sms=num_sms,
        )
        kv_lens = np.full(step.decode_rows, step.context, dtype=np.int32)
        batch = decode_batch(paged_batch(kv_lens, step.decode_rows * blocks_a_row, BLOCK_TOKENS))
        q = normal(step.decode_rows, CONFIG.num_heads, CONFIG.head_dim)
        for sms, parts in self._parts.items():
            planned = lane.plan(batch, num_sms=sms)
            parts.append(partial(planned.run_into, q=q, out=torch.empty_like(q)))

    def _add_continued(self, step: BareStep) -> None:
        rows, kv_len = step.continued_tokens, step.continued_tokens + step.continued_cached
        num_blocks = -(-kv_len // BLOCK_TOKENS)
        cache = Cache.random(CONFIG, num_blocks * BLOCK_TOKENS, BLOCK_TOKENS, LAYERS, hnd=False)
        batch = paged_batch(np.array([kv_len], dtype=np.int32), num_blocks, BLOCK_TOKENS, rows_each=rows)
        planned = _prompt_lane(cache).plan(batch, captured=False)
        q = normal(rows, CONFIG.num_heads, CONFIG.head_dim)
        out = torch.empty_like(q)
        for parts in self._parts.values():
            parts.append(partial(planned.run_into, q=q, out=out))

    def _add_fresh(self, step: BareStep) -> None:
        lane = _prompt_lane(None)
        indptr = torch.tensor((0, *step.prompt_lens)).cumsum(0).int()
        planned = lane.plan_ragged(RaggedBatch(indptr.to(DEVICE), indptr))
        rows = int(indptr[-1])
        q = normal(rows, CONFIG.num_heads, CONFIG.head_dim)
        layer_rows = LayerRows.of(q, normal(rows, CONFIG.q_size + 2 * CONFIG.kv_size), CONFIG)
        out = torch.empty_like(q)
        for parts in self._parts.values():
            parts.append(lambda _: planned.run_into(layer_rows, out))

    def run(self, layer: int, num_sms: int | None = None) -> None:
        """Of one layer."""
        for part in self._parts[num_sms]:
            part(layer)


def _prompt_lane(cache: Cache | None) -> AttentionLane:
    """For one plan; without a cache for fresh prompts, which ask nothing of it."""
    return AttentionLane(
        CONFIG,
        cache,  # type: ignore[arg-type]
        dtype=DTYPE,
        backend=prefill_backend(DEVICE),
        causal=True,
        float_workspace=torch.zeros(prefill_workspace_bytes(CONFIG), dtype=torch.uint8, device=DEVICE),
    )
