"""Attention over the paged KV cache: the protocol, the reference in plain torch, and mixed batches."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from bullet_graph.kernels.memory import KVCache


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Queries of the rows that attend, all or the sampled ones, and keys and values of all rows, in one layer.

    Each is [rows, heads, head_dim]; keys are rotated, as in the cache. Rows of keys and values are strided.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, q: Tensor, qkv: Tensor) -> "LayerRows":
        """Views of what :meth:`~bullet_graph.kernels.ops.TorchOps.rope_and_cache` gave (q) and left (qkv)."""
        num_heads, head_dim = q.shape[1:]
        k, v = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)[:, num_heads:].chunk(2, dim=1)
        return cls(q, k, v)


class Attention(Protocol):
    """Causal attention of one batch, or of some of a forward's rows, planned once and run for each layer."""

    def run_into(self, layer: int, rows: LayerRows, out: Tensor) -> None:
        """Attend to the sequences' keys and values, the rows' own in the cache included.

        From the planned rows of ``rows.q`` [rows, num_heads, head_dim] into those of ``out``, alike.
        """

    def run(self, layer: int, rows: LayerRows) -> Tensor:
        """As :meth:`run_into`, into new memory [rows, q_size]."""
        out = torch.empty_like(rows.q)
        self.run_into(layer, rows, out)
        return out.flatten(1)


class ReferenceAttention(Attention):
    """One sequence at a time through ``scaled_dot_product_attention``; exact, slow, any device.

    ``q_indptr`` [n + 1] is where each sequence's rows start; one may have none. It attends to ``kv_lens`` [n] tokens,
    whose last are its rows, or to the last of them, in a layer with a window. ``kv_indptr`` [n + 1] is where its blocks
    start in ``kv_indices``.
    """

    def __init__(
        self, cache: KVCache, *, q_indptr: list[int], kv_lens: list[int], kv_indptr: list[int], kv_indices: Tensor
    ) -> None:
        self._cache = cache
        self._sequences: list[tuple[slice, Tensor, int, dict[int | None, Tensor | None]]] = []
        for (start, stop), (first, last), kv_len in zip(pairwise(q_indptr), pairwise(kv_indptr), kv_lens, strict=True):
            if count := stop - start:
                masks = {window: _mask(count, kv_len, window, kv_indices.device) for window in set(cache.windows)}
                self._sequences.append((slice(start, stop), kv_indices[first:last], kv_len, masks))

    def run_into(self, layer: int, rows: LayerRows, out: Tensor) -> None:
        keys, values = self._cache.layer(layer)
        q, window = rows.q, self._cache.windows[layer]
        for own, blocks, kv_len, masks in self._sequences:
            mask = masks[window]
            k = keys[blocks].flatten(0, 1)[:kv_len].transpose(0, 1).to(q.dtype)
            v = values[blocks].flatten(0, 1)[:kv_len].transpose(0, 1).to(q.dtype)
            is_causal = mask is None and own.stop - own.start > 1
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[own].transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=is_causal, enable_gqa=True
            )
            out[own] = attended[0].transpose(0, 1)


def _mask(rows: int, kv_len: int, window: int | None, device: torch.device) -> Tensor | None:
    """The keys [rows, kv_len] that each row attends to; None: one row to all, a whole prompt's each up to its own."""
    before = kv_len - rows
    if rows in (1, kv_len) and (window is None or window >= kv_len):
        return None  # which takes half the time
    mask = torch.ones(rows, kv_len, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before - window + 1)


@dataclass(frozen=True, slots=True)
class MixedAttention(Attention):
    """An :class:`Attention` of up to three kinds of rows, in this order; None where there are no rows of a kind.

    ``cached`` are prompt rows that attend to the cache. From ``num_cached_rows`` on come rows of prompts that begin in
    this forward, from ``num_prefill_rows`` on decode rows.
    """

    cached: Attention | None
    fresh: Attention | None
    decode: Attention | None
    num_cached_rows: int
    num_prefill_rows: int

    def run_into(self, layer: int, rows: LayerRows, out: Tensor) -> None:
        self.bind(rows, out)(layer)

    def bind(self, rows: LayerRows, out: Tensor) -> Callable[[int], None]:
        """Attention of a layer, from rows into ``out`` [rows, num_heads, head_dim], at the same place in all layers.

        The buffers are sliced once: slicing in each layer costs the host time.
        """
        parts: list[tuple[Attention, LayerRows, Tensor]] = []
        if self.cached is not None:
            own = slice(0, self.num_cached_rows)
            parts.append((self.cached, LayerRows(rows.q[own], rows.k, rows.v), out[own]))
        if self.fresh is not None:
            parts.append((self.fresh, rows, out))
        if self.decode is not None:
            own = slice(self.num_prefill_rows, None)
            parts.append((self.decode, LayerRows(rows.q[own], rows.k, rows.v), out[own]))

        def run(layer: int) -> None:
            for attention, its_rows, its_out in parts:
                attention.run_into(layer, its_rows, its_out)

        return run
