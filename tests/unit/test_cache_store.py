"""The store: what it finds, what it refuses to hand out, and what it gives up."""

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from caches import FINGERPRINT, PARTS, PLAN, artifact_file, build_entry, flip_byte

from bullet_graph.captures.entry import ARTIFACTS_NAME, MANIFEST_NAME, Entry
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint
from bullet_graph.captures.locks import build_lock
from bullet_graph.captures.prune import PruneRules, forget_interrupted, prune
from bullet_graph.captures.store import CaptureStore, default_root
from bullet_graph.errors import CacheError

NOW = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> CaptureStore:
    return CaptureStore(tmp_path / "captures")


@pytest.fixture
def entry(store: CaptureStore) -> Entry:
    return build_entry(store)


def changed(**components: str) -> Fingerprint:
    return Fingerprint.of({**FINGERPRINT.values, **components})


def test_a_store_that_does_not_exist_is_empty_and_stays_so(store: CaptureStore) -> None:
    lookup = store.find(FINGERPRINT, PLAN)
    assert (lookup.hit, lookup.mismatches, lookup.damaged) == (None, (), ())
    assert store.get(FINGERPRINT, PLAN) is None
    assert not store.root.exists()
    assert default_root().name == "captures"


def test_what_was_built_is_found_and_handed_out(store: CaptureStore, entry: Entry) -> None:
    lookup = store.find(FINGERPRINT, PLAN)
    assert lookup.hit == entry
    assert store.get(FINGERPRINT, dict(reversed(PLAN.items()))) == entry
    with store.open(entry) as opened:
        for name, (kind, data, _) in PARTS.items():
            assert opened.path(name).read_bytes() == data
            assert name in [artifact.name for artifact in opened.of_kind(kind)]
        with pytest.raises(CacheError, match="no artifact 'nonesuch'"):
            opened.path("nonesuch")


def test_a_miss_tells_which_parts_are_stale_and_the_best_entry_comes_first(store: CaptureStore) -> None:
    build_entry(store, changed(gpu="other", torch="1"))
    near = build_entry(store)
    lookup = store.find(changed(code_graphs="dddd"), PLAN)
    assert lookup.hit is None
    best, other = lookup.mismatches
    assert best.entry == near
    assert best.stale == {ArtifactKind.CAPTURE}
    assert best.rebuild_seconds == 0.5
    assert other.rebuild_seconds == 350.5
    assert {d.component for d in other.differences} == {"gpu", "torch", "code_graphs"}


def test_another_plan_is_a_miss_unless_any_will_do(store: CaptureStore, entry: Entry) -> None:
    plan = {**PLAN, "batch_sizes": [1]}
    (miss,) = store.find(FINGERPRINT, plan).mismatches
    assert [d.component for d in miss.differences] == ["plan.batch_sizes"]
    assert store.find(FINGERPRINT, None).hit == entry


# Damage

_SECRET = "secret"


def _flip(path: Path) -> None:
    flip_byte(path, 1234)


def _truncate(path: Path) -> None:
    os.truncate(path, 100)


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _link(path: Path) -> None:
    # The very same content: only that it is a link is wrong.
    moved = path.rename(path.parents[3] / _SECRET)
    path.symlink_to(moved)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, "inductor.bin has another checksum"),
        (_truncate, "inductor.bin has 100 bytes instead of 320000"),
        (_lengthen, "inductor.bin has 320001 bytes instead of 320000"),
        (Path.unlink, "inductor.bin is missing"),
        (_link, "inductor.bin is a link or a special file"),
        (_pipe, "inductor.bin is a link or a special file"),
        (lambda path: (path.parent / "evil.py").write_text("x"), "evil.py is not listed"),
        (lambda path: (path.parent / "evil").symlink_to("/etc"), "evil is not listed"),
    ],
)
def test_a_damaged_entry_is_not_opened(
    store: CaptureStore, entry: Entry, damage: Callable[[Path], object], message: str
) -> None:
    damage(artifact_file(entry, "inductor"))
    with pytest.raises(CacheError, match=message):
        store.open(entry)
    # The mark is gone: it can be removed.
    store.remove(entry.entry_id)


