"""The store of capture caches: manifests, damage, use and removal, builders at the same time."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from caches import FILES, FINGERPRINT, PACKAGE, PLAN, build, flip_byte, quiet
from examples import few
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.captures import store as store_module
from bullet_graph.captures.manifest import Manifest, StoredFile, digest, entry_id
from bullet_graph.captures.store import FILES_NAME, MANIFEST_NAME, CaptureStore, Entry, Lookup, Pruned, default_root
from bullet_graph.errors import CacheError

BUILDER = """
import sys
from pathlib import Path
from caches import FINGERPRINT, PLAN, placed
from bullet_graph.captures.manifest import entry_id
from bullet_graph.captures.store import CaptureStore
store, name = CaptureStore(Path(sys.argv[1])), entry_id(FINGERPRINT, PLAN)
assert "torch" not in sys.modules
say = lambda line: print(line, flush=True)
with store.building(name, tell=say) as staged:
    if store.whole(name):
        say("found")
    else:
        (staged / "files" / "half").write_text("half")
        say("building")
        sys.stdin.readline()
        (staged / "files" / "half").rename(staged / "files" / "whole")
        placed(store, staged)
        say("built")
"""


@pytest.fixture
def store(tmp_path: Path) -> CaptureStore:
    return CaptureStore(tmp_path / "captures")


@pytest.fixture
def entry(store: CaptureStore) -> Entry:
    return build(store)


def changed(**components: str) -> dict[str, str]:
    return {**FINGERPRINT, **components}


# ---- manifests ----

FILE = {"path": "a/b", "num_bytes": 3, "sha256": "0" * 64}


def content(**changes: Any) -> bytes:
    """A manifest's text with some entries changed, or without those that are None."""
    good = {
        "format": "bullet_graph capture cache",
        "version": 2,
        "fingerprint": {"device": "cpu"},
        "plan": {"rows": 3},
        "files": [FILE],
        "self_check": {},
        "created_utc": "2026-11-22T12:00:00+00:00",
        "build_seconds": 1.5,
        "provenance": {},
    }
    return json.dumps({key: value for key, value in (good | changes).items() if value is not None}).encode()


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = Manifest.parse(content(), "m")
    assert Manifest.parse(manifest.to_bytes(), "m") == manifest
    assert (manifest.num_bytes, manifest.entry_id) == (3, entry_id({"device": "cpu"}, {"rows": 3}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b"[" * 100_000, "damaged"),
        (content()[:-9], "damaged"),
        (content(version=1), "found ('bullet_graph capture cache', 1)"),
        (content(plan=None), "plan: Field required"),
        (content(surprise=1), "surprise"),
        (content(plan=[]), "plan: Input should be a valid dictionary, found []"),
        (content(self_check=1), "self_check: Input should be a valid dictionary"),
        (content(fingerprint={"device": 1}), "fingerprint.device: Input should be a valid string"),
        (content(fingerprint={"device": "\x1b[2J"}), "printable text is required"),
        (content(fingerprint={"\x1b[2J": "1"}), "printable text is required"),
        (content(created_utc="\x1b"), "printable text is required"),
        (content(build_seconds="1"), "build_seconds: Input should be a valid number"),
        (content().replace(b"1.5", b"1e999"), "damaged"),
        (content(plan={"rows": float("nan")}), "damaged"),
        (content(files=[FILE | {"num_bytes": "3"}]), "files.0.num_bytes: Input should be a valid integer"),
        (content(files=[FILE | {"num_bytes": -1}]), "files.0.num_bytes: Input should be greater"),
        (content(files=[FILE | {"\x1b": 3}]), "files.0.?: Unexpected keyword argument"),
        (content(files=[FILE | {"path": 3}]), "files.0.path: Input should be a valid string"),
        (content(files=7), "files: Input should be a valid tuple"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CacheError) as refused:
        Manifest.parse(data, "m.json")
    assert str(refused.value).startswith("m.json cannot be used: ")
    assert message in str(refused.value)
    assert str(refused.value).isprintable()


@given(st.text(alphabet="ab./\\ \0\n\ud800~", max_size=6))
@few(80)
@pytest.mark.parametrize("start", ["", "/etc/", "../", "a/../../", "a//", "./", "a/./", "a/"])
def test_an_accepted_path_stays_in_its_folder_and_can_be_printed(start: str, end: str) -> None:
    path = start + end
    with suppress(CacheError):
        StoredFile(path, 0, "0" * 64)
        # As it is written: nothing is left out, and nothing leads out.
        assert os.path.normpath(f"/cache/files/{path}") == f"/cache/files/{path}"
        assert "\\" not in path
        assert path.isprintable()


def test_differences_are_told_by_component(entry: Entry) -> None:
    manifest = entry.manifest
    assert manifest.differences(dict(reversed(FINGERPRINT.items())), PLAN) == ()
    here = changed(torch="3") | {"new": "1"}
    del here["driver"]
    assert [(d.component, d.cached, d.here) for d in manifest.differences(here, {**PLAN, "batch_sizes": [1]})] == [
        ("torch", "2.13.0", "3"),
        ("new", None, "1"),
        ("plan.batch_sizes", "[1, 2, 4]", "[1]"),
        ("driver", "580.159.04", None),
    ]
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1})


