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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bullet_graph.kernels.attention import LayerRows
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.memory import KVCache, PinnedRing
from bullet_graph.perf.roofline import DecoderShape

Backend = Literal["fa2", "fa3"]

_INT_WORKSPACE_BYTES = 8 * 1024**2
_NO_POSITIONS = 0
_NO_WINDOW = -1
_CAUSAL_MASK = 1
_NHD_LAYOUT = 0


# ---- modules ----


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One of FlashInfer's attention modules: without positions, window, soft cap or 16-bit sums."""

    backend: Backend
    dtype: torch.dtype
    head_dim: int

    @property
    def name(self) -> str:
        """Unique among modules; FlashInfer has names of its own."""
        return f"{self.backend}_{str(self.dtype).removeprefix('torch.')}_{self.head_dim}"

    def build(self) -> Path:
        """Have FlashInfer compile the module or find it compiled; returns the shared library."""
        # Imported here because it takes nearly a second, which a start that has the library need not spend.
        from flashinfer.jit.attention import gen_batch_prefill_module  # noqa: PLC0415

        jit = gen_batch_prefill_module(
            *(self.backend, self.dtype, self.dtype, self.dtype, torch.int32, self.head_dim, self.head_dim),
            *(_NO_POSITIONS, False, False, False),
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


def needed_module(gpu: Gpu, dtype: torch.dtype, head_dim: int) -> ModuleSpec:
    """The module that an engine on this GPU runs: fa3 on Hopper, fa2 elsewhere."""
    return ModuleSpec("fa3" if gpu.is_hopper else "fa2", dtype, head_dim)


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
    num_rows: int


class PrefillAttention:
    """Kernels and scratch for one kind of batch of one lane; never shared by lanes that run at the same time.

    A plan holds until the next plan's copy runs: a forward with two kinds of batches takes two of these.
    ``float_workspace`` is zeroed scratch, of :func:`~bullet_graph.runtime.memory.prefill_workspace_bytes`; attentions
    that take turns may share it.
    """

    def __init__(
        self, shape: DecoderShape, cache: KVCache, *, spec: ModuleSpec, float_workspace: Tensor
    ) -> None:
        self.cache = cache
        self._shape = shape
        self._backend = spec.backend
        self.module = load_module(spec)
        self._float_workspace = float_workspace
        self._int_workspace = torch.empty(
            _INT_WORKSPACE_BYTES, dtype=torch.uint8, device=float_workspace.device
        )
        self._staging = PinnedRing(_INT_WORKSPACE_BYTES)
        self.settings = _run_settings(spec.backend, shape.head_dim)

    def plan(self, batch: PagedBatch) -> "PlannedAttention":
        """Divide the batch over the SMs and enqueue the plan's copy to the device."""
        plan = self._plan(
            batch.host_q_indptr,
            batch.host_kv_indptr,
            batch.host_kv_lens,
            num_rows=batch.num_rows,
            page_tokens=self.cache.block_tokens,
        )
        return PlannedAttention(self, plan, batch)

    def plan_ragged(self, indptr: Tensor, host_indptr: Tensor) -> "PlannedRaggedAttention":
        """As :meth:`plan`, for n sequences that had nothing in the cache before, and so attend to the rows alone.

        ``indptr`` [n + 1] int32, on the device and on the host, is where each sequence's rows start; may begin above 0.
        """
        num_rows = int(host_indptr[-1] - host_indptr[0])
        plan = self._plan(host_indptr, host_indptr, host_indptr.diff(), num_rows=num_rows, page_tokens=1)
        return PlannedRaggedAttention(self, plan, indptr)

    def _plan(
        self, q_indptr: Tensor, kv_indptr: Tensor, kv_lens: Tensor, *, num_rows: int, page_tokens: int
    ) -> tuple[Any, ...]:
        """The first arguments of the plan's runs."""
        shape = self._shape
        with self._staging.buffer() as staging:
            arguments = [
                self._float_workspace,
                self._int_workspace,
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
                _NO_WINDOW,
            ]
            if self._backend == "fa2":
                arguments += [-1, False, 0]  # the plan chooses the split size; no other kernel runs beside
            plan_info = self.module.plan(*arguments)
        return self._float_workspace, self._int_workspace, plan_info


def _run_settings(backend: Backend, head_dim: int) -> tuple[Any, ...]:
    """The arguments of a run that follow its output."""
    # No log-sum-exp; programmatic dependent launch.
    common = (None, _CAUSAL_MASK, _NHD_LAYOUT, _NO_WINDOW, True)
    no_items = (None, None, None)  # no multi-item scoring: prefixes, positions, lengths
    scale = 1.0 / math.sqrt(head_dim)
    if backend == "fa2":
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
class PlannedAttention:
    """One batch's attention to the cache, to run for each layer."""

    lane: PrefillAttention
    plan: tuple[Any, ...]
    batch: PagedBatch

    def run_into(self, layer: int, rows: LayerRows, out: Tensor) -> None:
        keys, values = self.lane.cache.layer(layer)
        batch = self.batch
        self.lane.module.paged_run(
            *self.plan,
            rows.q,
            keys,
            values,
            batch.q_indptr,
            batch.kv_indptr,
            batch.kv_indices,
            batch.last_block_tokens,
            out,
            *self.lane.settings,
        )


@dataclass(frozen=True, slots=True)
class PlannedRaggedAttention:
    """As :class:`PlannedAttention`, but keys and values are read where they were computed.

    On Hopper TMA reads them, which cannot gather pages. It requires addresses and strides in multiples of 16 bytes; the
    size of a head is one.
    """

    lane: PrefillAttention
    plan: tuple[Any, ...]
    indptr: Tensor

    def run_into(self, layer: int, rows: LayerRows, out: Tensor) -> None:  # noqa: ARG002 - the protocol's
        indptr = self.indptr
        self.lane.module.ragged_run(
            *self.plan, rows.q, rows.k, rows.v, indptr, indptr, out, *self.lane.settings
        )
