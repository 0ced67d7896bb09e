"""Capture caches, end to end on the CPU: a start from one compiles nothing, and nothing wrong is believed."""

import io
import json
import os
import shutil
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import flip_byte
from capture_processes import GREEDY, PROMPTS, START
from cli_runner import parsed, refused, run
from filelock import FileLock
from programs import json_printed_by

from bullet_graph import CaptureCacheWarning, ConfigError, Engine
from bullet_graph.captures.manifest import list_files
from bullet_graph.captures.store import MANIFEST_NAME, CaptureStore, Entry
from bullet_graph.graphs.compile_counts import CompileCounts
from bullet_graph.graphs.compiled import CompiledPart, LayerPart, load_package
from bullet_graph.models.presets import PRESETS
from bullet_graph.runtime import capture_cache
from bullet_graph.runtime import fingerprint as runtime_fingerprint

# They build a capture cache, in processes of their own.
pytestmark = pytest.mark.timeout(300)

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_bytes": 4 * 2**20}
OPTIONS = (
    *("--model", "tiny", "--device", "cpu", "--max-num-seqs", "4", "--max-model-len", "256"),
    *("--kv-cache-bytes", "4MiB"),
)
PACKAGE = "layers/attention_output.pt2"


def environment(libraries: Path) -> dict[str, str]:
    """Of a process whose compilers keep their caches in a folder of its own."""
    return os.environ | {
        "PYTHONPATH": f"{Path(sys.modules['bullet_graph'].__path__[0]).parent}{os.pathsep}{Path(__file__).parents[1]}",
        # Scalar code: to find the processor's vector instructions takes Inductor longer than all the rest.
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(libraries / "inductor"),
        "TRITON_CACHE_DIR": str(libraries / "triton"),
    }


def start_engine(libraries: Path, **settings: Any) -> Any:
    """Start an engine in a process of its own and let it serve."""
    chosen = {"model": "tiny", "device": "cpu", "compile": True, **SETTINGS, **settings}
    arguments = ("-c", START, json.dumps(chosen), json.dumps(PROMPTS))
    return json_printed_by(*arguments, environment=environment(libraries))


def engine_from(store: CaptureStore, **settings: Any) -> Engine:
    """An engine in this process that starts from a store."""
    return Engine("tiny", device="cpu", compile=True, capture_cache=store.root, **SETTINGS | settings)


def tokens_of(engine: Engine) -> list[list[int]]:
    """What it generates."""
    return [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]


def only_entry(store: CaptureStore) -> Entry:
    """The one that is there."""
    (entry,), damaged = store.entries()
    assert not damaged
    return entry


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[CaptureStore, Any]:
    """A store with one entry, and what the build printed; read it only. Shared with the other processes of pytest."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built_captures"
    shared.mkdir(exist_ok=True)
    printed = shared / "printed.json"
    with FileLock(shared / "lock"):
        if not printed.exists():
            arguments = ("capture", "build", *OPTIONS, "--json", "--cache-dir", str(shared / "store"))
            told = json_printed_by("-m", "bullet_graph", *arguments, environment=environment(shared / "libraries"))
            printed.write_text(json.dumps(told))
    return CaptureStore(shared / "store"), json.loads(printed.read_text())


@pytest.fixture
def store(built: tuple[CaptureStore, Any], tmp_path: Path) -> CaptureStore:
    """A copy of that store, to be damaged."""
    shutil.copytree(built[0].root, tmp_path / "store")
    return CaptureStore(tmp_path / "store")


@pytest.fixture
def quickly(built: tuple[CaptureStore, Any]) -> Iterator[list[str]]:
    """Compiles without Inductor, and takes the built store's package for a part compiled ahead; yields their names."""
    compile_part = torch.compile
    ahead: list[str] = []

    def compiled(part: Any, **settings: Any) -> Any:
        return compile_part(part, backend="eager", **settings)

    def compiled_ahead(part: LayerPart, package: Path) -> CompiledPart:
        shutil.copyfile(only_entry(built[0]).files / "layers" / f"{part.name}.pt2", package)
        ahead.append(part.name)
        return load_package(package, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compiled)
        patch.setattr(capture_cache, "compile_ahead", compiled_ahead)
        _forget_compiled()
        yield ahead
    _forget_compiled()


