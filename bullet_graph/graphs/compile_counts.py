"""Counts what was compiled while something ran, by the libraries' own counters."""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """How often something was compiled that no cache had.

    ``cpp`` counts runs of the C++ compiler by Inductor, those that probe it included; ``triton`` Inductor's kernels and
    ours; ``triton_stubs`` launchers and other host code.
    """

    dynamo_frames: int = 0
    aot_autograd: int = 0
    inductor: int = 0
    cpp: int = 0
    triton: int = 0
    triton_stubs: int = 0
    flashinfer: int = 0

    def __add__(self, other: "CompileCounts") -> "CompileCounts":
        return CompileCounts(**{name: count + getattr(other, name) for name, count in asdict(self).items()})


class CompileCounter:
    """Counts during its ``with`` block, in all threads of this process; ``counts`` is complete once the block ends.

    ``gpu`` also counts what is compiled for a GPU, and imports Triton.
    """

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self.counts = CompileCounts()
        self._triton = 0
        self._listener: Any = None

    def __enter__(self) -> Self:
        self._before = _torch_counts()
        if self._gpu:
            from triton import knobs  # noqa: PLC0415 - a machine without a GPU need not have it

            self._stubs, self._begin_ns = _triton_stubs(), time.time_ns()
            self._listener = knobs.compilation.listener
            knobs.compilation.listener = self._on_triton
        return self

    def __exit__(self, *exc: object) -> None:
        after = _torch_counts()
        counts = {name: after[name] - self._before.get(name, 0) for name in after}
        if self._gpu:
            from triton import knobs  # noqa: PLC0415

            knobs.compilation.listener = self._listener
            counts |= {
                "triton": self._triton,
                "triton_stubs": len(_triton_stubs() - self._stubs),
                "flashinfer": sum(built_ns >= self._begin_ns for built_ns in _flashinfer_modules_ns()),
            }
        self.counts = CompileCounts(**counts)

    def _on_triton(self, **told: Any) -> None:
        self._triton += not told["cache_hit"]
        if self._listener is not None:
            self._listener(**told)


def _torch_counts() -> dict[str, int]:
    # Importing Dynamo takes a second; before that, nothing was compiled.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return {}
    return {
        "dynamo_frames": dynamo.counters["stats"]["unique_graphs"],
        "aot_autograd": dynamo.counters["aot_autograd"]["autograd_cache_miss"],
        # Timed under these names; the counter of Inductor's cache does not move where it compiles ahead of time.
        "inductor": len(dynamo.compilation_time_metrics.get("fx_codegen_and_compile", ())),
        "cpp": len(dynamo.compilation_time_metrics.get("compile_file", ())),
    }


def _triton_stubs() -> set[Path]:
    from triton import knobs  # noqa: PLC0415

    # Triton reports its kernels, but not these.
    return set(Path(knobs.cache.dir).glob("*/*.so"))


def _flashinfer_modules_ns() -> list[int]:
    """Build times of the modules in FlashInfer's own folder; none before it is imported, as it has built none."""
    env = sys.modules.get("flashinfer.jit.env")
    if env is None:
        return []
    return [library.stat().st_mtime_ns for library in Path(env.FLASHINFER_JIT_DIR).glob("*/*.so")]
