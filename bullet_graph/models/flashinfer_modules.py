"""FlashInfer's compiled attention modules: which one an engine needs, finding or building its library, loading it.

FlashInfer itself does no more than that: a module is a shared library that ``tvm_ffi`` loads, and its functions are
called as they are (see ``flashinfer_attention``). So whoever has the libraries, as a capture cache does, does without
the ``flashinfer`` package, whose import takes nearly a second.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Backend = Literal["fa2", "fa3"]

_NO_POSITIONS = 0


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
