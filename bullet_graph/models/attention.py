"""Attention over the paged KV cache: the protocol, and the reference in plain torch."""

from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from bullet_graph.models.kv_cache import KVCache


class Attention(Protocol):
    """Causal attention of one batch, planned once and run for each layer."""

    def run(self, layer: int, q: Tensor) -> Tensor:
        """Attend to the cache, this batch's own keys and values included.

        Args:
            layer: which layer's cache.
            q: [rows, num_heads, head_dim].

        Returns:
            [rows, num_heads * head_dim].
        """


class ReferenceAttention:
    """One sequence at a time through ``scaled_dot_product_attention``; exact, slow, any device.

    Args:
        cache: the KV cache.
        q_indptr: [n + 1], where each sequence's rows start; one may have none.
        kv_lens: [n], tokens each sequence attends to; its rows are the last of them.
        kv_indptr: [n + 1], where each sequence's blocks start in ``kv_indices``.
        kv_indices: block ids.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        q_indptr: list[int],
        kv_lens: list[int],
        kv_indptr: list[int],
        kv_indices: Tensor,
    ) -> None:
        self._cache = cache
        self._q_indptr = q_indptr
        self._blocks = [kv_indices[a:b] for a, b in pairwise(kv_indptr)]
        self._kv_lens = kv_lens
        self._masks = [
            torch.ones(stop - start, kv_len, dtype=torch.bool, device=kv_indices.device).tril(
                kv_len - (stop - start)
            )
            for (start, stop), kv_len in zip(pairwise(q_indptr), kv_lens, strict=True)
        ]

    def run(self, layer: int, q: Tensor) -> Tensor:
        """See :meth:`Attention.run`."""
        keys, values = self._cache.layer(layer)
        out = torch.empty_like(q)
        for i, (blocks, kv_len, mask) in enumerate(
            zip(self._blocks, self._kv_lens, self._masks, strict=True)
        ):
            rows = slice(self._q_indptr[i], self._q_indptr[i + 1])
            if rows.start == rows.stop:
                continue
            k = keys[blocks].flatten(0, 1)[:kv_len].transpose(0, 1)
            v = values[blocks].flatten(0, 1)[:kv_len].transpose(0, 1)
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True
            )
            out[rows] = attended[0].transpose(0, 1)
        return out.flatten(1)
