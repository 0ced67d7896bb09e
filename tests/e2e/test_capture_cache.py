"""From `capture build` to an engine that compiles nothing, and what becomes of caches that are damaged or wrong."""

import gzip
import io
import json
import os
import shutil
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from built_captures import (
    OPTIONS,
    PROMPTS,
    QUICK_BUILD,
    SETTINGS,
    built,
    ended,
    engine_from,
    forget_compiled,
    only_entry,
    quickly,
    start_engine,
    start_process,
    store,
    tokens_of,
)
from caches import flip_byte
from cli_runner import refused, run

from bullet_graph import CaptureCacheWarning, ConfigError, Engine
from bullet_graph.captures.builder import open_build
from bullet_graph.captures.entry import ARTIFACTS_NAME, MANIFEST_NAME, Entry
from bullet_graph.captures.store import CaptureStore
from bullet_graph.graphs import aot
from bullet_graph.graphs.compiled import Half, LayerHalf
from bullet_graph.models.presets import PRESETS
from bullet_graph.runtime import fingerprint as runtime_fingerprint

# They build a capture cache, in processes of their own.
pytestmark = pytest.mark.timeout(300)

__all__ = ["built", "quickly", "store"]

HALF = "halves/cpu-8196/attention_output.pt2"


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What an engine that compiles nothing generates."""
    with Engine("tiny", device="cpu", **SETTINGS) as engine:
        assert engine.compiles.total == 0
        return tokens_of(engine)


def warned(store: CaptureStore, told: str, **settings: Any) -> Engine:
    """An engine whose start warns."""
    with pytest.warns(CaptureCacheWarning, match=told):
        return engine_from(store, **settings)


def artifact(entry: Entry, name: str) -> Path:
    return entry.folder / ARTIFACTS_NAME / name


def json_of(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_built_exported_wiped_imported_and_started(
    built: tuple[CaptureStore, Any], tmp_path: Path, expected: list[list[int]]
) -> None:
    origin, printed = built
    compiles = printed["compiles"]
    assert compiles["inductor"] == 2
    assert compiles["cpp"] >= 2
    assert compiles["dynamo_frames"] == 0, "it is exported, and not traced again"
    assert [(part["part"], part["num_files"]) for part in printed["parts"]] == [("torch_compile", 2)]
    assert printed["parts"][0]["build_seconds"] > 1
    assert printed["self_check"]["relative_error"].keys() == {"2", "4"}
    assert max(printed["self_check"]["relative_error"].values()) < printed["self_check"]["tolerance"] == 1e-4

    archive, travelled = tmp_path / "captures.tgz", CaptureStore(tmp_path / "fleet")
    json_of("capture", "export", printed["entry_id"], str(archive), "--cache-dir", str(origin.root))
    imported = json_of("capture", "import", str(archive), "--cache-dir", str(travelled.root))
    assert imported["differences"] == []
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
    del quickly
    with engine_from(store) as engine:
        assert engine.compiles.total == 0
        assert engine.cache_use.problems == ()
        assert {"capture cache", "self-check"} <= engine.start_report.seconds.keys()
        assert tokens_of(engine) == expected
    assert not [warning for warning in recwarn if warning.category is CaptureCacheWarning]
    # A second build has nothing to do.
    again = json_of("capture", "build", *OPTIONS, "--cache-dir", str(store.root))
    assert again["was_there"]


def damage_flipped(entry: Entry) -> None:
    flip_byte(artifact(entry, HALF), 1000)


def damage_truncated(entry: Entry) -> None:
    path = artifact(entry, HALF)
    path.write_bytes(path.read_bytes()[:-1])


def damage_missing(entry: Entry) -> None:
    artifact(entry, HALF).unlink()


def damage_additional(entry: Entry) -> None:
    (artifact(entry, "halves") / "more.py").write_text("raise SystemExit")


def damage_manifest(entry: Entry) -> None:
    flip_byte(entry.folder / MANIFEST_NAME, 40)


def damage_gone(entry: Entry) -> None:
    shutil.rmtree(entry.folder)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damage_flipped, r"attention_output\.pt2 has another checksum"),
        (damage_truncated, r"attention_output\.pt2 has \d+ bytes instead of"),
        (damage_missing, r"attention_output\.pt2 is missing"),
        (damage_additional, r"more\.py is not listed"),
        (damage_manifest, "has no captures for this engine, but "),
        (damage_gone, "has no captures: build it with `bullet-graph capture build`"),
    ],
)
def test_a_damaged_cache_is_not_used(
    store: CaptureStore, quickly: list[str], damage: Any, told: str, expected: list[list[int]]
) -> None:
    del quickly
    damage(only_entry(store))
    with warned(store, told) as engine:
        assert engine.compiles.dynamo_frames == 2, "compiled after all"
        assert engine.cache_use.entry_id is None
        assert tokens_of(engine) == expected


def test_a_cache_of_another_version(
    store: CaptureStore, quickly: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del quickly
    components = runtime_fingerprint.machine_components

    def newer(device: Any) -> dict[str, str]:
        return components(device) | {"torch": "99.0"}

    monkeypatch.setattr(runtime_fingerprint, "machine_components", newer)
    with warned(store, r"torch is 99\.0 here, 2\.") as engine:
        assert engine.compiles.dynamo_frames == 2


def test_a_cache_for_another_plan(store: CaptureStore, quickly: list[str]) -> None:
    del quickly
    told = r"plan\.compiled_rows is 8195 here, 8196 there"
    with warned(store, told, max_num_seqs=3) as engine:
        assert engine.compiles.dynamo_frames == 2


def test_a_damaged_part_alone_is_built_again(store: CaptureStore, quickly: list[str]) -> None:
    damage_flipped(only_entry(store))
    result = run("capture", "build", *OPTIONS, "--cache-dir", str(store.root), "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert "another checksum" in result.stderr
    assert HALF not in printed["resumed"]
    assert HALF.replace("output", "input") in printed["resumed"]
    assert quickly == ["attention_output"]
    assert only_entry(store).check() == ()


def plant(store: CaptureStore, data: bytes) -> Entry:
    """Put another half into the entry, with a right checksum."""
    entry = only_entry(store)
    kept = [(a, artifact(entry, a.path).read_bytes()) for a in entry.manifest.artifacts]
    store.remove(entry.entry_id)
    manifest = entry.manifest
    with open_build(store, manifest.fingerprint, manifest.plan, tell=print) as build:
        for found, content in kept:
            planted = data if found.name == HALF else content
            build.add_bytes(found.name, found.kind, planted, path=found.path, build_seconds=1.0)
        return build.commit(self_check=manifest.self_check, provenance=manifest.provenance)


def wrong_half(entry: Entry) -> bytes:
    """The layer's second half, with another epsilon in its machine code."""
    epsilon, wrong = (struct.pack("<f", value) for value in (PRESETS["tiny"].rms_norm_eps, 1.0))
    package = io.BytesIO()
    with zipfile.ZipFile(artifact(entry, HALF)) as right, zipfile.ZipFile(package, "w") as edited:
        (library,) = (name for name in right.namelist() if name.endswith(".so"))
        assert right.read(library).count(epsilon) == 1
        for name in right.namelist():
            data = right.read(name)
            edited.writestr(name, data.replace(epsilon, wrong) if name == library else data)
    return package.getvalue()


