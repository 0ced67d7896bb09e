"""What a start takes from a capture cache's entry, and what a build keeps in one."""

import json
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import capture_plans
import pytest
import torch
from caches import FILES, FINGERPRINT, PACKAGE, PLAN, build, flip_byte
from cli_runner import refused, run
from compiled_triton import run_compiled
from fakes.flashinfer_package import FakeFlashInfer
from ranks_in_threads import thread_communicators

from bullet_graph.captures.store import MANIFEST_NAME, CaptureStore, Entry
from bullet_graph.config import EngineConfig
from bullet_graph.errors import CacheError, CaptureCacheWarning
from bullet_graph.graphs.compiled import LayerPart
from bullet_graph.kernels.flashinfer_attention import load_module, needed_modules
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.offsets import DriverId, remember, remembered
from bullet_graph.perf.table import PerfTable, list_tables, read_table
from bullet_graph.runtime import capture_cache
from bullet_graph.runtime.build import Start
from bullet_graph.runtime.capture_build import keep_attention
from bullet_graph.runtime.capture_cache import (
    MEASURED,
    CacheUse,
    CapturedStart,
    cached_perf_table,
    copy_kernels,
    library_caches,
    restore_mask_offset,
)
from bullet_graph.runtime.fingerprint import machine_components, model_components
from bullet_graph.runtime.self_check import SelfCheckPoint

LLAMA: ModelConfig = PRESETS["llama-3.1-8b"]
ROW_PLAN = replace(capture_plans.PLAN, piecewise_rows=(16, 32, 48))

COMPILE_A_KERNEL_TWICE = """
import os, shutil
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from bullet_graph.graphs.compile_counts import CompileCounter
from bullet_graph.kernels.triton_kernels import act_and_mul_kernel
from bullet_graph.runtime.capture_cache import copy_kernels
signature = {"gate_up_ptr": "*fp32", "out_ptr": "*fp32", "intermediate_size": "i32"}
source = ASTSource(act_and_mul_kernel, signature, {"GELU": False, "BLOCK": 128})
def num_compiled():
    with CompileCounter(gpu=True) as counter:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 1000
    return counter.counts.triton
here = Path(os.environ["TRITON_CACHE_DIR"])
kept, there = here.with_name("kept"), here.with_name("there")
first = num_compiled()
copy_kernels(here, kept)
shutil.rmtree(here)
copy_kernels(kept, there)
triton.knobs.cache.dir = str(there)
print([first, num_compiled()])
"""


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeFlashInfer:
    """FlashInfer on Hopper; nothing of it is compiled."""
    monkeypatch.setattr(Gpu, "of", lambda _: Gpu(132, (9, 0)))
    return FakeFlashInfer.install(monkeypatch, tmp_path)


