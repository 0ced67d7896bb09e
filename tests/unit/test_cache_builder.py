"""Builds: resumed after a kill at any moment, alone, and visible as a whole or not at all."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from caches import (
    FINGERPRINT,
    PARTS,
    PLAN,
    SCRIPT_FINGERPRINT,
    artifact_file,
    build_entry,
    flip_byte,
    quiet,
    start_builder,
)

from bullet_graph.captures.builder import open_build
from bullet_graph.captures.entry import ARTIFACTS_NAME, MANIFEST_NAME
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint
from bullet_graph.captures.store import CaptureStore
from bullet_graph.errors import CacheError

KIND = ArtifactKind.TRITON


@pytest.fixture
def store(tmp_path: Path) -> CaptureStore:
    return CaptureStore(tmp_path / "captures")


def staged(store: CaptureStore) -> Path:
    (folder,) = (path for path in store.staging.iterdir() if path.is_dir())
    return folder


def interrupted_build(store: CaptureStore) -> None:
    with open_build(store, FINGERPRINT, PLAN, tell=quiet) as build:
        build.add_bytes("a", KIND, b"aaa", path="x/a", build_seconds=1)
        build.add_bytes("b", KIND, b"bbb", path="x/b", build_seconds=2)


def test_an_entry_is_there_when_it_is_committed(store: CaptureStore) -> None:
    with open_build(store, FINGERPRINT, PLAN, tell=quiet) as build:
        assert build.entry is None
        build.add_bytes("a", KIND, b"aaa", path="x/a", build_seconds=1)
        assert "a" in build
        assert store.entries() == ((), ())
        entry = build.commit(self_check=None, provenance={})
        assert build.entry == entry
        with pytest.raises(CacheError, match="finished"):
            build.add_bytes("b", KIND, b"", path="b", build_seconds=1)
        with pytest.raises(CacheError, match="finished"):
            build.commit(self_check=None, provenance={})
    assert store.entries() == ((entry,), ())
    assert not list(store.staging.iterdir())


def test_a_finished_entry_is_not_built_again(store: CaptureStore) -> None:
    entry = build_entry(store)
    with open_build(store, FINGERPRINT, PLAN, tell=quiet) as build:
        assert build.entry == entry


def test_an_interrupted_build_goes_on(store: CaptureStore) -> None:
    interrupted_build(store)
    with open_build(store, FINGERPRINT, PLAN, tell=quiet) as build:
        assert build.resumed == ("a", "b")
        build.add_bytes("c", KIND, b"ccc", path="x/c", build_seconds=3)
        entry = build.commit(self_check=None, provenance={})
    assert [artifact.name for artifact in entry.manifest.artifacts] == ["a", "b", "c"]
    assert not entry.check()


def test_what_was_damaged_meanwhile_is_built_again_and_said(store: CaptureStore) -> None:
    interrupted_build(store)
    flip_byte(staged(store) / ARTIFACTS_NAME / "x" / "a")
    # Written, but not yet in the journal when the builder was killed.
    (staged(store) / ARTIFACTS_NAME / "x" / "c").write_bytes(b"cc")
    said: list[str] = []
    with open_build(store, FINGERPRINT, PLAN, tell=said.append) as build:
        assert build.resumed == ("b",)
        build.add_bytes("a", KIND, b"aaa", path="x/a", build_seconds=1)
        build.add_bytes("c", KIND, b"ccc", path="x/c", build_seconds=1)
        assert not build.commit(self_check=None, provenance={}).check()
    assert "building a of entry" in said[0]
    assert "checksum" in said[0]


@pytest.mark.parametrize("damage", ["torn", "flipped", "header", "missing", "version"])
def test_a_damaged_journal_costs_parts_and_nothing_else(store: CaptureStore, damage: str) -> None:
    interrupted_build(store)
    (journal,) = store.staging.glob("*.journal")
    data = journal.read_bytes()
    if damage == "torn":
        journal.write_bytes(data[:-20])
    elif damage == "flipped":
        flip_byte(journal, len(data) - 60)
    elif damage == "header":
        journal.write_bytes(b"\xff" + data)
    elif damage == "version":
        record = {"version": 99}
        lines = [json.dumps({"record": record, "checksum": "0" * 16}).encode(), *data.splitlines()[1:]]
        journal.write_bytes(b"\n".join(lines))
    else:
        journal.unlink()
    with open_build(store, FINGERPRINT, PLAN, tell=quiet) as build:
        assert build.resumed == (("a",) if damage in ("torn", "flipped") else ())
        for name in ("a", "b"):
            if name not in build:
                build.add_bytes(name, KIND, b"new", path=f"x/{name}", build_seconds=1)
        assert not build.commit(self_check=None, provenance={}).check()


def test_parts_of_a_damaged_entry_are_kept_and_the_rest_said(store: CaptureStore) -> None:
    entry = build_entry(store)
    flip_byte(artifact_file(entry, "triton/gemm"))
    said: list[str] = []
    with open_build(store, FINGERPRINT, PLAN, tell=said.append) as build:
        assert build.entry is None
        assert set(build.resumed) == PARTS.keys() - {"triton/gemm"}
        build.add_bytes(
            "triton/gemm", KIND, PARTS["triton/gemm"][1], path="triton/gemm.bin", build_seconds=20
        )
        rebuilt = build.commit(self_check=None, provenance={})
    assert "rebuilding parts of entry" in said[0]
    assert "gemm.bin has another checksum" in said[0]
    store.open(rebuilt).close()
    assert [entry.entry_id for entry in store.entries()[0]] == [entry.entry_id]


def test_an_entry_with_a_damaged_manifest_is_built_anew_and_said(store: CaptureStore) -> None:
    flip_byte(build_entry(store).folder / MANIFEST_NAME, 300)
    said: list[str] = []
    with open_build(store, FINGERPRINT, PLAN, tell=said.append) as build:
        assert build.resumed == ()
        build.add_bytes("a", KIND, b"aaa", path="a", build_seconds=1)
        rebuilt = build.commit(self_check=None, provenance={})
    assert "rebuilding entry" in said[0]
    store.open(rebuilt).close()


def test_what_another_entry_has_is_adopted_as_far_as_it_holds(store: CaptureStore) -> None:
    entry = build_entry(store)
    updated = Fingerprint.of({**FINGERPRINT.values, "code_kernels": "new", "code_graphs": "new"})
    with store.open(entry) as opened, open_build(store, updated, PLAN, tell=quiet) as build:
        assert build.adopt(opened) == ("flashinfer/prefill", "perf_table")
        assert build.adopt(opened) == ()
        adopted = build.commit(self_check=None, provenance={})
    assert artifact_file(adopted, "flashinfer/prefill").read_bytes() == PARTS["flashinfer/prefill"][1]
    assert [artifact.build_seconds for artifact in adopted.manifest.artifacts] == [90.0, 180.0]


def test_a_file_that_changes_while_it_is_adopted_is_not_taken(store: CaptureStore) -> None:
    entry = build_entry(store)
    updated = Fingerprint.of({**FINGERPRINT.values, "code_kernels": "new"})
    with store.open(entry) as opened, open_build(store, updated, PLAN, tell=quiet) as build:
        flip_byte(artifact_file(entry, "perf_table"))
        with pytest.raises(CacheError, match="changed while it was copied"):
            build.adopt(opened)
        assert "perf_table" not in build
        assert not build.commit(self_check=None, provenance={}).check()


def test_folders_and_files_are_copied(store: CaptureStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "one.so").write_bytes(b"1")
    (source / "two.json").write_bytes(b"22")
    with open_build(store, FINGERPRINT, PLAN, tell=quiet) as build:
        build.add_file("single", KIND, source / "two.json", path="single.json", build_seconds=0)
        build.add_folder("triton", KIND, source, path="triton", build_seconds=3)
        build.add_folder("triton", KIND, source, path="triton", build_seconds=3)
        entry = build.commit(self_check=None, provenance={})
    names = [artifact.name for artifact in entry.manifest.artifacts]
    assert names == ["single", "triton/deep/one.so", "triton/two.json"]
    assert entry.manifest.build_seconds({KIND}) == 3.0
    with store.open(entry) as opened:
        assert opened.path("triton/deep/one.so").read_bytes() == b"1"


def test_what_cannot_be_added(store: CaptureStore, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link").symlink_to("/etc/passwd")
    (tmp_path / "none").mkdir()
    with open_build(store, FINGERPRINT, PLAN, tell=quiet) as build:
        build.add_bytes("a", KIND, b"aaa", path="x/a", build_seconds=1)
        for name, path, message in (
            ("a", "other", "has an artifact 'a' already"),
            ("b", "x/a", "at x/a already"),
            ("b", "../b", "'..'"),
            ("b", "/b", "absolute"),
            ("", "b", "printable"),
            ("b", "x", "cannot add b"),
            ("b", "x/a/b", "cannot add b"),
        ):
            with pytest.raises(CacheError, match=message):
                build.add_bytes(name, KIND, b"bbb", path=path, build_seconds=1)
        with pytest.raises(CacheError, match="cannot add"):
            build.add_file("b", KIND, tmp_path / "nonesuch", path="b", build_seconds=1)
        with pytest.raises(CacheError, match="cannot add"):
            build.add_folder("b", KIND, tmp_path / "links", path="b", build_seconds=1)
        with pytest.raises(CacheError, match="no files"):
            build.add_folder("b", KIND, tmp_path / "none", path="b", build_seconds=1)
        entry = build.commit(self_check=None, provenance={})
    assert [artifact.name for artifact in entry.manifest.artifacts] == ["a"]
    assert not entry.check()


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = CaptureStore(tmp_path / "file")
    with (
        pytest.raises(CacheError, match="cannot build into"),
        open_build(store, FINGERPRINT, PLAN, tell=quiet),
    ):
        pass


def test_errors_of_the_builder_are_its_own(store: CaptureStore) -> None:
    with pytest.raises(FileNotFoundError), open_build(store, FINGERPRINT, PLAN, tell=quiet):
        raise FileNotFoundError("the caller's")


# Several processes

NUM_PARTS = 40


def lines(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.splitlines()


def assert_whole(store: CaptureStore) -> None:
    """Whatever happened, nothing that can be seen is broken."""
    entries, damaged = store.entries()
    assert not damaged
    for entry in entries:
        store.open(entry).close()


def test_a_killed_builder_leaves_a_whole_cache_or_none(store: CaptureStore) -> None:
    chance = random.Random(0)
    kills = 0
    for _ in range(8):
        process = start_builder(store.root, NUM_PARTS)
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 8)):
            process.stdout.readline()
        time.sleep(chance.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        kills += process.returncode == -signal.SIGKILL
        assert_whole(store)
        if store.get(SCRIPT_FINGERPRINT, {}) is not None:
            break
    assert kills > 0
    said = lines(start_builder(store.root, NUM_PARTS))
    assert said[-1] in ("committed", "finished")
    # The killed builders' lock does not block, and their parts are of use.
    assert not any("waiting" in line for line in said)
    assert sum(line.startswith("added") for line in said) < NUM_PARTS
    assert_whole(store)
    entry = store.get(SCRIPT_FINGERPRINT, {})
    assert entry is not None
    assert len(entry.manifest.artifacts) == NUM_PARTS
    assert not list(store.staging.iterdir())
    assert sorted(path.name for path in entry.folder.iterdir()) == [ARTIFACTS_NAME, MANIFEST_NAME]


def test_a_second_builder_waits_and_finds_it_finished(store: CaptureStore) -> None:
    processes = [start_builder(store.root, NUM_PARTS) for _ in range(3)]
    said = [lines(process) for process in processes]
    assert sum("committed" in lines for lines in said) == 1
    assert sum("finished" in lines for lines in said) == 2
    assert_whole(store)


def test_the_wait_is_told_with_who_builds(store: CaptureStore) -> None:
    with open_build(store, SCRIPT_FINGERPRINT, {}, tell=quiet):
        process = start_builder(store.root, 2)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        waiting = process.stdout.readline()
        assert f"is being built by process {os.getpid()} on" in waiting
        assert "waiting" in waiting
    assert lines(process)[-1] == "committed"