# ---- finding and damage ----


def test_a_store_that_does_not_exist_is_empty_and_stays_so(store: CaptureStore) -> None:
    assert store.find(FINGERPRINT, PLAN) == Lookup(None, (), ())
    assert not store.root.exists()
    assert default_root().name == "captures"


def test_what_was_built_is_found_and_handed_out(store: CaptureStore, entry: Entry) -> None:
    assert store.find(FINGERPRINT, PLAN).hit == entry
    os.utime(entry.folder / MANIFEST_NAME, (0, 0))
    with store.open(entry) as opened:
        for path, data in FILES.items():
            assert (opened.files / path).read_bytes() == data
    assert datetime.now(UTC) - store.read(entry.entry_id).last_used < timedelta(minutes=1)
    assert entry.folder.stat().st_mode & 0o077 == 0, "its owner's alone"


def test_the_nearest_entry_comes_first_and_any_plan_will_do(store: CaptureStore) -> None:
    near, _far = build(store), build(store, changed(gpu="other", torch="1"))
    lookup = store.find(changed(code="dddd"), PLAN)
    assert lookup.hit is None
    assert (lookup.nearest, [found.component for found in lookup.differences]) == (near, ["code"])
    assert store.find(FINGERPRINT, {}).hit is None
    assert store.find(FINGERPRINT, None).hit == near


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, "attention_input.pt2 has another checksum"),
        (lambda path: os.truncate(path, 100), "attention_input.pt2 has 100 bytes instead of 280000"),
        (Path.unlink, "attention_input.pt2 is missing"),
        # The very same content: only that it is a link is wrong.
        (lambda path: path.symlink_to(path.rename(path.parents[4] / "secret")), "attention_input.pt2 cannot be read"),
        (_pipe, "attention_input.pt2 cannot be read"),
        (lambda path: path.parent.symlink_to(path.parent.rename(path.parents[4] / "moved")), "'layers' is not listed"),
        (lambda path: (path.parent / "evil.py").write_text("x"), "'layers/evil.py' is not listed"),
        (lambda path: (path.parent / "evil").symlink_to("/etc"), "'layers/evil' is not listed"),
    ],
)
def test_a_damaged_entry_is_not_opened(
    store: CaptureStore, entry: Entry, damage: Callable[[Path], object], message: str
) -> None:
    damage(entry.files / PACKAGE)
    with pytest.raises(CacheError, match=message), store.open(entry):
        pass
    assert store.whole(entry.entry_id) is None
    # The lock is gone: it can be removed.
    store.remove(entry.entry_id)