def test_a_folder_of_kernels_travels(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    key = here / "KEY"
    key.mkdir(parents=True)
    (key / "k").write_text("cubin")
    paths = {name: str(key / name) for name in ("k", "../../etc/passwd")}
    (key / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    (key / "tmp.pid_1_2").mkdir()
    (key / "tmp.pid_1_2" / "half").write_text("unfinished")
    copy_kernels(here, there)
    # A list names files beside it, whatever it says.
    assert json.loads((there / "KEY" / "__grp__k.json").read_text())["child_paths"] == {
        "k": str(there / "KEY" / "k"),
        "../../etc/passwd": str(there / "KEY" / "passwd"),
    }
    (there / "KEY" / "k").write_text("the user's own")
    copy_kernels(here, there)
    assert (there / "KEY" / "k").read_text() == "the user's own", "files that exist stay"
    assert sorted(path.name for path in there.rglob("*") if path.is_file()) == ["__grp__k.json", "k"]
    (key / "__grp__k.json").write_text("{}")
    with pytest.raises(CacheError, match="damaged"):
        copy_kernels(here, tmp_path / "elsewhere")


def test_a_kernel_that_triton_compiled_is_found_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    assert run_compiled(COMPILE_A_KERNEL_TWICE, tmp_path) == [1, 0]


def test_the_libraries_work_elsewhere_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = dict(os.environ)
    with library_caches(tmp_path):
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert dict(os.environ) == before


def test_rows_that_were_worthwhile_and_rows_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / MEASURED).write_text(json.dumps({"piecewise_rows": [16, 48]}))
    assert CapturedStart(tmp_path).piecewise_rows(ROW_PLAN) == (16, 48)
    assert CapturedStart(tmp_path, is_build=True).piecewise_rows(ROW_PLAN) is None, "a build measures"
    assert CapturedStart().piecewise_rows(ROW_PLAN) is None
    for recorded in ("[48, 16]", "[17]", "{", '{"piecewise_rows": [16, 16]}', "{}"):
        (tmp_path / MEASURED).write_text(recorded)
        captured = CapturedStart(tmp_path)
        with pytest.warns(CaptureCacheWarning, match=r"timed anew: measured\.json"):
            assert captured.piecewise_rows(ROW_PLAN) is None
        assert len(captured.use.problems) == 1


def test_an_offset_is_remembered_where_none_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, known = DriverId(99000, "999.1", "x86_64"), 0x51C
    monkeypatch.setattr(capture_cache, "identify_driver", lambda: driver)
    tried: list[int] = []
    monkeypatch.setattr(capture_cache, "prove", tried.append)
    proven, mine = remember(driver, known, tmp_path / "proven.json"), tmp_path / "mine.json"
    restore_mask_offset(tmp_path / "nonesuch.json", mine)
    assert not mine.exists()
    restore_mask_offset(proven, mine)
    assert remembered(driver, mine) == known
    assert tried == [known], "a wrong offset corrupts the driver: it is tried in another process first"
    own = 0x528
    remember(driver, own, mine)
    restore_mask_offset(proven, mine)
    assert remembered(driver, mine) == own, "one's own counts"


def test_an_offset_that_does_not_hold_is_a_problem_of_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = DriverId(99000, "999.1", "x86_64")
    monkeypatch.setattr(capture_cache, "identify_driver", lambda: driver)
    monkeypatch.setattr(capture_cache, "fingerprint_of", lambda _: FINGERPRINT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    proven = remember(driver, 0x51C, tmp_path / "proven.json")
    files = {"triton/KEY/gemm.cubin": b"cubin", capture_cache.MASK_OFFSET: proven.read_bytes()}
    entry = build(CaptureStore(tmp_path / "store"), files=files)
    config = EngineConfig(model="tiny", capture_cache=str(tmp_path / "store"))
    runtime: Any = SimpleNamespace(device=torch.device("cuda"))
    # The real proof: without a GPU, no child process can honour a mask.
    with (
        pytest.warns(CaptureCacheWarning, match="offset 0x51c must hold for other masks in a fresh process"),
        capture_cache.open_capture_entry(config, runtime, PLAN) as captured,
    ):
        pass
    assert captured.use.entry_id == entry.entry_id, "the rest is used"
    (problem,) = captured.use.problems
    assert problem.startswith(f"the SM-mask offset of entry {entry.entry_id} is not used: offset 0x51c must hold")
    assert remembered(driver) is None


def test_a_table_is_found_whatever_plan_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def table_for(**changes: str) -> PerfTable | None:
        monkeypatch.setattr(capture_cache, "fingerprint_of", lambda _: FINGERPRINT | changes)
        return cached_perf_table(store, RUNTIME)

    store, shipped = CaptureStore(tmp_path), list_tables()[0]
    build(store, plan={"model": "without a table"}, files={"x": b""})
    entry = build(store, files={"perf_table.json": shipped.read_bytes()})
    assert table_for(code="other") == read_table(shipped)
    assert table_for(gpu="another") is None
    (entry.files / "perf_table.json").write_text("{}")
    assert table_for() is None, "what is damaged is not read"


def test_what_cannot_be_compiled_ahead_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(capture_cache, "compile_ahead", refused)
    part = LayerPart("attention_input", max, (), ())  # type: ignore[arg-type]
    with pytest.raises(CacheError, match=r"needs a C\+\+ compiler.* no C\+\+ compiler here"):
        CapturedStart(tmp_path, is_build=True).compiler(part)


MODULE = "flashinfer/fa3_bfloat16_128.so"

RUNTIME: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, model=LLAMA)


def test_flashinfer_s_modules(flashinfer: FakeFlashInfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "files").mkdir()
    keep_attention(tmp_path / "files", RUNTIME)
    assert flashinfer.built == ["prefill_fa3_128"]
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # who imports it from here on, fails
    CapturedStart(tmp_path / "files").load_attention(RUNTIME)
    assert flashinfer.loaded == [tmp_path / "files" / MODULE]
    load_module(needed_modules(Gpu.of(RUNTIME.device), torch.bfloat16, LLAMA)[0])
    assert len(flashinfer.loaded) == 1, "an attention lane gets what the cache has brought"


def test_a_library_of_flashinfer_s_that_cannot_be_loaded(flashinfer: FakeFlashInfer, tmp_path: Path) -> None:
    (tmp_path / MODULE).parent.mkdir()
    (tmp_path / MODULE).write_bytes(FakeFlashInfer.BROKEN)
    captured = CapturedStart(tmp_path)
    with pytest.warns(CaptureCacheWarning, match="fa3_bfloat16_128.so cannot be loaded.* undefined symbol"):
        captured.load_attention(RUNTIME)
    assert flashinfer.loaded == []
    assert len(captured.use.problems) == 1
    load_module(needed_modules(Gpu.of(RUNTIME.device), torch.bfloat16, LLAMA)[0])
    assert flashinfer.built == ["prefill_fa3_128"]


# ---- several ranks ----


@pytest.mark.parametrize(
    ("found", "holds", "starts_from"),
    [
        ((True, True), (True, True), [[True], [True]]),
        ((True, False), (True, True), [[False], [False]]),
        ((True, True), (False, True), [[True, False], [True, False]]),
    ],
)
def test_all_ranks_start_alike(
    found: tuple[bool, bool], holds: tuple[bool, bool], starts_from: list[list[bool]], tmp_path: Path
) -> None:
    communicators = thread_communicators(2)
    runtime: Any = SimpleNamespace(device=torch.device("cpu"))
    config = EngineConfig(model="tiny", capture_cache="auto")

    def run(rank: int) -> tuple[list[bool], CacheUse]:
        started: list[bool] = []

        def build(captured: CapturedStart) -> Any:
            started.append(captured.files is not None)
            points = (SelfCheckPoint(2, 0.0 if holds[rank] else 1.0, 0.1),)
            return SimpleNamespace(executor=SimpleNamespace(shutdown=int), self_check=lambda **_: points)

        captured = CapturedStart(tmp_path if found[rank] else None, self_check="all", use=CacheUse("some entry"))
        start = Start(captured=captured, communicators=communicators[rank])
        _, _, use = capture_cache.start_with_captures(config, runtime, {}, build, start)
        return started, use

    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("ignore", CaptureCacheWarning)
        results = list(pool.map(run, range(2)))
    assert [started for started, _ in results] == starts_from
    for rank, (_, use) in enumerate(results):
        if starts_from[rank][-1]:
            assert use == CacheUse("some entry", use.self_check)
        elif found[rank]:
            assert use.entry_id is None
            assert use.problems[0].startswith(
                "everything is compiled, as another rank has no entry"
                if False in found
                else "captures are compiled anew: the self-check does not hold"
                if not holds[rank]
                else "captures are compiled anew: they do not compute the model on another rank"
            )


# ---- capture: listing, explaining, exporting, importing and pruning ----


EXPLAIN = ("explain", "--model", "tiny", "--device", "cpu")
CPU_PLAN = {"model": "tiny", "dtype": "float32", "compiled_rows": 8192 + 256}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptureStore:
    # Wide enough for a row of any table, so that lines can be looked for.
    monkeypatch.setenv("COLUMNS", "250")
    return CaptureStore(tmp_path / "captures")


@pytest.fixture
def foreign(store: CaptureStore) -> Entry:
    """An entry of another machine."""
    return build(store)


def here(**changed: str) -> dict[str, str]:
    return machine_components(torch.device("cpu")) | model_components(PRESETS["tiny"], "float32") | changed


def capture(store: CaptureStore, *arguments: str) -> Any:
    return run("capture", *arguments, "--cache-dir", str(store.root))


def page(store: CaptureStore, *arguments: str, exit_code: int = 0) -> Any:
    result = capture(store, *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_an_empty_store(store: CaptureStore) -> None:
    assert "There are no capture caches in" in capture(store, "list").stdout
    assert page(store, "list")["entries"] == []
    assert "everything has to be built" in capture(store, *EXPLAIN).stdout
    assert not store.root.exists()


def test_list_says_what_fits_and_what_is_damaged(store: CaptureStore, foreign: Entry) -> None:
    fitting, broken = build(store, here()), build(store, here(torch="0"))
    (broken.folder / MANIFEST_NAME).unlink()
    listed = page(store, "list")
    by_name = {entry["entry_id"]: entry for entry in listed["entries"]}
    assert by_name[fitting.entry_id]["differences"] == []
    assert "gpu" in [difference["component"] for difference in by_name[foreign.entry_id]["differences"]]
    assert [entry["entry_id"] for entry in listed["damaged"]] == [broken.entry_id]
    lines = capture(store, "list").stdout.splitlines()
    assert any(fitting.entry_id in line and "fits" in line and "today" in line for line in lines)
    assert any(foreign.entry_id in line and "llama-3.1-8b, bfloat16, NVIDIA H200" in line for line in lines)
    assert any(broken.entry_id in line and "damaged" in line for line in lines)


def test_list_shows_one_and_checks_its_files(store: CaptureStore, foreign: Entry) -> None:
    shown = page(store, "list", foreign.entry_id[:6])
    assert (shown["entry_id"], shown["problems"]) == (foreign.entry_id, [])
    assert {file["path"] for file in shown["files"]} == FILES.keys()
    text = capture(store, "list", foreign.entry_id).stdout
    for expected in ("flashinfer", "350.5 s", "580.159.04", "batch_sizes", "[1, 2, 4]", "as they were built"):
        assert expected in text
    flip_byte(foreign.files / PACKAGE)
    assert "another checksum" in capture(store, "list", foreign.entry_id).stdout


def test_imported_text_cannot_control_the_terminal(store: CaptureStore) -> None:
    entry = build(store, plan={"model": "\x1b[2J[bold]", "\x1b": 1, "note": "[red]x[/red]"})
    for arguments in (("list",), ("list", entry.entry_id), EXPLAIN):
        assert "\x1b" not in capture(store, *arguments).stdout
    assert "[red]x[/red]" in capture(store, "list", entry.entry_id).stdout


def test_explain_a_hit(store: CaptureStore) -> None:
    entry = build(store, here(), plan=CPU_PLAN)
    found = page(store, *EXPLAIN)
    assert (found["hit"], found["nearest"]) == (entry.entry_id, None)
    assert found["here"]["torch"] == torch.__version__
    text = capture(store, *EXPLAIN).stdout
    assert "It fits this machine and these settings; its files are checked at a start." in text
    assert "differs" not in text


def test_explain_a_miss_by_the_nearest_entry(store: CaptureStore, foreign: Entry) -> None:
    del foreign
    near = build(store, here(code="other"), plan=CPU_PLAN)
    found = page(store, *EXPLAIN, exit_code=1)
    assert found["hit"] is None
    assert (found["nearest"]["entry_id"], found["nearest"]["build_seconds"]) == (near.entry_id, 350.5)
    (difference,) = found["nearest"]["differences"]
    assert (difference["component"], difference["cached"]) == ("code", "other")
    text = capture(store, *EXPLAIN).stdout
    row = next(line for line in text.splitlines() if " code " in line)
    assert "other" in row
    assert "differs" in row
    assert "took 350.5 s" in text


def test_explain_compares_what_the_settings_capture(store: CaptureStore) -> None:
    entry = build(store, here(), plan=CPU_PLAN | {"compiled_rows": 2048 + 8})
    assert page(store, *EXPLAIN, "--max-num-seqs", "8", "--policy", "mixed:2048")["hit"] == entry.entry_id
    (difference,) = page(store, *EXPLAIN, "--policy", "mixed:2048", exit_code=1)["nearest"]["differences"]
    assert difference == {"component": "plan.compiled_rows", "cached": "2056", "here": "2304"}


def test_an_entry_travels_as_a_file(store: CaptureStore, foreign: Entry, tmp_path: Path) -> None:
    archive, fleet = tmp_path / "captures.tgz", CaptureStore(tmp_path / "fleet")
    exported = page(store, "export", foreign.entry_id[:4], str(archive))
    assert (exported["num_bytes"], exported["signed"]) == (archive.stat().st_size, False)
    assert "add --overwrite" in refused(capture(store, "export", foreign.entry_id, str(archive)))
    text = capture(fleet, "import", str(archive)).stdout
    for expected in ("is in the store", "Its origin was not checked", "does not fit this machine"):
        assert expected in text
    again = page(fleet, "import", str(archive))
    assert (again["is_new"], again["signature_checked"]) == (False, False)
    assert "cannot be used" in refused(capture(fleet, "import", str(archive), "--trusted-key", str(archive)))


def test_prune(store: CaptureStore, foreign: Entry) -> None:
    fitting = build(store, here())
    old = build(store, here(torch="0"))
    os.utime(old.folder / MANIFEST_NAME, (0, 0))
    (planned,) = page(store, "prune", "--unused-for", "8w", "--dry-run")
    assert planned["entry_id"] == old.entry_id
    assert "would remove" in capture(store, "prune", "--unused-for", "8w", "--dry-run").stdout
    assert f"removed {old.entry_id}" in capture(store, "prune", "--unused-for", "8w").stdout
    with store.open(foreign):
        told = capture(store, "prune", "--max-size", "1B").stdout
    assert f"kept {foreign.entry_id}" in told
    assert "in use by a running engine" in told
    assert f"removed {fitting.entry_id}" in told
    for more in (["--dry-run"], []):
        assert [each["entry_id"] for each in page(store, "prune", foreign.entry_id, *more)] == [foreign.entry_id]
    assert "nothing to remove" in capture(store, "prune", "--max-size", "1GiB").stdout
    assert store.entries() == ((), ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prune",), "say what to remove"),
        (("prune", "3f2a", "--max-size", "1GiB"), "say what to remove"),
        (("prune", "--unused-for", "soon"), "is no age: write 12h, 30d or 8w"),
        (("prune", "--max-size", "much"), "much"),
        (("list", "zzzz"), "has to begin with 'zzzz', but none does"),
        (("list", ""), "has to begin with ''"),
        (("export", "zzzz", "x.tgz"), "but none does"),
        (("import", "nonesuch.tgz"), "No such file"),
        (("explain", "--model", "gpt-9"), "unknown model"),
    ],
)
def test_bad_input_is_refused(store: CaptureStore, foreign: Entry, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(capture(store, *arguments))
    assert foreign.folder.is_dir()
