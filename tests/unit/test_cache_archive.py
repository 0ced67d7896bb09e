"""Exported entries: they come back as they were, or nothing of them is placed anywhere."""

import gzip
import io
import json
import os
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from caches import FINGERPRINT, PARTS, PLAN, artifact_file, build_entry, flip_byte, quiet
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bullet_graph.captures import archive
from bullet_graph.captures.archive import export_entry, import_archive
from bullet_graph.captures.archive_file import END, member_header, padding
from bullet_graph.captures.builder import open_build
from bullet_graph.captures.entry import ARTIFACTS_NAME, MANIFEST_NAME, Entry
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint, digest
from bullet_graph.captures.manifest_file import MAX_MANIFEST_BYTES, manifest_bytes
from bullet_graph.captures.store import CaptureStore
from bullet_graph.errors import CacheError

PATHS = st.lists(st.sampled_from(["..", ".", "", "a", "b.py", "~", "\\", "\0", "é", "\n"]), max_size=5).map(
    "/".join
)
SMALL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CaptureStore:
    return CaptureStore(tmp_path_factory.mktemp("source") / "captures")


@pytest.fixture(scope="module")
def entry(source: CaptureStore) -> Entry:
    return build_entry(source)


@pytest.fixture(scope="module")
def small_file(source: CaptureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of a few hundred bytes, for trying every change."""
    with open_build(source, Fingerprint.of({"device": "cpu"}), {}, tell=quiet) as build:
        build.add_bytes("a", ArtifactKind.TRITON, b"abc", path="a/b.py", build_seconds=1)
        small = build.commit(self_check=None, provenance={})
    file = tmp_path_factory.mktemp("small") / "small.tgz"
    with source.open(small) as opened:
        export_entry(opened, file)
    return file


@pytest.fixture(scope="module")
def file(source: CaptureStore, entry: Entry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("archive") / "captures.tgz"
    with source.open(entry) as opened:
        export_entry(opened, file)
    return file


@pytest.fixture
def target(tmp_path: Path) -> CaptureStore:
    return CaptureStore(tmp_path / "there" / "captures")


def everything(folder: Path) -> set[str]:
    """All that lies below a folder, but for the store's own empty folders and locks."""
    inside = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return {path for path in inside if not path.endswith(".lock")} - {
        *("there", "there/captures"),
        *(f"there/captures/{name}" for name in ("entries", "staging", "locks", "trash")),
    }


def refusal(target: CaptureStore, data: bytes) -> str:
    """Import what must not be imported: a CacheError, and nothing of it anywhere."""
    file = target.root.parent.parent / "bad.tgz"
    file.write_bytes(data)
    with pytest.raises(CacheError) as caught:
        import_archive(target, file, tell=quiet)
    assert everything(file.parent) == {"bad.tgz"}
    assert target.entries() == ((), ())
    return str(caught.value)


def test_it_comes_back_as_it_was(entry: Entry, file: Path, target: CaptureStore) -> None:
    counted: list[int] = []
    imported = import_archive(target, file, tell=quiet, on_bytes=counted.append)
    assert imported.is_new
    assert not imported.is_signed
    assert imported.entry.manifest == entry.manifest
    assert sum(counted) == entry.manifest.num_bytes
    with target.open(imported.entry) as opened:
        for name, (_, data, _) in PARTS.items():
            assert opened.path(name).read_bytes() == data
    assert target.find(FINGERPRINT, PLAN).hit is not None
    assert not list(target.staging.iterdir())


def test_the_same_entry_gives_the_same_bytes(
    source: CaptureStore, entry: Entry, file: Path, tmp_path: Path
) -> None:
    with source.open(entry) as opened:
        export_entry(opened, tmp_path / "again.tgz")
    assert (tmp_path / "again.tgz").read_bytes() == file.read_bytes()
    assert os.listdir(tmp_path) == ["again.tgz"]


def test_other_tools_can_list_it(entry: Entry, file: Path) -> None:
    with tarfile.open(file) as tar:
        members = tar.getmembers()
        first = tar.extractfile(members[0])
        assert first is not None
        assert first.read() == manifest_bytes(entry.manifest)
    assert [member.name for member in members[1:]] == [
        f"artifacts/{index:06d}" for index in range(len(PARTS))
    ]
    assert {member.type for member in members} == {tarfile.REGTYPE}


def test_a_second_import_changes_nothing(file: Path, target: CaptureStore) -> None:
    import_archive(target, file, tell=quiet)
    with target.open(target.entries()[0][0]):
        assert not import_archive(target, file, tell=quiet).is_new


@pytest.mark.parametrize("damaged", ["inductor.bin", MANIFEST_NAME])
def test_an_import_mends_a_damaged_entry(file: Path, target: CaptureStore, damaged: str) -> None:
    placed = import_archive(target, file, tell=quiet).entry
    path = placed.folder / MANIFEST_NAME if damaged == MANIFEST_NAME else artifact_file(placed, "inductor")
    flip_byte(path, 500)
    mended = import_archive(target, file, tell=quiet)
    assert mended.is_new
    assert not mended.entry.check()


def test_an_import_takes_the_place_of_another_build_of_the_same_entry(
    file: Path, target: CaptureStore
) -> None:
    with open_build(target, FINGERPRINT, PLAN, tell=quiet) as build:
        build.add_bytes("own", ArtifactKind.TRITON, b"own", path="own", build_seconds=1)
        own = build.commit(self_check=None, provenance={})
    with target.open(own), pytest.raises(CacheError, match="in use"):
        import_archive(target, file, tell=quiet)
    assert import_archive(target, file, tell=quiet).is_new
    assert "own" not in [artifact.name for artifact in target.entries()[0][0].manifest.artifacts]


# Whatever the bytes


@SMALL
@given(data=st.data())
def test_a_changed_byte_is_refused_or_changes_nothing(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small_file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    import_fuzzed(bytes(content), small_file, tmp_path_factory)


@SMALL
@given(data=st.data())
def test_a_changed_byte_inside_of_the_compression_is_refused_or_changes_nothing(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(gzip.decompress(small_file.read_bytes()))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    import_fuzzed(gzip.compress(bytes(content), 1), small_file, tmp_path_factory)


@SMALL
@given(data=st.binary(max_size=3000), compressed=st.booleans())
def test_any_bytes_are_refused(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, data: bytes, compressed: bool
) -> None:
    assert not import_fuzzed(gzip.compress(data, 1) if compressed else data, small_file, tmp_path_factory)


@SMALL
@given(length=st.floats(0, 1, exclude_max=True))
def test_a_truncated_one_is_refused(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, length: float
) -> None:
    content = small_file.read_bytes()
    assert not import_fuzzed(content[: int(length * len(content))], small_file, tmp_path_factory)


def tar_of(manifest: bytes) -> bytes:
    return member_header(MANIFEST_NAME, len(manifest)) + manifest + padding(len(manifest))


def import_fuzzed(content: bytes, original: Path, factory: pytest.TempPathFactory) -> bool:
    """Import into a new store; returns whether it was placed, which only the very same content may be."""
    folder = factory.mktemp("fuzzed")
    (folder / "f.tgz").write_bytes(content)
    store = CaptureStore(folder / "there" / "captures")
    try:
        placed = import_archive(store, folder / "f.tgz", tell=quiet).entry
    except CacheError:
        assert everything(folder) == {"f.tgz"}
        return False
    assert gzip.decompress(content) == gzip.decompress(original.read_bytes())
    assert not placed.check()
    return True


@SMALL
@given(path=PATHS)
@example("/tmp/outside.py")
@example("../outside.py")
@example("a/../../../../outside.py")
@example("manifest.json")
def test_whatever_path_a_manifest_lists_nothing_is_placed_outside(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, path: str
) -> None:
    tar = gzip.decompress(small_file.read_bytes())
    rest = tar[tar.index(b"artifacts/000000") :]
    content = json.loads(tar[512:].partition(b"\0")[0])
    content["artifacts"][0]["path"] = path
    # The checksum is right: only the path can be refused.
    del content["checksum"]
    text = json.dumps({**content, "checksum": digest(content)}).encode()
    folder = tmp_path_factory.mktemp("paths")
    (folder / "f.tgz").write_bytes(gzip.compress(tar_of(text) + rest, 1))
    store = CaptureStore(folder / "there" / "captures")
    try:
        placed = import_archive(store, folder / "f.tgz", tell=quiet).entry
    except CacheError:
        assert everything(folder) == {"f.tgz"}
    else:
        (file,) = (found for found in (placed.folder / ARTIFACTS_NAME).rglob("*") if found.is_file())
        assert file.read_bytes() == b"abc"
        files = {found for found in folder.rglob("*") if found.is_file()}
        outside = {found.suffix for found in files if not found.is_relative_to(placed.folder)}
        assert outside == {".tgz", ".lock"}


# Each way to be wrong


@pytest.fixture
def tar(file: Path) -> bytearray:
    return bytearray(gzip.decompress(file.read_bytes()))


def first_artifact(tar: bytearray) -> int:
    """Where the header of the first artifact begins."""
    return tar.index(b"artifacts/000000")


def tar_member(name: str, kind: bytes = tarfile.REGTYPE, **settings: Any) -> bytes:
    member = tarfile.TarInfo(name)
    member.type = kind
    for key, value in settings.items():
        setattr(member, key, value)
    return member.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (tar_member("/etc/cron.d/x"), "'/etc/cron.d/x' has an absolute path"),
        (tar_member("../../x"), "has '..' in its path"),
        (tar_member("artifacts/000000", tarfile.SYMTYPE, linkname="/etc/passwd"), "is a link"),
        (tar_member("artifacts/000000", tarfile.LNKTYPE, linkname="manifest.json"), "is a link"),
        (tar_member("artifacts/000000", tarfile.CHRTYPE), "no regular file"),
        (tar_member("artifacts/000000", tarfile.FIFOTYPE), "no regular file"),
        (tar_member("artifacts/000000", tarfile.DIRTYPE), "no regular file"),
        (tar_member("artifacts/000000", tarfile.XHDTYPE, size=1 << 32), "no regular file"),
        (tar_member("artifacts/000001"), "not listed in the manifest, or not in its order"),
        (tar_member("evil.py"), "not listed in the manifest"),
        (tar_member("artifacts/000000", size=5), "another size than the manifest says (5 bytes)"),
        (tar_member("artifacts/000000", size=320_000, mode=0o4777), "an unusual header"),
        (bytes(512), "artifacts/000000 is missing"),
        (b"\xff" * 512, "damaged"),
        (b"artifacts/000000".ljust(512, b"\1"), "damaged"),
    ],
)
def test_members_that_do_not_belong_are_refused(
    tar: bytearray, target: CaptureStore, header: bytes, message: str
) -> None:
    start = first_artifact(tar)
    tar[start : start + 512] = header
    assert message in refusal(target, gzip.compress(tar, 1))


def test_a_member_too_many_or_too_few_is_refused(tar: bytearray, target: CaptureStore) -> None:
    extra = member_header("artifacts/000005", 3) + b"abc" + padding(3)
    assert "not listed" in refusal(target, gzip.compress(tar[:-1024] + extra + END, 1))
    last = tar.index(b"artifacts/000004")
    assert "artifacts/000004 is missing" in refusal(target, gzip.compress(tar[:last] + END, 1))


def test_a_checksum_that_does_not_hold(tar: bytearray, target: CaptureStore) -> None:
    tar[first_artifact(tar) + 512] ^= 1
    assert "inductor.bin has another checksum than the manifest says" in refusal(
        target, gzip.compress(tar, 1)
    )


def test_something_between_members(tar: bytearray, target: CaptureStore) -> None:
    second = tar.index(b"artifacts/000002")
    tar[second - 1] = 1
    assert "between two members" in refusal(target, gzip.compress(tar, 1))


@pytest.mark.parametrize("garbage", [b"\0", b"x", gzip.compress(b"", mtime=0), gzip.compress(b"x", mtime=0)])
def test_something_after_the_compressed_stream(file: Path, target: CaptureStore, garbage: bytes) -> None:
    assert "something after its end" in refusal(target, file.read_bytes() + garbage)


def test_something_after_the_tar(tar: bytearray, target: CaptureStore) -> None:
    assert "something after its end" in refusal(target, gzip.compress(tar + bytes(512), 1))


def test_a_tar_without_its_end(tar: bytearray, target: CaptureStore) -> None:
    assert "truncated" in refusal(target, gzip.compress(tar[:-512], 1))


def with_manifest(tar: bytearray, text: bytes) -> bytes:
    return gzip.compress(tar_of(text) + tar[first_artifact(tar) :], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b'"version": 1', b'"version": 2'), "use the bullet-graph that wrote it"),
        (lambda text: text.replace(b"inductor.bin", b"../../../x"), "damaged or was edited"),
        (lambda _: b"{}", "something else"),
        (lambda _: b"", "not valid JSON"),
    ],
)
def test_a_manifest_that_cannot_be_used(
    entry: Entry, tar: bytearray, target: CaptureStore, change: Callable[[bytes], bytes], message: str
) -> None:
    assert message in refusal(target, with_manifest(tar, change(manifest_bytes(entry.manifest))))