def test_all_damages_are_named(entry: Entry) -> None:
    artifact_file(entry, "inductor").unlink()
    flip_byte(artifact_file(entry, "triton/gemm"))
    damages = entry.check()
    assert [damage.artifact.name for damage in damages if damage.artifact] == ["inductor", "triton/gemm"]


def test_a_folder_of_artifacts_that_is_a_link_is_not_followed(
    store: CaptureStore, entry: Entry, tmp_path: Path
) -> None:
    folder = entry.folder / ARTIFACTS_NAME
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(CacheError, match=r"inductor\.bin is missing"):
        store.open(entry)


def _other_version(path: Path) -> None:
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))


def _manifest_link(path: Path) -> None:
    moved = path.rename(path.parents[2] / _SECRET)
    path.symlink_to(moved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip_byte(path, 700), "manifest.json cannot be used"),
        (lambda path: os.truncate(path, 300), "perhaps truncated"),
        (_other_version, "found 2: use the bullet-graph that wrote it"),
        (Path.unlink, "it has no manifest"),
        (_manifest_link, "is a link"),
        (lambda path: path.write_bytes(b""), "cannot be used"),
    ],
)
def test_a_damaged_manifest_is_told_and_never_a_hit(
    store: CaptureStore, entry: Entry, damage: Callable[[Path], object], message: str
) -> None:
    damage(entry.folder / MANIFEST_NAME)
    lookup = store.find(FINGERPRINT, PLAN)
    assert (lookup.hit, lookup.mismatches) == (None, ())
    (damaged,) = lookup.damaged
    assert damaged.entry_id == entry.entry_id
    assert message in damaged.problem
    with pytest.raises(CacheError):
        store.open(entry)
    store.remove(entry.entry_id)
    assert store.entries() == ((), ())


def test_an_entry_under_another_name_is_damaged(store: CaptureStore, entry: Entry) -> None:
    shutil.copytree(entry.folder, store.folder("0" * 16))
    (damaged,) = store.entries()[1]
    assert f"is the manifest of entry {entry.entry_id}" in damaged.problem


def test_a_file_in_the_place_of_an_entry_is_damaged_and_can_be_removed(
    store: CaptureStore, entry: Entry
) -> None:
    (store.root / "entries" / "stray").write_text("x")
    assert [damaged.entry_id for damaged in store.entries()[1]] == ["stray"]
    store.remove("stray")
    assert store.entries() == ((entry,), ())


# Use and removal


def test_an_entry_in_use_stays(store: CaptureStore, entry: Entry) -> None:
    with store.open(entry), store.open(entry), pytest.raises(CacheError, match="in use"):
        store.remove(entry.entry_id)
    store.remove(entry.entry_id)
    assert not entry.folder.exists()
    assert not list(store.trash.iterdir())
    with pytest.raises(CacheError, match="may have been removed"):
        store.open(entry)


