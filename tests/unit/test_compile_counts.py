"""What was compiled, told by the libraries' counters."""

import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bullet_graph.graphs.compile_counts import CompileCounter, CompileCounts


def test_what_dynamo_traces() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    torch._dynamo.reset()
    with CompileCounter(gpu=False) as counter:
        compiled = torch.compile(function, backend="aot_eager")
        compiled(torch.ones(3))
        compiled(torch.ones(3))
    with CompileCounter(gpu=False) as again:
        compiled(torch.ones(3))
    torch._dynamo.reset()
    assert counter.counts == CompileCounts(dynamo_frames=1)
    assert again.counts == CompileCounts()


def test_triton_s_listener_is_put_back() -> None:
    knobs = pytest.importorskip("triton", reason="Triton is published for Linux only").knobs
    told: list[dict[str, object]] = []
    before = knobs.compilation.listener
    try:
        knobs.compilation.listener = mine = lambda **found: told.append(found)
        with CompileCounter(gpu=True) as counter:
            for cache_hit in (False, True, False):
                knobs.compilation.listener(cache_hit=cache_hit)
        assert knobs.compilation.listener is mine
    finally:
        knobs.compilation.listener = before
    assert counter.counts == CompileCounts(triton=2)
    assert [found["cache_hit"] for found in told] == [False, True, False], "whoever listened before still hears all"


def test_modules_that_flashinfer_builds_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    for name in ("there", "rebuilt"):
        library = tmp_path / name / f"{name}.so"
        library.parent.mkdir()
        library.touch()
        os.utime(library, (time.time() - 3600,) * 2)
    env = ModuleType("flashinfer.jit.env")
    env.FLASHINFER_JIT_DIR = tmp_path  # type: ignore[attr-defined]
    with CompileCounter(gpu=True) as counter:
        # It is imported only where a module has to be found or built.
        monkeypatch.setitem(sys.modules, "flashinfer.jit.env", env)
    assert counter.counts == CompileCounts()
    with CompileCounter(gpu=True) as counter:
        (tmp_path / "new").mkdir()
        for name in ("new", "rebuilt"):
            library = tmp_path / name / f"{name}.so"
            library.touch()
            os.utime(library, (time.time() + 1,) * 2)  # file systems may tell the time in coarse steps
    assert counter.counts == CompileCounts(flashinfer=2)


def test_sums() -> None:
    both = CompileCounts(cpp=2, triton=1) + CompileCounts(dynamo_frames=3, triton=4)
    assert both == CompileCounts(dynamo_frames=3, cpp=2, triton=5)
