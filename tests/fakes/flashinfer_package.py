"""FlashInfer's finder and builder of modules, and the loader that it uses: files are built and loaded, not code."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from bullet_graph.kernels import flashinfer_attention
from bullet_graph.kernels.fp8 import FP8


@dataclass
class FakeFlashInfer:
    """Its folders of modules compiled ahead of time and by itself, what it built of these, and what was loaded."""

    BROKEN: ClassVar = b"broken"
    """What a library holds that cannot be loaded."""

    aot: Path
    jit: Path
    built: list[str] = field(default_factory=list)
    loaded: list[Path] = field(default_factory=list)

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch, folder: Path) -> "FakeFlashInfer":
        """Put it, and a loader, where they would be imported from; the process has loaded no module yet."""
        fake = cls(folder / "flashinfer_aot", folder / "flashinfer_jit")
        package, jit, attention, tvm_ffi = (
            ModuleType(name) for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention", "tvm_ffi")
        )
        attention.gen_batch_prefill_module = fake.specification  # type: ignore[attr-defined]
        tvm_ffi.load_module = fake.load  # type: ignore[attr-defined]
        for module in (package, jit, attention, tvm_ffi):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(flashinfer_attention, "_loaded", {})
        return fake

    def specification(self, backend: str, *settings: object) -> "FakeJitSpec":
        """The settings: three dtypes, that of indices, two head dimensions, positions, window, soft cap, FP16 QK."""
        q, kv, dtype, head_dim, window = *settings[:3], settings[4], settings[7]
        assert settings == (q, kv, dtype, torch.int32, head_dim, head_dim, 0, window, False, False)
        assert (q, kv) in ((dtype, dtype), (FP8, FP8) if backend == "fa3" else (dtype, FP8))
        return FakeJitSpec(f"prefill_{backend}_{head_dim}{'_swa' if window else ''}{'_fp8' if kv is FP8 else ''}", self)

    def load(self, path: str) -> Any:
        library = Path(path)
        if library.read_bytes() == self.BROKEN:
            raise RuntimeError("undefined symbol")
        self.loaded.append(library)
        return object()


@dataclass
class FakeJitSpec:
    """A module that is compiled by writing a file."""

    name: str
    flashinfer: FakeFlashInfer

    @property
    def aot_path(self) -> Path:
        return self.flashinfer.aot / self.name / f"{self.name}.so"

    @property
    def is_aot(self) -> bool:
        return self.aot_path.exists()

    def get_library_path(self) -> Path:
        return self.aot_path if self.is_aot else self.flashinfer.jit / self.name / f"{self.name}.so"

    def build(self, *, verbose: bool) -> None:
        assert not verbose
        assert not self.is_aot
        self.flashinfer.built.append(self.name)
        library = self.get_library_path()
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(b"compiled")