def _forget_compiled() -> None:
    """Drop Dynamo's state where Dynamo is imported, which takes seconds."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What an engine that compiles nothing generates."""
    with Engine("tiny", device="cpu", **SETTINGS) as engine:
        assert engine.compiles == CompileCounts()
        return tokens_of(engine)


def warned(store: CaptureStore, told: str, **settings: Any) -> Engine:
    """An engine whose start warns."""
    with pytest.warns(CaptureCacheWarning, match=told):
        return engine_from(store, **settings)


def json_of(*arguments: str) -> dict[str, Any]:
    return parsed(run(*arguments, "--json"))


def test_built_exported_wiped_imported_and_started(
    built: tuple[CaptureStore, Any], tmp_path: Path, expected: list[list[int]]
) -> None:
    origin, printed = built
    compiles = printed["compiles"]
    assert compiles["inductor"] == 2
    assert compiles["cpp"] >= 2
    assert compiles["dynamo_frames"] == 0, "it is exported, and not traced again"
    assert [(part["part"], part["num_files"]) for part in printed["parts"]] == [("layers", 2)]
    assert printed["self_check"]["relative_error"].keys() == {"2", "4"}
    assert max(printed["self_check"]["relative_error"].values()) < printed["self_check"]["tolerance"] == 1e-4

    archive, travelled = tmp_path / "captures.tgz", CaptureStore(tmp_path / "fleet")
    json_of("capture", "export", printed["entry_id"], str(archive), "--cache-dir", str(origin.root))
    assert json_of("capture", "import", str(archive), "--cache-dir", str(travelled.root))["differences"] == []
    archive.unlink()

    libraries = tmp_path / "libraries"
    found = start_engine(libraries, capture_cache=str(travelled.root), self_check="all")
    assert set(found["start"].values()) == {0}
    assert set(found["serving"].values()) == {0}
    assert found["use"]["entry_id"] == printed["entry_id"]
    assert found["use"]["problems"] == []
    assert [point["batch_size"] for point in found["use"]["self_check"]] == [2, 4]
    assert found["tokens"] == expected
    assert found["compilers"] == [], "to import them takes most of a start"
    left = [path for path in libraries.rglob("*") if path.is_file()]
    assert left == [], "nothing is left in the libraries' own folders"


def test_in_this_process(
    store: CaptureStore, quickly: list[str], recwarn: pytest.WarningsRecorder, expected: list[list[int]]
) -> None:
    before = dict(os.environ)
    with engine_from(store) as engine:
        assert engine.compiles == CompileCounts()
        assert engine.cache_use.problems == ()
        assert {"capture cache", "self-check"} <= engine.start_report.seconds.keys()
        assert tokens_of(engine) == expected
        in_use = run("capture", "prune", only_entry(store).entry_id, "--cache-dir", str(store.root))
        assert in_use.exit_code == 0, "a started engine has loaded all of it"
    assert dict(os.environ) == before
    assert not [warning for warning in recwarn if warning.category is CaptureCacheWarning]
    assert quickly == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda entry: flip_byte(entry.files / PACKAGE, 1000), r"attention_output\.pt2 has another checksum"),
        (lambda entry: flip_byte(entry.folder / MANIFEST_NAME, 40), "has no entry for this engine, but "),
        (lambda entry: shutil.rmtree(entry.folder), "no entries: build it with `bullet-graph capture build`"),
    ],
)
def test_a_damaged_cache_is_not_used_until_it_is_built_again(
    store: CaptureStore, quickly: list[str], damage: Any, told: str, expected: list[list[int]]
) -> None:
    damage(only_entry(store))
    with warned(store, told) as engine:
        assert engine.compiles.dynamo_frames == 2, "compiled after all"
        assert engine.cache_use.entry_id is None
        assert tokens_of(engine) == expected
    if told.startswith("attention"):
        assert not json_of("capture", "build", *OPTIONS, "--cache-dir", str(store.root))["was_there"]
        assert quickly == ["attention_input", "attention_output"]
        assert json_of("capture", "build", *OPTIONS, "--cache-dir", str(store.root))["was_there"]
        assert only_entry(store).problems() == ()