def test_an_entry_that_is_replaced_while_it_is_opened_is_not_used(
    store: CaptureStore, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest_file = entry.folder / MANIFEST_NAME

    def replace_first(*_: object) -> None:
        manifest_file.with_name("new").write_bytes(manifest_file.read_bytes())
        manifest_file.with_name("new").replace(manifest_file)

    monkeypatch.setattr("bullet_graph.captures.locks.fcntl.flock", replace_first)
    with pytest.raises(CacheError, match="replaced just now"):
        store.open(entry)


def test_an_entry_that_is_being_built_stays(store: CaptureStore, entry: Entry) -> None:
    with (
        build_lock(store.lock_file(entry.entry_id), on_wait=None),
        pytest.raises(CacheError, match="another process is at work"),
    ):
        store.remove(entry.entry_id)


@pytest.mark.parametrize("name", ["nonesuch", "../../x", "."])
def test_nothing_else_is_removed(store: CaptureStore, entry: Entry, name: str) -> None:
    with pytest.raises(CacheError):
        store.remove(name)
    assert entry.folder.is_dir()


def test_opening_is_use(store: CaptureStore, entry: Entry) -> None:
    os.utime(entry.folder / MANIFEST_NAME, (0, 0))
    store.open(entry).close()
    assert datetime.now(UTC) - store.read(entry.entry_id).last_used < timedelta(minutes=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_cache_that_only_can_be_read_serves(store: CaptureStore, entry: Entry) -> None:
    for path in (entry.folder / MANIFEST_NAME, entry.folder, store.root):
        path.chmod(0o555)
    with store.open(entry) as opened:
        assert opened.path("inductor").is_file()
    store.root.chmod(0o755)


def used_days_ago(store: CaptureStore, days: int, **components: str) -> Entry:
    entry = build_entry(store, changed(**components))
    moment = (NOW - timedelta(days=days)).timestamp()
    os.utime(entry.folder / MANIFEST_NAME, (moment, moment))
    return entry


def test_prune_by_age(store: CaptureStore) -> None:
    old, new = used_days_ago(store, 40, gpu="old"), used_days_ago(store, 10, gpu="new")
    rules = PruneRules(max_age=timedelta(days=30))
    (planned,) = prune(store, rules, now=NOW, dry_run=True)
    assert old.folder.is_dir()
    (pruned,) = prune(store, rules, now=NOW, dry_run=False)
    assert planned == pruned
    assert (pruned.entry_id, pruned.reason) == (old.entry_id, "not used for 40 days")
    assert [entry.entry_id for entry in store.entries()[0]] == [new.entry_id]


def test_prune_by_total_size_keeps_what_was_used_last(store: CaptureStore) -> None:
    used = [used_days_ago(store, days, gpu=f"gpu{days}") for days in (3, 1, 2)]
    size = used[0].manifest.num_bytes
    pruned = prune(store, PruneRules(max_total_bytes=2 * size), now=NOW, dry_run=False)
    assert [entry.entry_id for entry in pruned] == [used[0].entry_id]
    pruned = prune(store, PruneRules(max_total_bytes=0), now=NOW, dry_run=False)
    assert len(pruned) == 2


def test_prune_what_does_not_fit_and_what_is_damaged_but_not_what_is_in_use(store: CaptureStore) -> None:
    fits, misfit = used_days_ago(store, 1, gpu="this"), used_days_ago(store, 1, gpu="other")
    broken = used_days_ago(store, 1, gpu="broken")
    (broken.folder / MANIFEST_NAME).unlink()
    rules = PruneRules(misfit=lambda entry: entry.manifest.fingerprint.values["gpu"] != "this")
    with store.open(misfit):
        pruned = {entry.entry_id: entry for entry in prune(store, rules, now=NOW, dry_run=False)}
    assert pruned.keys() == {misfit.entry_id, broken.entry_id}
    assert "in use" in (pruned[misfit.entry_id].kept_because or "")
    assert {entry.entry_id for entry in store.entries()[0]} == {fits.entry_id, misfit.entry_id}


def test_what_a_killed_removal_left_is_deleted_by_the_next(store: CaptureStore, entry: Entry) -> None:
    store.trash.mkdir()
    (store.trash / "left").mkdir()
    (store.trash / "left" / "file").write_text("x")
    prune(store, PruneRules(max_age=timedelta(days=1)), now=datetime.now(UTC), dry_run=False)
    assert not list(store.trash.iterdir())
    assert store.entries()[0] == (entry,)


def test_interrupted_builds_can_be_forgotten(store: CaptureStore) -> None:
    store.make_folders()
    for name in ("aaaa", "bbbb"):
        (store.staging / name).mkdir()
        (store.staging / f"{name}.journal").write_text("x")
    assert [left.entry_id for left in forget_interrupted(store, dry_run=True)] == ["aaaa", "bbbb"]
    with build_lock(store.lock_file("bbbb"), on_wait=None):
        forgotten = forget_interrupted(store, dry_run=False)
    assert [left.kept_because is None for left in forgotten] == [True, False]
    assert sorted(os.listdir(store.staging)) == ["bbbb", "bbbb.journal"]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "entries").write_text("no folder")
    with pytest.raises(CacheError, match="cannot list"):
        CaptureStore(tmp_path).entries()
