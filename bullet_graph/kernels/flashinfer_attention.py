"""Prefill attention with FlashInfer's kernels, called without its wrappers.

The wrappers loop over the batch in Python for each plan, and hide the staging buffer that must not be overwritten
while its copy is in flight. The compiled modules are called directly instead, with the arguments of the FlashInfer
release that pyproject.toml pins: csrc/batch_prefill*_jit_binding.cu has the common arguments, and
gen_batch_prefill_module names those that follow them. The kernels run on torch's current stream: ``tvm_ffi`` asks torch
for it when the first tensor on the device is passed.

A module is a shared library that ``tvm_ffi`` loads. A capture cache holds the libraries, so a start from it does
without the ``flashinfer`` package, whose import takes nearly a second.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bullet_graph.kernels.attention import Attention, LayerRows
from bullet_graph.kernels.fp8 import FP8, saturated
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.memory import KVCache, PinnedRing
from bullet_graph.perf.roofline import DecoderShape

Backend = Literal["fa2", "fa3"]

_INT_WORKSPACE_BYTES = 8 * 1024**2
_NO_POSITIONS = 0
_CAUSAL_MASK = 1
_NHD_LAYOUT = 0


# ---- modules ----


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One of FlashInfer's attention modules: without positions, soft cap or 16-bit sums, with or without a window.

    ``fp8_kv``: keys and values are FP8 (E4M3), and fa3's queries, too; outputs are of ``dtype`` as ever.
    """

    backend: Backend
    dtype: torch.dtype
    head_dim: int
    windowed: bool = False
    fp8_kv: bool = False

    @property
    def name(self) -> str:
        """Unique among modules; FlashInfer has names of its own."""
        window = "_window" if self.windowed else ""
        fp8 = "_fp8_kv" if self.fp8_kv else ""
        return f"{self.backend}_{str(self.dtype).removeprefix('torch.')}_{self.head_dim}{window}{fp8}"

    @property
    def fp8_q(self) -> bool:
        """Whether queries are FP8."""
        return self.fp8_kv and self.backend == "fa3"

    def build(self) -> Path:
        """Have FlashInfer compile the module or find it compiled; returns the shared library."""
        # Imported here because it takes nearly a second, which a start that has the library need not spend.
        from flashinfer.jit.attention import gen_batch_prefill_module  # noqa: PLC0415

        jit = gen_batch_prefill_module(
            *(self.backend, FP8 if self.fp8_q else self.dtype, FP8 if self.fp8_kv else self.dtype, self.dtype),
            torch.int32,
            *(self.head_dim, self.head_dim),
            *(_NO_POSITIONS, self.windowed, False, False),
        )
        if not jit.is_aot:
            jit.build(verbose=False)
        return Path(jit.get_library_path())


_loaded: dict[ModuleSpec, Any] = {}
"""A process loads a module once, and for good."""


def load_module(spec: ModuleSpec, library: Path | None = None) -> Any:
    """A module's own functions ``plan``, ``paged_run`` and ``ragged_run``; RuntimeError where it cannot be loaded.

    ``library`` None: FlashInfer finds or builds it. Ignored once the process has loaded the module.
    """
    if spec not in _loaded:
        # Imported here because a machine without a GPU need not have it.
        import tvm_ffi  # noqa: PLC0415

        _loaded[spec] = tvm_ffi.load_module(str(spec.build() if library is None else library))
    return _loaded[spec]


def cached_modules(gpu: Gpu, dtype: torch.dtype, shape: DecoderShape) -> dict[int | None, ModuleSpec]:
    """The module of each window of the model's layers, for rows that attend to the cache; None: without a window.

    fa3 on Hopper, fa2 elsewhere. Over FP8 keys, fa3 takes FP8 queries, and is 2.2 to 4.5 times as fast as fa2. Its
    outputs differ from those of 16-bit keys by 5.3 %, fa2's by 3.8 % (H200, bench/LOG.md).
    """
    backend: Backend = "fa3" if gpu.is_hopper else "fa2"
    plain = ModuleSpec(backend, dtype, shape.head_dim, fp8_kv=shape.fp8_kv)
    return {window: replace(plain, windowed=window is not None) for window in dict.fromkeys(shape.windows)}


def fresh_modules(gpu: Gpu, dtype: torch.dtype, shape: DecoderShape) -> dict[int | None, ModuleSpec]:
    """As :func:`cached_modules`, for rows that attend to rows alone; none where those serve them as well.

    Contiguous keys are faster only with TMA, which fa3 uses.
    """
    return cached_modules(gpu, dtype, replace(shape, fp8_kv=False)) if gpu.is_hopper else {}


def needed_modules(gpu: Gpu, dtype: torch.dtype, shape: DecoderShape) -> tuple[ModuleSpec, ...]:
    """All modules that an engine on this GPU runs, each once."""
    both = cached_modules(gpu, dtype, shape), fresh_modules(gpu, dtype, shape)
    return tuple(dict.fromkeys(spec for modules in both for spec in modules.values()))