def test_a_manifest_that_is_not_first(tar: bytearray, target: CaptureStore) -> None:
    assert "does not begin with a manifest" in refusal(target, gzip.compress(tar[first_artifact(tar) :], 1))


def test_a_manifest_that_is_too_large(tar: bytearray, target: CaptureStore) -> None:
    tar[:512] = member_header(MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)
    assert "its manifest has" in refusal(target, gzip.compress(tar, 1))


def test_more_than_is_accepted_or_fits(
    file: Path, target: CaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_TOTAL_BYTES", 1000)
    assert "more than the 1000 accepted" in refusal(target, file.read_bytes())
    monkeypatch.undo()
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    assert "which has 5: make room" in refusal(target, file.read_bytes())


def test_memory_stays_bounded(target: CaptureStore, entry: Entry) -> None:
    """64 MiB of zeros in a small file, as the content of a member that says so."""
    artifact = replace(entry.manifest.artifacts[0], num_bytes=1 << 26)
    text = manifest_bytes(replace(entry.manifest, artifacts=(artifact,)))
    packed = io.BytesIO()
    with gzip.open(packed, "wb", 1) as writer:
        writer.write(member_header(MANIFEST_NAME, len(text)) + text + padding(len(text)))
        writer.write(member_header("artifacts/000000", 1 << 26))
        for _ in range(1 << 6):
            writer.write(bytes(1 << 20))
        writer.write(END)
    tracemalloc.start()
    try:
        assert "another checksum" in refusal(target, packed.getvalue())
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_files_that_are_none(target: CaptureStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "nonesuch", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        with pytest.raises(CacheError, match=message):
            import_archive(target, path, tell=quiet)
    assert not target.root.exists()


def test_an_export_that_fails_leaves_what_was_there(
    source: CaptureStore, entry: Entry, tmp_path: Path
) -> None:
    with source.open(entry) as opened:
        with pytest.raises(CacheError, match="cannot export"):
            export_entry(opened, tmp_path / "nonesuch" / "x.tgz")
        (tmp_path / "x.tgz").write_text("before")

        def stop(_: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_entry(opened, tmp_path / "x.tgz", on_bytes=stop)
    assert (tmp_path / "x.tgz").read_text() == "before"
    assert os.listdir(tmp_path) == ["x.tgz"]


def test_what_a_killed_import_left_does_no_harm(entry: Entry, file: Path, target: CaptureStore) -> None:
    target.make_folders()
    left = target.staging / f"{entry.entry_id}.import" / ARTIFACTS_NAME
    left.mkdir(parents=True)
    (left / "inductor.bin").write_text("half")
    (left / "evil.py").write_text("x")
    assert not import_archive(target, file, tell=quiet).entry.check()
    assert not list(target.staging.iterdir())


def test_an_import_that_is_interrupted_leaves_nothing(file: Path, target: CaptureStore) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_archive(target, file, tell=quiet, on_bytes=stop)
    assert not list(target.staging.iterdir())
    assert target.entries() == ((), ())


# Signatures


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Key files by name: ``one`` and ``two`` with their public keys, and kinds that must be refused."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519  # noqa: PLC0415

    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    spki, plain = serialization.PublicFormat.SubjectPublicKeyInfo, serialization.NoEncryption()
    folder = tmp_path_factory.mktemp("keys")
    made = {
        "one": ed25519.Ed25519PrivateKey.generate(),
        "two": ed25519.Ed25519PrivateKey.generate(),
        "curve": ec.generate_private_key(ec.SECP256R1()),
    }
    for name, key in made.items():
        (folder / name).write_bytes(key.private_bytes(pem, pkcs8, plain))
        (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(pem, spki))
    locked = serialization.BestAvailableEncryption(b"password")
    (folder / "locked").write_bytes(made["one"].private_bytes(pem, pkcs8, locked))
    (folder / "noise").write_bytes(b"noise")
    return {path.name: path for path in folder.iterdir()}


def test_a_signature_by_a_trusted_key(
    source: CaptureStore, entry: Entry, target: CaptureStore, tmp_path: Path, keys: dict[str, Path]
) -> None:
    signed = tmp_path / "signed.tgz"
    with source.open(entry) as opened:
        export_entry(opened, signed, sign_key=keys["one"])
    with pytest.raises(CacheError, match="none of the trusted keys"):
        import_archive(target, signed, trusted_keys=[keys["two.pub"]], tell=quiet)
    assert not target.root.exists()
    imported = import_archive(target, signed, trusted_keys=[keys["two.pub"], keys["one.pub"]], tell=quiet)
    assert imported.is_signed
    assert not imported.entry.check()
    assert import_archive(target, signed, tell=quiet).is_signed


def test_without_a_signature_a_trusted_key_refuses(
    file: Path, target: CaptureStore, keys: dict[str, Path]
) -> None:
    with pytest.raises(CacheError, match="is not signed: export it with --sign-key"):
        import_archive(target, file, trusted_keys=[keys["one.pub"]], tell=quiet)


def test_a_signature_does_not_hold_for_another_manifest(
    source: CaptureStore, entry: Entry, target: CaptureStore, tmp_path: Path, keys: dict[str, Path]
) -> None:
    signed = tmp_path / "signed.tgz"
    with source.open(entry) as opened:
        export_entry(opened, signed, sign_key=keys["one"])
    other = manifest_bytes(replace(entry.manifest, provenance={"host": "attacker"}))
    tar = gzip.decompress(signed.read_bytes())
    rest = tar[tar.index(b"manifest.sig") :]
    signed.write_bytes(gzip.compress(tar_of(other) + rest))
    with pytest.raises(CacheError, match="or it was changed since"):
        import_archive(target, signed, trusted_keys=[keys["one.pub"]], tell=quiet)


@pytest.mark.parametrize("name", ["curve", "one.pub", "locked", "noise", "nonesuch"])
def test_keys_that_cannot_sign(
    source: CaptureStore, entry: Entry, tmp_path: Path, keys: dict[str, Path], name: str
) -> None:
    with source.open(entry) as opened, pytest.raises(CacheError, match="key"):
        export_entry(opened, tmp_path / "x.tgz", sign_key=keys.get(name, tmp_path / name))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["curve.pub", "one", "noise", "nonesuch"])
def test_keys_that_cannot_be_trusted(
    file: Path, target: CaptureStore, tmp_path: Path, keys: dict[str, Path], name: str
) -> None:
    with pytest.raises(CacheError, match="key"):
        import_archive(target, file, trusted_keys=[keys.get(name, tmp_path / name)], tell=quiet)


def test_without_the_library_signatures_are_an_error(
    source: CaptureStore,
    entry: Entry,
    file: Path,
    target: CaptureStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(CacheError, match=r"pip install 'bullet-graph\[sign\]'"):
        import_archive(target, file, trusted_keys=[tmp_path / "x.pub"], tell=quiet)
    with source.open(entry) as opened, pytest.raises(CacheError, match="sign"):
        export_entry(opened, tmp_path / "x.tgz", sign_key=tmp_path / "x")
