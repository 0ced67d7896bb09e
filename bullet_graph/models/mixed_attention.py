"""Attention of a forward with several kinds of rows, each planned for itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
        self.bind(rows, out).run(layer)

    def bind(self, rows: LayerRows, out: Tensor) -> "BoundAttention":
        """For rows and results that stay where they are from layer to layer; see :meth:`run_into`."""
        cached, fresh, decode = self.cached, self.fresh, self.decode
        parts: list[Callable[[int], None]] = []
        if cached is not None:
            end = self.num_cached_rows
            parts.append(partial(cached.run_into, q=rows.q[:end], out=out[:end]))
        if fresh is not None:
            parts.append(lambda _: fresh.run_into(rows, out))
        if decode is not None:
            begin = self.num_prefill_rows
            parts.append(partial(decode.run_into, q=rows.q[begin:], out=out[begin:]))
        return BoundAttention(tuple(parts))


@dataclass(frozen=True, slots=True)
class BoundAttention:
    """A forward's attention over buffers of fixed addresses: cutting them anew for each layer costs the host time."""

    parts: tuple[Callable[[int], None], ...]

    def run(self, layer: int) -> None:
        """Attend to this layer's keys and values."""
        for part in self.parts:
            part(layer)
