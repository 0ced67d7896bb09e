"""FlashInfer's compiled modules as files: building those that are needed, and loading them from another folder.

FlashInfer compiles a module when it is first asked for, unless its folder of modules compiled ahead of time has it.
This points it at such a folder for a while; the release that pyproject.toml pins looks it up at each load.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flashinfer.jit import env as jit_env
from flashinfer.jit.attention import gen_batch_prefill_module

from bullet_graph.models.flashinfer_attention import Backend, load_module, module_arguments, prefill_backend


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One of FlashInfer's attention modules."""

    backend: Backend
    dtype: torch.dtype
    head_dim: int

    @property
    def _jit(self) -> Any:
        return gen_batch_prefill_module(*module_arguments(self.backend, self.dtype, self.head_dim))

    @property
    def name(self) -> str:
        """FlashInfer's own name of it."""
        return str(self._jit.name)

    def build(self) -> Path:
        """Compile it, or find it compiled; returns the shared library."""
        jit = self._jit
        if not jit.is_aot:
            jit.build(verbose=False)
        return Path(jit.get_library_path())


def needed_modules(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[ModuleSpec, ...]:
    """What an engine on this GPU runs."""
    backends: dict[Backend, None] = dict.fromkeys((prefill_backend(device), "fa2"))
    return tuple(ModuleSpec(backend, dtype, head_dim) for backend in backends)


def load_modules(modules: Sequence[ModuleSpec], folder: Path) -> None:
    """Load modules from ``folder``/NAME/NAME.so, for the whole process; nothing is compiled.

    Raises:
        Exception: of the loader's kind, where a library cannot be loaded.
    """
    with _modules_in(folder):
        for module in modules:
            load_module(module.backend, module.dtype, module.head_dim)


@contextmanager
def _modules_in(folder: Path) -> Iterator[None]:
    before = jit_env.FLASHINFER_AOT_DIR
    jit_env.FLASHINFER_AOT_DIR = folder
    try:
        yield
    finally:
        jit_env.FLASHINFER_AOT_DIR = before
