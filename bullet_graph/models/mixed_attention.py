"""Attention of a forward with several kinds of rows, each planned for itself."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bullet_graph.models.attention import LayerRows


class CacheAttention(Protocol):
    """Planned attention that reads keys and values from the cache alone."""

    def run_into(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend, from the planned rows ``q`` [rows, num_heads, head_dim] into ``out`` of the same shape."""


class RowAttention(Protocol):
    """Planned attention of some of a forward's rows, which reads keys and values from the forward's rows alone."""

    def run_into(self, rows: LayerRows, out: Tensor) -> None:
        """Attend, into the planned rows of ``out`` [all rows, num_heads, head_dim]; leaves the others alone."""


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Prompt rows that attend to the cache, prompt rows that need not, decode rows, in this order.

    See :class:`~bullet_graph.models.attention.Attention`.

    Attributes:
        cached: None when there are no rows of the first kind; likewise the two below.
        fresh: of the second.
        decode: of the third.
        num_cached_rows: where the second kind begins.
        num_prefill_rows: where the third kind begins.
    """

    cached: CacheAttention | None
    fresh: RowAttention | None
    decode: CacheAttention | None
    num_cached_rows: int
    num_prefill_rows: int

    def run(self, layer: int, rows: LayerRows) -> Tensor:
        """See :meth:`~bullet_graph.models.attention.Attention.run`."""
        out = torch.empty_like(rows.q)
        self.run_into(layer, rows, out)
        return out.flatten(1)

    def run_into(self, layer: int, rows: LayerRows, out: Tensor) -> None:
        """As :meth:`run`, into ``out`` [rows, num_heads, head_dim]."""
        if self.cached is not None:
            self.cached.run_into(layer, rows.q[: self.num_cached_rows], out[: self.num_cached_rows])
        if self.fresh is not None:
            self.fresh.run_into(rows, out)
        if self.decode is not None:
            self.decode.run_into(layer, rows.q[self.num_prefill_rows :], out[self.num_prefill_rows :])
