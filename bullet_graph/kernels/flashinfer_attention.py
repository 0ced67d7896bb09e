"""Attention with FlashInfer's kernels, to the paged KV cache or to a forward's own rows, planned without its wrappers.

The wrappers hide what captured decode needs: buffers at fixed addresses shared between batch sizes, a
staging buffer that is not overwritten while its copy is in flight, and a plan that costs microseconds
instead of a Python loop over the batch. So the compiled modules are called directly, with the arguments of
the FlashInfer release that pyproject.toml pins: csrc/batch_prefill*_jit_binding.cu has the common ones, and
gen_batch_prefill_module names those that follow them. The kernels run on torch's current stream: ``tvm_ffi`` asks
torch for it when the first tensor on the device is passed.

A module is a shared library that ``tvm_ffi`` loads. Whoever has the libraries, as a capture cache does, does without
the ``flashinfer`` package, whose import takes nearly a second.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bullet_graph.kernels.attention import LayerRows
from bullet_graph.kernels.memory import KVCache, PinnedRing
from bullet_graph.kernels.shapes import DecoderShape

Backend = Literal["fa2", "fa3"]

_NO_POSITIONS = 0
_INT_WORKSPACE_BYTES = 8 * 1024**2
_NHD_LAYOUT = 0
_BLOCKS_PER_SM = 2


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One of FlashInfer's attention modules: paged and ragged, without positions, window, soft cap or 16-bit sums.

    Attributes:
        backend: which kernels.
        dtype: of queries, cache and output.
        head_dim: of keys and values.
    """

    backend: Backend
    dtype: torch.dtype
    head_dim: int

    @property
    def name(self) -> str:
        """Short and unique among modules; FlashInfer has names of its own."""
        return f"{self.backend}_{str(self.dtype).removeprefix('torch.')}_{self.head_dim}"

    def build(self) -> Path:
        """Compile it, or find it compiled, as FlashInfer does; returns the shared library."""
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
"""A process loads a module once, and for good: its kernels are in captured graphs."""


def load_module(spec: ModuleSpec, library: Path | None = None) -> Any:
    """A module's own functions: ``plan``, ``paged_run`` and ``ragged_run``.

    Args:
        spec: which one.
        library: where it lies, None: FlashInfer finds or builds it. Of no account once the process has the module.

    Raises:
        RuntimeError: it cannot be loaded.
    """
    if spec not in _loaded:
        # Imported here because a machine without a GPU need not have it.
        import tvm_ffi  # noqa: PLC0415

        _loaded[spec] = tvm_ffi.load_module(str(spec.build() if library is None else library))
    return _loaded[spec]


def prefill_backend(device: torch.device) -> Backend:
    """fa3 on Hopper, for which alone it is written; fa2 elsewhere."""
    return "fa3" if torch.cuda.get_device_capability(device) == (9, 0) else "fa2"


def needed_module(device: torch.device, dtype: torch.dtype, head_dim: int) -> ModuleSpec:
    """What an engine on this GPU runs."""
    return ModuleSpec(prefill_backend(device), dtype, head_dim)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which rows attend to which blocks; device and host copies of one batch.

    Attributes:
        q_indptr: [n + 1] int32 on the device, where each sequence's rows start.
        kv_indptr: [n + 1] int32 on the device.
        kv_indices: block ids, int32 on the device.
        last_block_tokens: [n] int32 on the device, tokens in each sequence's last block.
        host_q_indptr: [n + 1] int32 on the host; likewise the two below.
        host_kv_indptr: [n + 1].
        host_kv_lens: [n].
        num_rows: query rows.
    """

    q_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_block_tokens: Tensor
    host_q_indptr: Tensor
    host_kv_indptr: Tensor
    host_kv_lens: Tensor
    num_rows: int


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Sequences that are in one forward from their first token on, and so attend to its rows alone.

    Attributes:
        indptr: [n + 1] int32 on the device, where each sequence's rows start in the forward; the first need not be 0.
        host_indptr: likewise on the host.
    """

    indptr: Tensor
    host_indptr: Tensor