# ---- attention ----


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which rows attend to which blocks; n sequences, int32 on the device, or on the host where the name says so.

    ``q_indptr`` [n + 1] is where each sequence's rows start, ``kv_indptr`` [n + 1] where its blocks start in
    ``kv_indices``. The others are [n]; ``host_kv_lens`` are the tokens that each sequence attends to.
    """

    q_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_block_tokens: Tensor
    host_q_indptr: Tensor
    host_kv_indptr: Tensor
    host_kv_lens: Tensor


class PrefillAttention:
    """Kernels and scratch for one kind of batch of one lane; never shared by lanes that run at the same time.

    A plan holds until the next plan's copy runs: a forward with two kinds of batches takes two of these.
    ``float_workspace`` is zeroed scratch, of :func:`~bullet_graph.runtime.memory.prefill_workspace_bytes`; attentions
    that take turns may share it. ``modules`` are those of :func:`cached_modules` or :func:`fresh_modules`; each window
    is planned for itself.
    """

    def __init__(
        self, shape: DecoderShape, cache: KVCache, *, modules: Mapping[int | None, ModuleSpec], float_workspace: Tensor
    ) -> None:
        self.cache = cache
        self._shape = shape
        self._specs = modules
        self.modules = {window: load_module(spec) for window, spec in modules.items()}
        self._float_workspace = float_workspace
        self._int_workspaces = {
            window: torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=float_workspace.device)
            for window in modules
        }
        self._staging = PinnedRing(_INT_WORKSPACE_BYTES)
        self.settings = {w: _run_settings(spec, shape.head_dim, w) for w, spec in modules.items()}
        self.fp8_q = any(spec.fp8_q for spec in modules.values())

    def plan(self, batch: PagedBatch) -> "PlannedAttention":
        """Divide the batch over the SMs and enqueue the plan's copy to the device."""
        on_host = batch.host_q_indptr, batch.host_kv_indptr, batch.host_kv_lens
        plans = self._plans(*on_host, page_tokens=self.cache.block_tokens)
        indices = (batch.q_indptr, batch.kv_indptr, batch.kv_indices, batch.last_block_tokens)
        return PlannedAttention(self, plans, indices, paged=True)

    def plan_ragged(self, indptr: Tensor, host_indptr: Tensor) -> "PlannedAttention":
        """As :meth:`plan`, for n sequences that had nothing in the cache before, and so attend to the rows alone.

        ``indptr`` [n + 1] int32, on the device and on the host, is where each sequence's rows start; may begin above 0.
        """
        plans = self._plans(host_indptr, host_indptr, host_indptr.diff(), page_tokens=1)
        return PlannedAttention(self, plans, (indptr, indptr), paged=False)

    def _plans(self, q_indptr: Tensor, kv_indptr: Tensor, kv_lens: Tensor, *, page_tokens: int) -> "Plans":
        shape, plans, num_rows = self._shape, {}, int(q_indptr[-1] - q_indptr[0])
        for window, workspace in self._int_workspaces.items():
            with self._staging.buffer() as staging:
                arguments = [
                    self._float_workspace,
                    workspace,
                    staging,
                    q_indptr,
                    kv_indptr,
                    kv_lens,
                    num_rows,
                    len(kv_lens),
                    shape.num_heads,
                    shape.num_kv_heads,
                    page_tokens,
                    False,  # not for a CUDA graph
                    shape.head_dim,
                    shape.head_dim,
                    True,  # causal
                    _window_left(window),
                ]
                if self._specs[window].backend == "fa2":
                    # The plan chooses the split size; no other kernel runs beside.
                    arguments += [-1, False, 0]
                plans[window] = (self._float_workspace, workspace, self.modules[window].plan(*arguments))
        return plans


Plans = Mapping[int | None, tuple[Any, ...]]
"""The first arguments of a batch's runs, by the layer's window."""


def _window_left(window: int | None) -> int:
    """Keys before a query's own that FlashInfer has it attend to."""
    return -1 if window is None else window - 1


def _run_settings(spec: ModuleSpec, head_dim: int, window: int | None) -> tuple[Any, ...]:
    """The arguments of a run that follow its output."""
    # No log-sum-exp; programmatic dependent launch.
    common = (None, _CAUSAL_MASK, _NHD_LAYOUT, _window_left(window), True)
    no_items = (None, None, None)  # no multi-item scoring: prefixes, positions, lengths
    scale = 1.0 / math.sqrt(head_dim)
    if spec.fp8_q:
        # No scales of the heads' queries, keys and values; scales of all of them.
        return (*common, *(None, None, None), scale, *(1.0, 1.0, 1.0))
    if spec.backend == "fa2":
        return (
            *common,
            *(None, None),  # no custom mask, nor where each sequence's begins
            None,  # no ALiBi slopes
            *no_items,
            *(None, None),  # no scales of a cache in four bits
            0.0,  # no soft cap
            scale,
            *(1.0, 1e-4),  # reciprocals of RoPE's scale and base: unused
            0,  # no multi-item scoring
        )
    return (
        *common,
        *no_items,
        None,  # no scales of the values' heads
        0.0,  # no soft cap
        scale,
        1.0,  # nor a scale of all values
        0,  # no multi-item scoring
    )


@dataclass(frozen=True, slots=True)
class PlannedAttention(Attention):
    """One batch's attention, to run for each layer: to the cache's pages, or to the rows' own keys and values.

    Keys and values of the rows are read where they were computed. On Hopper TMA reads them, which cannot gather pages.
    It requires addresses and strides in multiples of 16 bytes; the size of a head is one. ``indices`` are a run's
    arguments that say where sequences and their keys begin.
    """

    lane: PrefillAttention
    plans: Plans
    indices: tuple[Tensor, ...]
    paged: bool

    def run_into(self, layer: int, rows: LayerRows, out: Tensor) -> None:
        lane, window = self.lane, self.lane.cache.windows[layer]
        module, settings = lane.modules[window], lane.settings[window]
        run = module.paged_run if self.paged else module.ragged_run
        keys, values = lane.cache.layer(layer) if self.paged else (rows.k, rows.v)
        queries = saturated(rows.q) if lane.fp8_q else rows.q
        run(*self.plans[window], queries, keys, values, *self.indices, out, *settings)
