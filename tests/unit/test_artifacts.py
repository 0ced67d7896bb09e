"""The parts of a capture cache: what is taken from the libraries' folders and put back, and what was measured."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from caches import FINGERPRINT, PLAN, quiet
from fakes.flashinfer_package import FakeFlashInfer

from bullet_graph.captures.builder import Build, open_build
from bullet_graph.captures.entry import OpenedEntry
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint
from bullet_graph.captures.store import CaptureStore
from bullet_graph.errors import CacheError, CaptureCacheWarning
from bullet_graph.graphs.capture_plan import CapturePlan, DecodeSizes
from bullet_graph.kernels.flashinfer_attention import load_module, needed_module
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.offsets import DriverId, remember, remembered
from bullet_graph.perf.table import list_tables, read_table
from bullet_graph.runtime.artifacts import measured
from bullet_graph.runtime.artifacts.building import _add_flashinfer, _add_start
from bullet_graph.runtime.artifacts.library_caches import TRITON, caches_below, collect, restore
from bullet_graph.runtime.artifacts.use import Captures

pytestmark = pytest.mark.timeout(180)

LLAMA: ModelConfig = PRESETS["llama-3.1-8b"]
ROW_PLAN = CapturePlan(
    model="m",
    dtype="bfloat16",
    num_sms=132,
    max_num_seqs=4,
    decode=(DecodeSizes(None, (1, 4)),),
    piecewise_rows=(16, 32, 48),
)

COMPILE_A_KERNEL = """
import sys
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from bullet_graph.graphs.compile_counts import CompileCounter
from bullet_graph.kernels.triton_kernels import silu_and_mul_kernel
signature = {"gate_up_ptr": "*fp32", "out_ptr": "*fp32", "intermediate_size": "i32"}
source = ASTSource(silu_and_mul_kernel, signature, {"BLOCK": 128})
with CompileCounter(gpu=True) as counter:
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert len(compiled.asm["cubin"]) > 1000
print(counter.counts.triton)
"""


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeFlashInfer:
    """FlashInfer on Hopper; nothing of it is compiled."""
    monkeypatch.setattr(Gpu, "of", lambda _: Gpu(132, (9, 0)))
    return FakeFlashInfer.install(monkeypatch, tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> CaptureStore:
    return CaptureStore(tmp_path / "captures")


@pytest.fixture
def build(store: CaptureStore) -> Iterator[Build]:
    with open_build(store, FINGERPRINT, PLAN, tell=quiet) as build:
        yield build


def committed(store: CaptureStore, build: Build) -> OpenedEntry:
    return store.open(build.commit(self_check=None, provenance={}))


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def group(folder: Path, *names: str) -> str:
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}})


def test_a_folder_of_kernels_travels(store: CaptureStore, build: Build, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    key = here / "KEY"
    write(here, KEY__k="cubin")
    (key / "__grp__k.json").write_text(group(key, "k"))
    write(key / "tmp.pid_1_2", half="unfinished")
    collect(build, TRITON, here, build_seconds=8.0)
    assert str(here) not in build.path("triton/KEY/__grp__k.json").read_text()
    with committed(store, build) as opened:
        artifacts = opened.of_kind(ArtifactKind.TRITON)
        assert [a.name for a in artifacts] == ["triton/KEY/__grp__k.json", "triton/KEY/k"]
        assert sum(a.build_seconds for a in artifacts) == 8.0
        assert restore(opened, TRITON, there) == 2
        assert json.loads((there / "KEY" / "__grp__k.json").read_text())["child_paths"] == {
            "k": str(there / "KEY" / "k")
        }
        assert (there / "KEY" / "k").read_text() == "cubin"
        # What is there stays, and nothing is left beside it.
        (there / "KEY" / "k").write_text("the user's own")
        assert restore(opened, TRITON, there) == 0
    assert (there / "KEY" / "k").read_text() == "the user's own"
    assert sorted(path.name for path in there.rglob("*") if path.is_file()) == ["__grp__k.json", "k"]


def test_a_group_names_no_file_elsewhere(store: CaptureStore, build: Build, tmp_path: Path) -> None:
    evil = json.dumps({"child_paths": {"k": "../../../../etc/passwd"}}).encode()
    build.add_bytes("triton/K/__grp__k.json", ArtifactKind.TRITON, evil, path="g", build_seconds=0.0)
    with committed(store, build) as opened:
        restore(opened, TRITON, tmp_path / "there")
    found = json.loads((tmp_path / "there" / "K" / "__grp__k.json").read_text())
    assert found["child_paths"] == {"k": str(tmp_path / "there" / "K" / "passwd")}


@pytest.mark.parametrize("traced", [False, True])
def test_inductor_s_own_caches_are_for_starts_that_trace(build: Build, tmp_path: Path, traced: bool) -> None:
    write(tmp_path / "inductor", ab__x="library", fxgraph__y="graph", aotautograd__z="graph", locks__l="")
    built: Any = SimpleNamespace(capture=None)
    _add_start(build, built, tmp_path, PLAN, (), 1.0, traced=traced)
    kept = {artifact.name for artifact in build.of_kind(ArtifactKind.TORCH_COMPILE)}
    assert kept == ({"inductor/ab/x", "inductor/fxgraph/y", "inductor/aotautograd/z"} if traced else set())


def test_a_kernel_that_triton_compiled_is_found_elsewhere(
    store: CaptureStore, build: Build, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux only")

    def compiled(folder: Path) -> int:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {
            "TRITON_CACHE_DIR": str(folder),
            "PYTHONPATH": str(Path(sys.modules["bullet_graph"].__path__[0]).parent),
        }
        done = subprocess.run(
            [sys.executable, "-c", COMPILE_A_KERNEL],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    here, there = tmp_path / "here", tmp_path / "there"
    assert compiled(here) == 1
    collect(build, TRITON, here, build_seconds=1.0)
    with committed(store, build) as opened:
        restore(opened, TRITON, there)
    for path in here.rglob("*"):
        if path.is_file():
            path.unlink()
    assert compiled(there) == 0


def test_the_libraries_work_elsewhere_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = dict(os.environ)
    with caches_below(tmp_path):
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert dict(os.environ) == before


def test_rows_that_were_worthwhile(store: CaptureStore, build: Build) -> None:
    assert Captures(build, build=build).row_buckets(ROW_PLAN) is None, "a build measures"
    assert Captures().row_buckets(ROW_PLAN) is None
    measured.add_tuning(build, (16, 48), build_seconds=1.0)
    with committed(store, build) as opened:
        assert Captures(opened).row_buckets(ROW_PLAN) == (16, 48)


@pytest.mark.parametrize("recorded", [b"[48, 16]", b"[17]", b"{", b'{"a": 1}', b"[16, 16]"])
def test_rows_that_cannot_be(store: CaptureStore, build: Build, recorded: bytes) -> None:
    name = measured.ROW_BUCKETS
    build.add_bytes(name, ArtifactKind.TUNING, recorded, path=name, build_seconds=0.0)
    with committed(store, build) as opened:
        captures = Captures(opened)
        with pytest.warns(CaptureCacheWarning, match="timed anew: row_buckets"):
            assert captures.row_buckets(ROW_PLAN) is None
        assert len(captures.use.problems) == 1


def test_an_offset_is_remembered_where_none_is_known(
    store: CaptureStore, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, known = DriverId(99000, "999.1", "x86_64"), 0x51C
    monkeypatch.setattr(measured, "identify_driver", lambda: driver)
    proven = remember(driver, known, tmp_path / "proven.json")
    build.add_file(
        measured.MASK_OFFSET, ArtifactKind.MASK_OFFSET, proven, path=measured.MASK_OFFSET, build_seconds=0.0
    )
    mine = tmp_path / "mine.json"
    with committed(store, build) as opened:
        measured.restore_mask_offset(opened, mine)
        assert remembered(driver, mine) == known
        remember(driver, 0x528, mine)
        measured.restore_mask_offset(opened, mine)
    assert remembered(driver, mine) == 0x528, "one's own counts"


def test_a_table_is_found_whatever_the_plan(store: CaptureStore, build: Build) -> None:
    shipped = list_tables()[0]
    build.add_file(
        measured.PERF_TABLE, ArtifactKind.PERF_TABLE, shipped, path=measured.PERF_TABLE, build_seconds=0.0
    )
    build.commit(self_check=None, provenance={})
    newer_code = Fingerprint.of({**FINGERPRINT.values, "code_kernels": "other"})
    assert measured.cached_perf_table(store, newer_code) == read_table(shipped)
    other_gpu = Fingerprint.of({**FINGERPRINT.values, "gpu": "another"})
    assert measured.cached_perf_table(store, other_gpu) is None


def test_what_cannot_be_compiled_ahead_is_traced(build: Build) -> None:
    captures = Captures(build, build=build)

    def refused() -> Any:
        raise RuntimeError("no serializing of that")

    with pytest.warns(CaptureCacheWarning, match="each start will trace it: no serializing"):
        assert captures.save("halves/x", refused, lambda: max) is max  # type: ignore[arg-type, return-value]
    assert captures.keeps_traced
    assert "halves/x" not in build


MODULE = "flashinfer/fa3_bfloat16_128.so"


def test_flashinfer_s_modules(
    flashinfer: FakeFlashInfer, store: CaptureStore, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, model=LLAMA)
    _add_flashinfer(build, runtime)
    assert [artifact.name for artifact in build.of_kind(ArtifactKind.FLASHINFER)] == [MODULE]
    assert flashinfer.built == ["prefill_fa3_128"]
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # who imports it from here on, fails
    _add_flashinfer(build, runtime)  # what is there is not built again
    with committed(store, build) as opened:
        Captures(opened).load_attention(runtime)
        library = opened.path(MODULE)
    assert flashinfer.loaded == [library]
    load_module(needed_module(Gpu.of(runtime.device), torch.bfloat16, 128))
    assert flashinfer.loaded == [library], "an attention lane gets what the cache has brought"


def test_a_library_of_flashinfer_s_that_cannot_be_loaded(
    flashinfer: FakeFlashInfer, store: CaptureStore, build: Build
) -> None:
    build.add_bytes(MODULE, ArtifactKind.FLASHINFER, FakeFlashInfer.BROKEN, path=MODULE, build_seconds=1.0)
    runtime: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, model=LLAMA)
    with committed(store, build) as opened:
        captures = Captures(opened)
        with pytest.warns(
            CaptureCacheWarning, match="fa3_bfloat16_128.so cannot be loaded.* undefined symbol"
        ):
            captures.load_attention(runtime)
        assert flashinfer.loaded == []
    assert len(captures.use.problems) == 1
    load_module(needed_module(Gpu.of(runtime.device), torch.bfloat16, 128))
    assert flashinfer.built == ["prefill_fa3_128"]


def test_parts_that_are_not_there(build: Build) -> None:
    with pytest.raises(CacheError, match="no artifact 'x' yet"):
        build.path("x")
    assert measured.tuned_row_buckets(build, (16,)) is None
    measured.restore_mask_offset(build)