class AttentionLane:
    """Kernels and scratch of one lane, for one kind of batch; never shared by two lanes that run at the same time.

    A plan holds until the next one's copy runs: whoever needs two of them in a forward takes two of these.

    Args:
        config: the model's shape.
        cache: the KV cache.
        dtype: of queries and cache.
        backend: which kernels.
        causal: rows of a sequence see only what is before them (a decode row sees all there is).
        float_workspace: scratch, zeroed, shared with nothing that runs at the same time.
    """

    def __init__(
        self,
        config: DecoderShape,
        cache: KVCache,
        *,
        dtype: torch.dtype,
        backend: Backend,
        causal: bool,
        float_workspace: Tensor,
    ) -> None:
        self._config = config
        self._cache = cache
        self._backend = backend
        self._causal = causal
        self._module = load_module(ModuleSpec(backend, dtype, config.head_dim))
        self._float_workspace = float_workspace
        self._int_workspace = torch.empty(
            _INT_WORKSPACE_BYTES, dtype=torch.uint8, device=float_workspace.device
        )
        self._staging = PinnedRing(_INT_WORKSPACE_BYTES)
        self._device_sms = torch.cuda.get_device_properties(float_workspace.device).multi_processor_count

    def plan(self, batch: PagedBatch, *, captured: bool, num_sms: int | None = None) -> "PlannedAttention":
        """Divide the batch over the SMs and enqueue the plan's copy to the device.

        Args:
            captured: the run is part of a CUDA graph: its launches must not depend on the lengths.
            num_sms: SMs that the kernels will have, None for all; fa2 alone heeds it.
        """
        kernels = self._plan(
            batch.host_q_indptr,
            batch.host_kv_indptr,
            batch.host_kv_lens,
            num_rows=batch.num_rows,
            page_tokens=self._cache.block_tokens,
            captured=captured,
            num_sms=num_sms,
        )
        return PlannedAttention(kernels, batch, self._cache)

    def plan_ragged(self, batch: RaggedBatch) -> "PlannedRaggedAttention":
        """As :meth:`plan`, for sequences of which nothing was in the cache before."""
        indptr = batch.host_indptr
        num_rows = int(indptr[-1] - indptr[0])
        kernels = self._plan(
            indptr, indptr, indptr.diff(), num_rows=num_rows, page_tokens=1, captured=False, num_sms=None
        )
        return PlannedRaggedAttention(kernels, batch)

    def _plan(
        self,
        q_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        *,
        num_rows: int,
        page_tokens: int,
        captured: bool,
        num_sms: int | None,
    ) -> "_PlannedKernels":
        config = self._config
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
                config.num_heads,
                config.num_kv_heads,
                page_tokens,
                captured,
                config.head_dim,
                config.head_dim,
                self._causal,
                -1,  # no sliding window
            ]
            if self._backend == "fa2":
                # The planner fills the whole device, two blocks a SM; what it takes for co-located blocks of
                # another kernel are here the blocks of the SMs that this lane does not have.
                elsewhere = 0 if num_sms is None else _BLOCKS_PER_SM * (self._device_sms - num_sms)
                arguments += [-1, False, elsewhere]  # -1: the plan chooses the split size
            plan_info = self._module.plan(*arguments)
        return _PlannedKernels(
            self._module, (self._float_workspace, self._int_workspace, plan_info), self._settings()
        )

    def _settings(self) -> tuple[Any, ...]:
        """All that follows the output in a run's arguments, paged or ragged."""
        common = (
            None,  # no log-sum-exp
            int(self._causal),
            _NHD_LAYOUT,
            -1,  # no sliding window
            True,  # programmatic dependent launch
        )
        scale = 1.0 / math.sqrt(self._config.head_dim)
        if self._backend == "fa2":
            return (
                *common,
                *(None, None),  # no mask of one's own, nor where each sequence's begins
                None,  # no slopes of ALiBi
                *(None, None, None),  # no items: prefixes, positions, lengths
                *(None, None),  # no scales of a cache in four bits
                0.0,  # no soft cap
                scale,
                *(1.0, 1e-4),  # reciprocals of RoPE's scale and base: unused
                0,  # no items
            )
        return (
            *common,
            *(None, None, None),  # no items: prefixes, positions, lengths
            None,  # no scales of the values' heads
            0.0,  # no soft cap
            scale,
            1.0,  # nor a scale of all values
            0,  # no items
        )


@dataclass(frozen=True, slots=True)
class _PlannedKernels:
    """What both runs of a module begin with, and what follows their output."""

    module: Any
    plan: tuple[Any, ...]
    settings: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    """One batch's attention, to be run for each layer."""

    kernels: _PlannedKernels
    batch: PagedBatch
    cache: KVCache

    def run_into(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend, from the batch's rows ``q`` [rows, num_heads, head_dim] into ``out`` of the same shape."""
        keys, values = self.cache.layer(layer)
        batch = self.batch
        self.kernels.module.paged_run(
            *self.kernels.plan,
            q,
            keys,
            values,
            batch.q_indptr,
            batch.kv_indptr,
            batch.kv_indices,
            batch.last_block_tokens,
            out,
            *self.kernels.settings,
        )


@dataclass(frozen=True, slots=True)
class PlannedRaggedAttention:
    """As :class:`PlannedAttention`, but keys and values are read where they were computed.

    On Hopper they come by TMA, which cannot gather pages; it asks for addresses and strides in multiples of 16
    bytes, and the size of a head is one.
    """

    kernels: _PlannedKernels
    batch: RaggedBatch

    def run_into(self, rows: LayerRows, out: Tensor) -> None:
        """Attend, into the batch's rows of ``out`` [all rows, num_heads, head_dim]; leaves the others alone.

        Args:
            rows: all of the forward.
        """
        self.kernels.module.ragged_run(
            *self.kernels.plan,
            rows.q,
            rows.k,
            rows.v,
            self.batch.indptr,
            self.batch.indptr,
            out,
            *self.kernels.settings,
        )