def test_another_version_or_plan(store: CaptureStore, quickly: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    del quickly
    store.root.chmod(0o777)
    with warned(store, "every user can write") as engine:
        assert engine.compiles.dynamo_frames == 2
    store.root.chmod(0o700)
    warned(store, r"plan\.compiled_rows is 8195 here, 8196 there", max_num_seqs=3).shutdown()
    components = runtime_fingerprint.machine_components

    def newer(device: Any) -> dict[str, str]:
        return components(device) | {"torch": "99.0"}

    monkeypatch.setattr(runtime_fingerprint, "machine_components", newer)
    warned(store, r"torch is 99\.0 here, 2\.").shutdown()


def plant(store: CaptureStore, package: bytes) -> None:
    """Put another package into the entry, with a right checksum."""
    entry = only_entry(store)
    with store.building(entry.entry_id, tell=print) as staged:
        shutil.copytree(entry.files, staged / "files", dirs_exist_ok=True)
        (staged / "files" / PACKAGE).write_bytes(package)
        store.place(replace(entry.manifest, files=list_files(staged / "files")), staged)


def wrong_package(entry: Entry) -> bytes:
    """The layer's second part, with another epsilon in its machine code."""
    epsilon, wrong = (struct.pack("<f", value) for value in (PRESETS["tiny"].rms_norm_eps, 1.0))
    package = io.BytesIO()
    with zipfile.ZipFile(entry.files / PACKAGE) as right, zipfile.ZipFile(package, "w") as edited:
        (library,) = (name for name in right.namelist() if name.endswith(".so"))
        assert right.read(library).count(epsilon) == 1
        for name in right.namelist():
            data = right.read(name)
            edited.writestr(name, data.replace(epsilon, wrong) if name == library else data)
    return package.getvalue()


def test_the_self_check_finds_a_wrong_part(store: CaptureStore, quickly: list[str], expected: list[list[int]]) -> None:
    plant(store, wrong_package(only_entry(store)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureCacheWarning)
        with engine_from(store, self_check="off") as engine:
            assert engine.cache_use.self_check == ()
    told = r"self-check does not hold: batch size 2: relative error 0\.\d+, tolerance 0\.0001; batch size 4"
    with warned(store, told) as engine:
        assert engine.compiles.dynamo_frames == 2, "both parts are compiled anew"
        assert not all(point.holds for point in engine.cache_use.self_check)
        assert tokens_of(engine) == expected

    # It is marked: no start believes it again, whoever asks is told why, and a build makes it anew.
    warned(store, "self-check does not hold", self_check="off").shutdown()
    cache_dir = ("--cache-dir", str(store.root))
    assert "self-check does not hold" in json_of("capture", "list", *cache_dir)["entries"][0]["rejected"]
    assert "rejected" in run("capture", "list", *cache_dir).stdout
    explained = run("capture", "explain", *OPTIONS, *cache_dir)
    assert explained.exit_code == 1
    assert "self_check" in explained.stdout
    archive = str(store.root.parent / "wrong.tgz")
    assert "was rejected" in refused(run("capture", "export", only_entry(store).entry_id, archive, *cache_dir))
    assert not json_of("capture", "build", *OPTIONS, *cache_dir)["was_there"]
    assert quickly == ["attention_input", "attention_output"]
    with engine_from(store) as engine:
        assert (engine.compiles.dynamo_frames, engine.cache_use.problems) == (0, ())


def test_a_part_that_cannot_be_loaded(store: CaptureStore, quickly: list[str], expected: list[list[int]]) -> None:
    del quickly
    plant(store, b"not a package at all")
    with warned(store, r"attention_output\.pt2 cannot be loaded") as engine:
        assert engine.compiles.dynamo_frames == 1
        assert tokens_of(engine) == expected
    assert only_entry(store).rejection is not None


def test_a_wrong_part_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(part: LayerPart, package: Path) -> CompiledPart:
        def times_1_01(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            x, residual = part.function(*arguments)
            return x * 1.01, residual

        package.write_bytes(b"its package")
        return times_1_01

    monkeypatch.setattr(capture_cache, "compile_ahead", wrong)
    told = refused(run("capture", "build", *OPTIONS, "--cache-dir", str(tmp_path), "--json"))
    assert "does not compute the model" in told
    assert "batch size 2" in told
    assert CaptureStore(tmp_path).entries() == ((), ())
    assert not list((tmp_path / "staging").iterdir())


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"on the CPU nothing is: pass compile=True"):
        Engine("tiny", device="cpu", capture_cache=tmp_path)
    told = refused(run("generate", "--model", "tiny", "--device", "cpu", "--prompt", "1", "--capture-cache", "auto"))
    assert "--compile" in told