def _replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 300), "it is damaged"),
        (partial(_replace, old='"version": 2', new='"version": 3'), "version 2 is required"),
        (Path.unlink, "cannot be read, or has no manifest"),
        (lambda path: path.symlink_to(path.rename(path.parents[2] / "secret")), "cannot be read"),
        (partial(_replace, old="580.159.04", new="581"), "the manifest of entry"),
    ],
)
def test_a_damaged_manifest_is_told_and_never_a_hit(
    store: CaptureStore, entry: Entry, damage: Callable[[Path], object], message: str
) -> None:
    damage(entry.folder / MANIFEST_NAME)
    lookup = store.find(FINGERPRINT, PLAN)
    assert (lookup.hit, lookup.nearest) == (None, None)
    (damaged,) = lookup.damaged
    assert damaged.entry_id == entry.entry_id
    assert message in damaged.problem
    with pytest.raises(CacheError), store.open(entry):
        pass
    store.remove(entry.entry_id)
    assert store.entries() == ((), ())


def test_a_rejected_entry_is_no_hit_until_it_is_built_again(store: CaptureStore, entry: Entry) -> None:
    assert store.reject(entry, "logits are off\x1b")
    lookup = store.find(FINGERPRINT, PLAN)
    assert lookup.hit is None
    assert [(d.component, d.cached) for d in lookup.differences] == [("self_check", "logits are off?")]
    with pytest.raises(CacheError, match="it was rejected: logits are off"), store.open(entry):
        pass
    build(store)
    assert store.find(FINGERPRINT, PLAN).hit is not None


@pytest.mark.parametrize("folder", [".", "entries"])
def test_a_store_of_others_is_not_trusted(
    store: CaptureStore, entry: Entry, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del entry
    store.require_trusted()
    CaptureStore(store.root / "none").require_trusted()
    (store.root / folder).chmod(0o777)
    with pytest.raises(CacheError, match=r"every user can write .* chmod o-w"):
        store.require_trusted()
    (store.root / folder).chmod(0o770)
    store.require_trusted()
    monkeypatch.setattr(Path, "stat", lambda _: os.stat_result((0o40700, 0, 0, 1, 12345, 0, 0, 0, 0, 0)))
    with pytest.raises(CacheError, match=r"must belong to this user or root, .* to user 12345: chown"):
        store.require_trusted()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    store.require_trusted()
    monkeypatch.setattr(Path, "stat", lambda _: os.stat_result((0o40755, *[0] * 9)))
    store.require_trusted()


def test_what_was_checked_is_what_is_loaded(store: CaptureStore, entry: Entry, tmp_path: Path) -> None:
    with store.open(entry, copy_to=tmp_path / "copy") as opened:
        for path in FILES:
            (entry.files / path).write_bytes(b"replaced after the check")
        assert {path: (opened.files / path).read_bytes() for path in FILES} == FILES
    with pytest.raises(CacheError, match="is damaged"), store.open(entry, copy_to=tmp_path / "other"):
        pass


def test_a_store_that_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "entries").write_text("no folder")
    with pytest.raises(CacheError, match="cannot list"):
        CaptureStore(tmp_path).entries()


# ---- use, removal, builders ----


def test_an_entry_in_use_stays(store: CaptureStore, entry: Entry) -> None:
    with store.open(entry), store.open(entry):
        with pytest.raises(CacheError, match="in use"):
            store.remove(entry.entry_id)
        with pytest.raises(CacheError, match="in use"):
            build(store)
    store.remove(entry.entry_id)
    assert not entry.folder.exists()
    assert not list((store.root / "staging").iterdir())
    with pytest.raises(CacheError, match="may have been removed"), store.open(entry):
        pass


def test_an_entry_that_is_replaced_while_it_is_opened_is_not_used(
    store: CaptureStore, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = entry.folder / MANIFEST_NAME

    def replace_first(*_: object) -> None:
        where.with_name("new").write_bytes(where.read_bytes())
        where.with_name("new").replace(where)

    monkeypatch.setattr(store_module.fcntl, "flock", replace_first)
    with pytest.raises(CacheError, match="replaced just now"), store.open(entry):
        pass


def test_nothing_else_is_removed(store: CaptureStore, entry: Entry) -> None:
    for name in ("nonesuch", "../../x", "."):
        with pytest.raises(CacheError):
            store.remove(name)
    assert entry.folder.is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_store_that_only_can_be_read_serves(store: CaptureStore, entry: Entry) -> None:
    for path in (entry.folder / MANIFEST_NAME, entry.folder, store.root):
        path.chmod(0o555)
    with store.open(entry) as opened:
        assert (opened.files / PACKAGE).is_file()
    assert not store.reject(entry, "x")
    store.root.chmod(0o755)


def start_builder(store: CaptureStore) -> "subprocess.Popen[str]":
    package = Path(sys.modules["bullet_graph"].__path__[0]).parent
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{Path(__file__).parents[1]}"},
    )


