"""Decode attention over the paged KV cache by Triton kernels that divide the work on the device."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from bullet_graph.errors import ConfigError
from bullet_graph.kernels.attention import Attention, LayerRows
from bullet_graph.kernels.decode_attention_kernels import TILE, combine_partials_kernel, decode_attention_kernel
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.launch import quick
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.shared_blocks import MOST_MEMBERS, HostBlocks, SharedBlocks, saved_blocks, shared_blocks
from bullet_graph.perf.roofline import DecoderShape

_LEAST_COLUMNS = 8  # of the tensor cores' smallest product
_MOST_PROGRAMS, _FEW_PROGRAMS = 8, 4  # that an SM holds at once
_HEAD_BYTES = 3072
"""An SM of an H200 has shared memory for the tiles of 12 programs whose key heads take 256 bytes a token."""
_FEW_HEADS = 64
"""With at most so many key heads over all rows (twice as many in 16 bits), fewer programs are faster on all SMs: they
leave fewer partial results."""
_COMBINE_ROWS = 32
"""From so many rows on, the program that finishes a sequence last adds its parts up. Fewer rows have many parts each,
which a second kernel adds on more SMs."""
_GROUP_BLOCKS = 16  # fewest for a program that reads common blocks, if there are as many


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Which blocks each row attends to; the kernels read these device tensors when they run, not at launch.

    All are int32. ``kv_indptr`` [rows + 1] is where each row's blocks start in ``kv_indices``: from 0 on, at least one
    each. ``last_block_tokens`` [rows] are at least 1. ``window_indptr`` has, for each window of the cache's layers, a
    ``kv_indptr`` of the window's blocks alone (:func:`window_indptr`).
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    last_block_tokens: Tensor
    window_indptr: Mapping[int, Tensor] = field(default_factory=dict)
    shared: SharedBlocks[Tensor] | None = None


def window_indptr(kv_lens: NDArray[np.int32], window: int, block_tokens: int) -> NDArray[np.int32]:
    """Where each row's blocks that a window touches would start, were there no others: [rows + 1] int32.

    ``kv_lens`` [rows] are the tokens of each row's sequence.
    """
    counts = -(-kv_lens // block_tokens) - np.maximum(kv_lens - window, 0) // block_tokens
    return np.concatenate(([0], counts.cumsum())).astype(np.int32)


class TritonDecodeAttention:
    """Kernels and scratch of one lane; never shared by two lanes that run at the same time.

    The launches do not depend on lengths, so a captured graph serves batches of any. Raises ConfigError for sizes of
    heads or blocks that the kernels cannot take.
    """

    def __init__(self, config: DecoderShape, cache: KVCache, *, max_rows: int, gpu: Gpu) -> None:
        if config.head_dim < TILE or config.head_dim & (config.head_dim - 1):
            raise ConfigError(
                f"decode attention needs a head_dim that is a power of two of at least {TILE}, "
                f"got {config.head_dim}: use FlashInfer's kernels for this model"
            )
        if cache.block_tokens % TILE:
            raise ConfigError(f"decode attention needs blocks of a multiple of {TILE} tokens, got {cache.block_tokens}")
        self._config = config
        self.cache = cache
        self._windows = set(cache.windows)
        self._max_rows = max_rows
        self._num_sms = gpu.num_sms
        self._overlap_launches = gpu.overlaps_launches
        device = cache.layer(0)[0].device
        slots = 2 * self._workers(gpu.num_sms)
        members = MOST_MEMBERS if self.can_share else 1
        sizes = config.num_heads, config.head_dim
        self.partials = torch.empty(slots * members, *sizes, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(slots * members, config.num_heads, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_rows * config.num_kv_heads, dtype=torch.int32, device=device)
        self.prefixes = torch.empty(max_rows if members > 1 else 0, *sizes, dtype=torch.float32, device=device)
        self.prefix_lse = torch.empty(self.prefixes.shape[:2], dtype=torch.float32, device=device)

    @property
    def can_share(self) -> bool:
        """Whether rows may read common blocks once: without windows, and not over an FP8 cache, where it is slower."""
        return self._windows == {None} and not self._config.fp8_kv

    def shared_blocks(self, kv_indptr: NDArray[np.int32], kv_indices: NDArray[np.int32]) -> HostBlocks | None:
        """:func:`shared_blocks` of a batch, as a batch on the whole GPU can take them; None where that is slower."""
        shared = shared_blocks(kv_indptr, kv_indices) if self.can_share else None
        block_bytes = 2 * self.cache.layer(0)[0][0].nbytes
        if shared is not None and saved_blocks(shared, kv_indptr, kv_indices, block_bytes)[1] > 0:
            return shared
        return None

    def plan(self, batch: DecodeBatch, *, num_sms: int | None = None) -> "PlannedDecode":
        """Lay the launches out for a number of SMs, None for all; computes and copies nothing.

        Raises ConfigError for no rows or SMs, or more than the scratch holds.
        """
        rows = len(batch.last_block_tokens)
        if not 1 <= rows <= self._max_rows:
            raise ConfigError(
                f"a decode batch has {rows} rows: this lane was made for 1 to {self._max_rows}; raise max_rows"
            )
        if num_sms is None:
            num_sms = self._num_sms
        if not 1 <= num_sms <= self._num_sms:
            raise ConfigError(
                f"decode attention was asked to run on {num_sms} SMs: name 1 to {self._num_sms}, the device's"
            )
        shares = batch.shared is not None
        if shares and not self.can_share:
            raise ConfigError("a decode batch with common blocks needs a model without windows and a 16-bit KV cache")
        workers = self._workers(num_sms, 0 if shares else rows)
        return PlannedDecode(
            self,
            batch,
            rows,
            {w: self._attention(rows, workers, w, goes_on=shares) for w in self._windows},
            None if rows >= _COMBINE_ROWS else self._combination(rows, workers),
            self._attention(rows // 2, workers, None, members=MOST_MEMBERS) if shares else None,
        )

    def _queries(self, members: int = 1) -> int:
        """Queries that a program takes, those of so many rows for one key head, with padding."""
        queries: int = triton.next_power_of_2(members * self._config.num_heads // self._config.num_kv_heads)
        return max(_LEAST_COLUMNS, queries)

    def _workers(self, num_sms: int, rows: int = 0) -> int:
        """Ranges that the work of so many rows, 0 for many, is cut into; a program per key head runs for each."""
        heads, itemsize = self._config.num_kv_heads, self.cache.layer(0)[0].itemsize
        are_few = 0 < rows * heads <= _FEW_HEADS * itemsize and num_sms == self._num_sms
        most = (_FEW_PROGRAMS if are_few else _MOST_PROGRAMS) // _num_warps(self._queries())
        programs: int = max(min(most, _HEAD_BYTES // (self._config.head_dim * itemsize)), 1)
        return max(num_sms * programs // heads, 1)

    def _attention(
        self, rows: int, workers: int, window: int | None, *, members: int = 1, goes_on: bool = False
    ) -> Callable[..., None]:
        config, combines = self._config, rows >= _COMBINE_ROWS or members > 1
        queries = self._queries(members)
        return partial(
            quick(decode_attention_kernel)[(workers * config.num_kv_heads,)],
            num_rows=rows,
            scale_log2=math.log2(math.e) / math.sqrt(config.head_dim),
            NUM_HEADS=config.num_heads,
            NUM_KV_HEADS=config.num_kv_heads,
            HEAD_DIM=config.head_dim,
            BLOCK_TOKENS=self.cache.block_tokens,
            Q_BLOCK=queries,
            ROWS_BLOCK=triton.next_power_of_2(self._max_rows),
            WINDOW=window or 0,
            MEMBERS=members,
            LEAST_UNITS=_GROUP_BLOCKS,
            CONTINUE=goes_on,
            COMBINE=combines,
            TRIGGER=self._overlap_launches and not combines,
            num_warps=_num_warps(queries),
            # With 168, the compiler's choice, products of one row take 8 % more time: it seems that they lack L1 cache.
            maxnreg=None if config.fp8_kv else 255,
        )

    def _combination(self, rows: int, workers: int) -> Callable[..., None]:
        config = self._config
        return partial(
            quick(combine_partials_kernel)[rows, config.num_heads],
            num_rows=rows,
            workers=workers,
            NUM_HEADS=config.num_heads,
            HEAD_DIM=config.head_dim,
            PARTIALS=64 if rows == 1 else 32,
            num_warps=4,
        )


def _num_warps(queries: int) -> int:
    return max(queries // 16, 1)


@dataclass(frozen=True, slots=True)
class PlannedDecode(Attention):
    """Decode attention of one batch, to run for each layer.

    ``attention`` is by window. ``combination`` is the second kernel, which adds the results of ranges of blocks up;
    None where the first does so. ``prefixes`` comes first, over common blocks, if there are any.
    """

    lane: TritonDecodeAttention
    batch: DecodeBatch
    num_rows: int
    attention: Mapping[int | None, Callable[..., None]]
    combination: Callable[..., None] | None
    prefixes: Callable[..., None] | None = None

    def run_into(self, layer: int, rows: LayerRows, out: Tensor) -> None:
        """Queries and ``out`` are [rows, num_heads, head_dim] and contiguous; ConfigError for others."""
        for name, tensor in (("q", rows.q), ("out", out)):
            if len(tensor) != self.num_rows or not tensor.is_contiguous():
                raise ConfigError(
                    f"{name} must be contiguous and have the {self.num_rows} rows that were planned; "
                    f"found shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                )
        lane, batch, partials = self.lane, self.batch, (self.lane.partials, self.lane.partial_lse)
        window, prefixes = lane.cache.windows[layer], (lane.prefixes, lane.prefix_lse)
        indptr, members = batch.kv_indptr if window is None else batch.window_indptr[window], batch.kv_indptr
        inputs = rows.q, *lane.cache.layer(layer)
        blocks = batch.kv_indptr, batch.kv_indices, batch.last_block_tokens
        if batch.shared is not None and self.prefixes is not None:
            indptr, members = batch.shared.own_indptr, batch.shared.members
            common = *inputs, batch.shared.group_indptr, *blocks, members, *prefixes
            self.prefixes(*common, lane.prefixes, *partials, lane.arrived)
        self.attention[window](*inputs, indptr, *blocks, members, *prefixes, out, *partials, lane.arrived)
        if self.combination is not None:
            self.combination(indptr, *partials, out)