def test_a_wrong_half_is_found_by_the_self_check(
    store: CaptureStore, quickly: list[str], expected: list[list[int]]
) -> None:
    plant(store, wrong_half(only_entry(store)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureCacheWarning)
        with engine_from(store, self_check="off") as engine:
            assert engine.cache_use.self_check == ()
    told = r"self-check does not hold: batch size 2: relative error 0\.\d+, tolerance 0\.0001; batch size 4"
    with warned(store, told) as engine:
        assert engine.compiles.dynamo_frames == 2, "both halves are compiled anew"
        assert not all(point.holds for point in engine.cache_use.self_check)
        assert tokens_of(engine) == expected

    # It is marked: no start believes it again, whoever asks is told why, and a build makes the part anew.
    warned(store, "self-check does not hold", self_check="off").shutdown()
    entry = only_entry(store)
    listed = json_of("capture", "list", "--cache-dir", str(store.root))["entries"]
    assert "self-check does not hold" in listed[0]["rejected"]
    assert "rejected" in run("capture", "list", "--cache-dir", str(store.root)).stdout
    explained = run(
        "capture", "explain", "--model", "tiny", "--device", "cpu", "--cache-dir", str(store.root)
    )
    assert explained.exit_code == 1
    assert "self_check" in explained.stdout
    archive = store.root.parent / "wrong.tgz"
    command = ("capture", "export", entry.entry_id, str(archive), "--cache-dir", str(store.root))
    assert "was rejected" in refused(run(*command))
    result = run("capture", "build", *OPTIONS, "--cache-dir", str(store.root), "--json")
    assert "rebuilding parts" in result.stderr
    assert quickly == ["attention_input", "attention_output"]
    with engine_from(store) as engine:
        assert (engine.compiles.dynamo_frames, engine.cache_use.problems) == (0, ())


def test_a_half_that_cannot_be_loaded(
    store: CaptureStore, quickly: list[str], expected: list[list[int]]
) -> None:
    del quickly
    plant(store, b"not a package at all")
    with warned(store, r"attention_output\.pt2 cannot be loaded") as engine:
        assert engine.compiles.dynamo_frames == 1
        assert tokens_of(engine) == expected
    assert only_entry(store).rejection is not None


def test_a_wrong_half_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(half: LayerHalf) -> tuple[Half, bytes]:
        def times_1_01(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            x, residual = half.function(*arguments)
            return x * 1.01, residual

        return times_1_01, b"its package"

    monkeypatch.setattr(aot, "compile_ahead", wrong)
    told = refused(run("capture", "build", *OPTIONS, "--cache-dir", str(tmp_path), "--json"))
    assert "does not compute the model" in told
    assert "batch size 2" in told
    assert CaptureStore(tmp_path).entries() == ((), ())


def test_a_half_that_cannot_be_compiled_ahead(
    tmp_path: Path, quickly: list[str], monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    compile_ahead = aot.compile_ahead

    def only_the_first(half: LayerHalf) -> tuple[Half, bytes]:
        if half.name == "attention_input":
            return compile_ahead(half)
        inductor = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        (inductor / "what_it_kept").write_text("graph")
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(aot, "compile_ahead", only_the_first)
    with pytest.warns(CaptureCacheWarning, match="each start will trace it: no C"):
        result = run("capture", "build", *OPTIONS, "--cache-dir", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    assert quickly == ["attention_input"]
    assert json.loads(result.stdout)["compiles"]["dynamo_frames"] == 1
    store = CaptureStore(tmp_path)
    kept = {found.name for found in only_entry(store).manifest.artifacts}
    assert kept == {HALF.replace("output", "input"), "inductor/what_it_kept"}
    forget_compiled()
    with warned(store, r"attention_output\.pt2 is not in the cache of captures: torch traces it") as engine:
        assert engine.compiles.dynamo_frames == 1
        assert tokens_of(engine) == expected


def test_a_killed_builder_and_two_at_once(built: tuple[CaptureStore, Any], tmp_path: Path) -> None:
    root, libraries, compiled = tmp_path / "store", tmp_path / "libraries", tmp_path / "compiled"
    build = ("capture", "build", *OPTIONS, "--json", "--cache-dir", str(root))
    arguments = (str(built[0].root), str(compiled), *build)
    ended(start_process(libraries, QUICK_BUILD, "killed", *arguments), exit_code=-9)
    assert CaptureStore(root).entries() == ((), ())
    both = [start_process(libraries, QUICK_BUILD, "whole", *arguments) for _ in range(2)]
    (first, first_err), (second, second_err) = (ended(process) for process in both)
    builder, waiter = (first, second) if second["was_there"] else (second, first)
    assert builder["entry_id"] == waiter["entry_id"]
    assert (builder["was_there"], waiter["was_there"]) == (False, True)
    assert builder["resumed"] == [HALF.replace("output", "input")]
    assert sorted(compiled.read_text().splitlines()) == ["", "attention_output"]
    # Unless it came only afterwards.
    told = second_err if second["was_there"] else first_err
    assert "waiting for that to end" in told or told == ""
    assert only_entry(CaptureStore(root)).check() == ()


def test_an_archive_with_a_path_that_leads_out(store: CaptureStore, tmp_path: Path) -> None:
    archive, target = tmp_path / "captures.tgz", tmp_path / "a" / "b" / "store"
    json_of("capture", "export", only_entry(store).entry_id, str(archive), "--cache-dir", str(store.root))
    tar = bytearray(gzip.decompress(archive.read_bytes()))
    # The second member's header: the manifest's content is padded to blocks of 512 bytes.
    size = int(tar[124:135], 8)
    header = 512 + -(-size // 512) * 512
    tar[header : header + 100] = b"../../../evil".ljust(100, b"\0")
    tar[header + 148 : header + 156] = b" " * 8
    tar[header + 148 : header + 156] = b"%06o\0 " % sum(tar[header : header + 512])
    archive.write_bytes(gzip.compress(bytes(tar)))
    refused(run("capture", "import", str(archive), "--cache-dir", str(target), "--json"))
    assert CaptureStore(target).entries() == ((), ())
    assert not list(tmp_path.rglob("evil"))


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"on the CPU nothing is: pass compile=True"):
        Engine("tiny", device="cpu", capture_cache=tmp_path)
    with pytest.raises(ConfigError, match="self_check must be one of off, sample, all"):
        Engine("tiny", device="cpu", self_check="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="capture_cache must be a folder"):
        Engine("tiny", device="cpu", capture_cache="")
    told = refused(
        run("generate", "--model", "tiny", "--device", "cpu", "--prompt", "1", "--capture-cache", "auto")
    )
    assert "--compile" in told


def test_the_environment_is_left_as_it_was(store: CaptureStore, quickly: list[str]) -> None:
    del quickly
    before = dict(os.environ)
    with engine_from(store) as engine:
        assert len(tokens_of(engine)) == len(PROMPTS)
    assert dict(os.environ) == before