def told(builder: "subprocess.Popen[str]") -> str:
    assert builder.stdout is not None
    return builder.stdout.readline().strip()


def test_nothing_of_a_killed_builder_is_taken_and_two_builders_take_turns(store: CaptureStore) -> None:
    name = entry_id(FINGERPRINT, PLAN)
    killed = start_builder(store)
    assert told(killed) == "building"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert store.entries() == ((), ())
    assert (store.root / "staging" / name / FILES_NAME / "half").is_file()
    (store.root / "staging" / name / FILES_NAME / "other").touch()

    first = start_builder(store)
    assert told(first) == "building"
    second = start_builder(store)
    assert "waiting for it to end" in told(second)
    store.prune(max_total_bytes=0, dry_run=False)  # leaves what is being built
    assert first.communicate("go on\n") == ("built\n", None)
    assert second.communicate() == ("found\n", None)
    (entry,), _ = store.entries()
    assert [file.path for file in entry.manifest.files] == ["whole"]
    with store.building(name, tell=quiet), pytest.raises(CacheError, match="another process builds it"):
        store.remove(name)


def used_days_ago(store: CaptureStore, days: float, files: Mapping[str, bytes] = FILES, **components: str) -> Entry:
    entry = build(store, changed(**components), files=files)
    moment = (datetime.now(UTC) - timedelta(days=days)).timestamp()
    os.utime(entry.folder / MANIFEST_NAME, (moment, moment))
    return entry


def names_of(found: Iterable[Entry | Pruned]) -> list[str]:
    return [entry.entry_id for entry in found]


def test_prune_by_total_size_keeps_what_was_used_last(store: CaptureStore) -> None:
    used = [used_days_ago(store, days, gpu=f"gpu{days}") for days in (3, 1, 2)]
    large = used_days_ago(store, 1.5, files={"large": bytes(10**6)}, gpu="large")
    # The large one goes only after those unused for longer, though these would fit without it.
    planned = store.prune(max_total_bytes=large.manifest.num_bytes + used[1].manifest.num_bytes, dry_run=True)
    assert names_of(planned) == [used[0].entry_id, used[2].entry_id]
    pruned = store.prune(max_age=timedelta(hours=30), max_total_bytes=0, dry_run=False)
    reasons = ["not used for 3 days", "not used for 2 days", "not used for 36 hours", "over the total of 0 bytes"]
    assert [each.reason for each in pruned] == reasons


def test_prune_clears_age_damage_and_leftovers_but_not_what_is_in_use(store: CaptureStore) -> None:
    fits, old, used, broken = (used_days_ago(store, days, gpu=str(days)) for days in (10, 40, 50, 2))
    (broken.folder / MANIFEST_NAME).unlink()
    shutil.copytree(fits.folder, store.root / "staging" / f"{fits.entry_id}.left")
    planned = store.prune(max_age=timedelta(days=30), dry_run=True)
    assert set(names_of(planned)) == {old.entry_id, used.entry_id, broken.entry_id}
    with store.open(used):
        os.utime(used.folder / MANIFEST_NAME, (0, 0))
        pruned = store.prune(max_age=timedelta(days=30), dry_run=False)
    assert names_of(pruned) == names_of(planned)
    found = {entry.entry_id: entry for entry in pruned}
    assert (found[old.entry_id].reason, found[old.entry_id].kept_because) == ("not used for 40 days", None)
    assert "in use" in (found[used.entry_id].kept_because or "")
    assert set(names_of(store.entries()[0])) == {fits.entry_id, used.entry_id}
    assert not list((store.root / "staging").iterdir())
