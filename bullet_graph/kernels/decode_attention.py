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
from bullet_graph.kernels.decode_attention_kernels import combine_partials_kernel, decode_attention_kernel
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.launch import quick
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.shared_blocks import MOST_MEMBERS, SharedBlocks, saved_blocks, shared_blocks
from bullet_graph.perf.roofline import DecoderShape

_LEAST_Q_BLOCK = 16
"""Rows of the tensor cores' smallest product."""
_FEW_ROWS = 16
"""Up to so many rows, on all SMs, a program takes one key head. With 8 key heads that makes fewer partial results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeKernelSettings:
    """How decode attention is laid out on an SM; the fastest choice depends on the GPU and the heads.

    Attributes:
        kv_heads: key heads of a tile, a divisor of the model's. More heads read longer runs of memory; with more than
            16 query heads they also compute more.
        tile: keys of a tile, tokens times ``kv_heads``, a power of two.
        ctas_per_sm: programs that an SM holds at once; their registers and shared memory must fit.
        max_registers: of a thread, None for the compiler's choice.
        num_warps: of a program.
        combine_rows: from this batch size on, the program that finishes a sequence last adds its parts up. Smaller
            batches have many parts per sequence, and a second kernel adds them on more SMs.
        members: most rows that read common blocks at once.
        group_units: fewest blocks for a program that reads common blocks, if there are as many.
    """

    kv_heads: int
    tile: int = 64
    ctas_per_sm: int = 2
    max_registers: int | None = None
    num_warps: int = 4
    combine_rows: int = 32
    members: int = MOST_MEMBERS
    group_units: int = 16


def default_settings(config: DecoderShape, *, whole_gpu: bool = True, few_rows: bool = False) -> DecodeKernelSettings:
    """The fastest settings measured on an H200 (bench/LOG.md).

    A tile has as many key heads as have at most 16 query heads. Over a 16-bit cache, two programs per SM saturate the
    memory; on a part of the SMs three are 14 % faster (bench/results/h200/decode_attention.json). Over an FP8 cache,
    with 4 query heads per key head, eight of one warp take 7 to 30 % less time than four of two (8 key heads, 64 rows).
    """
    if few_rows:
        return DecodeKernelSettings(kv_heads=1, tile=_LEAST_Q_BLOCK, ctas_per_sm=4, num_warps=1 if config.fp8_kv else 2)
    group = config.num_heads // config.num_kv_heads
    is_small = config.fp8_kv and group == 4 and config.head_dim <= 128
    most = _LEAST_Q_BLOCK // 2 if is_small else _LEAST_Q_BLOCK
    kv_heads = next((n for n in (16, 8, 4, 2) if config.num_kv_heads % n == 0 and n * group <= most), 1)
    tile = max(_LEAST_Q_BLOCK, 64 * 128 // config.head_dim)
    if config.fp8_kv:
        tile = min(max(16 * kv_heads, 32), tile)
        ctas_per_sm, num_warps = (8, 1) if is_small else (4, 2)
        return DecodeKernelSettings(kv_heads=kv_heads, tile=tile, ctas_per_sm=ctas_per_sm, num_warps=num_warps)
    ctas_per_sm, registers = (2, None) if whole_gpu else (3, 168)
    return DecodeKernelSettings(kv_heads=kv_heads, tile=tile, ctas_per_sm=ctas_per_sm, max_registers=registers)


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

    The launches do not depend on lengths, so a captured graph serves batches of any. ``settings`` None takes
    :func:`default_settings` by a plan's SMs and rows. Raises ConfigError for a size of heads that the kernels cannot
    take.
    """

    def __init__(
        self,
        config: DecoderShape,
        cache: KVCache,
        *,
        max_rows: int,
        gpu: Gpu,
        settings: DecodeKernelSettings | None = None,
    ) -> None:
        if config.head_dim < _LEAST_Q_BLOCK or config.head_dim & (config.head_dim - 1):
            raise ConfigError(
                f"decode attention needs a head_dim that is a power of two of at least {_LEAST_Q_BLOCK}, "
                f"got {config.head_dim}: use FlashInfer's kernels for this model"
            )
        self._whole = settings or default_settings(config)
        self._part = settings or default_settings(config, whole_gpu=False)
        self._config = config
        few = settings or default_settings(config, few_rows=True)
        # More ranges would make more partial results.
        self._few = min(few, self._whole, key=partial(self._workers, gpu.num_sms))
        self.cache = cache
        self._windows = set(cache.windows)
        self._max_rows = max_rows
        self._num_sms = gpu.num_sms
        self._overlap_launches = gpu.overlaps_launches
        device = cache.layer(0)[0].device
        slots = 2 * max(self._workers(gpu.num_sms, of) for of in (self._whole, self._part))
        members = self._whole.members if self.can_share else 1
        sizes = config.num_heads, config.head_dim
        self.partials = torch.empty(slots * members, *sizes, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(slots * members, config.num_heads, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_rows * config.num_kv_heads, dtype=torch.int32, device=device)
        self.prefixes = torch.empty(max_rows if members > 1 else 0, *sizes, dtype=torch.float32, device=device)
        self.prefix_lse = torch.empty(self.prefixes.shape[:2], dtype=torch.float32, device=device)

    @property
    def can_share(self) -> bool:
        """Whether rows may read common blocks once: without windows, and not over an FP8 cache, where it is slower."""
        return self._windows == {None} and not self._config.fp8_kv and self._whole.members > 1

    def shared_blocks(
        self, kv_indptr: NDArray[np.int32], kv_indices: NDArray[np.int32]
    ) -> SharedBlocks[NDArray[np.int32]] | None:
        """:func:`shared_blocks` of a batch, as a batch on the whole GPU can take them; None where that is slower."""
        shared = shared_blocks(kv_indptr, kv_indices, most=self._whole.members) if self.can_share else None
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
        on_all = self._few if rows <= _FEW_ROWS and not shares else self._whole
        settings = on_all if num_sms == self._num_sms else self._part
        workers = self._workers(num_sms, settings)
        if shares and not self.can_share:
            raise ConfigError("a decode batch with common blocks needs a model without windows and a 16-bit KV cache")
        return PlannedDecode(
            self,
            batch,
            rows,
            {w: self._attention(rows, workers, settings, w, goes_on=shares) for w in self._windows},
            None if rows >= settings.combine_rows else self._combination(rows, workers),
            self._attention(rows // 2, workers, settings, None, members=settings.members) if shares else None,
        )

    def _workers(self, num_sms: int, settings: DecodeKernelSettings) -> int:
        """Ranges that the work is cut into; a program per group of key heads runs for each."""
        return max(1, num_sms * settings.ctas_per_sm // (self._config.num_kv_heads // settings.kv_heads))

    def _attention(
        self,
        rows: int,
        workers: int,
        settings: DecodeKernelSettings,
        window: int | None,
        *,
        members: int = 1,
        goes_on: bool = False,
    ) -> Callable[..., None]:
        config = self._config
        head_groups = config.num_kv_heads // settings.kv_heads
        combines = rows >= settings.combine_rows or members > 1
        q_rows = members * settings.kv_heads * (config.num_heads // config.num_kv_heads)
        return partial(
            quick(decode_attention_kernel)[(workers * head_groups,)],
            num_rows=rows,
            scale_log2=math.log2(math.e) / math.sqrt(config.head_dim),
            NUM_HEADS=config.num_heads,
            NUM_KV_HEADS=config.num_kv_heads,
            HEAD_DIM=config.head_dim,
            BLOCK_TOKENS=self.cache.block_tokens,
            KV_HEADS=settings.kv_heads,
            Q_BLOCK=max(_LEAST_Q_BLOCK, triton.next_power_of_2(q_rows)),
            TILE=settings.tile,
            ROWS_BLOCK=triton.next_power_of_2(self._max_rows),
            STAGES=3,  # of the loop over tiles, which needs at least these
            WINDOW=window or 0,
            MEMBERS=members,
            LEAST_UNITS=settings.group_units,
            CONTINUE=goes_on,
            COMBINE=combines,
            TRIGGER=self._overlap_launches and not combines,
            num_warps=4 if members > 1 else settings.num_warps,
            maxnreg=None if members > 1 else settings.max_registers,
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
        keys, values = self.lane.cache.layer(layer)
        lane, batch, partials, lse = self.lane, self.batch, self.lane.partials, self.lane.partial_lse
        window = lane.cache.windows[layer]
        indptr = batch.kv_indptr if window is None else batch.window_indptr[window]
        members, cached = batch.kv_indptr, (keys, values)
        blocks = batch.kv_indptr, batch.kv_indices, batch.last_block_tokens
        if batch.shared is not None and self.prefixes is not None:
            indptr, members = batch.shared.own_indptr, batch.shared.members
            self.prefixes(
                *(rows.q, *cached, batch.shared.group_indptr, *blocks, members, lane.prefixes, lane.prefix_lse),
                *(lane.prefixes, partials, lse, lane.arrived),
            )
        self.attention[window](
            *(rows.q, *cached, indptr, *blocks, members, lane.prefixes, lane.prefix_lse),
            *(out, partials, lse, lane.arrived),
        )
        if self.combination is not None:
            self.combination(indptr, partials, lse, out)
