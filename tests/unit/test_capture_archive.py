"""Entries as single files: what comes back, and what is refused."""

import gzip
import io
import os
import sys
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from caches import FILES, FINGERPRINT, PACKAGE, PLAN, build, flip_byte, quiet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bullet_graph.captures import archive
from bullet_graph.captures.archive import export_entry, import_archive
from bullet_graph.captures.manifest import MAX_MANIFEST_BYTES
from bullet_graph.captures.store import MANIFEST_NAME, CaptureStore, Entry
from bullet_graph.errors import CacheError

END = bytes(1024)


def export(store: CaptureStore, entry: Entry, file: Path, sign_key: Path | None = None) -> Path:
    with store.open(entry) as opened:
        export_entry(opened, file, sign_key=sign_key)
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CaptureStore:
    return CaptureStore(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def entry(source: CaptureStore) -> Entry:
    return build(source)


@pytest.fixture(scope="module")
def file(source: CaptureStore, entry: Entry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(source, entry, tmp_path_factory.mktemp("archive") / "captures.tgz")


@pytest.fixture(scope="module")
def small_file(source: CaptureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of a few hundred bytes, for trying every change."""
    small = build(source, {"device": "cpu"}, {}, {"a/b.py": b"abc"})
    return export(source, small, tmp_path_factory.mktemp("small") / "small.tgz")


@pytest.fixture
def target(tmp_path: Path) -> CaptureStore:
    return CaptureStore(tmp_path / "there" / "captures")


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: Any) -> bytes:
    """A header, and content padded to whole blocks."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


def tar_of(manifest: bytes, files: list[bytes]) -> bytes:
    return b"".join(
        [
            member(MANIFEST_NAME, manifest),
            *(member(f"files/{index:06d}", data) for index, data in enumerate(files)),
            END,
        ]
    )


def imported(folder: Path, content: bytes) -> Entry | str:
    """Import into a new store: the entry, which is then whole, or the error. Nothing is written elsewhere."""
    (folder / "f.tgz").write_bytes(content)
    store = CaptureStore(folder / "there" / "captures")
    try:
        placed, _ = import_archive(store, folder / "f.tgz", tell=quiet)
    except CacheError as error:
        assert store.entries() == ((), ())
        return str(error)
    finally:
        inside = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert {path for path in inside if not path.endswith(".lock") and "/entries/" not in path} == {"f.tgz"}
    assert not placed.problems()
    return placed


def refusal(folder: Path, tar: bytes) -> str:
    """The error of what must not be imported."""
    found = imported(folder, gzip.compress(tar, 1))
    assert isinstance(found, str)
    return found


def test_it_comes_back_as_it_was(entry: Entry, file: Path, target: CaptureStore) -> None:
    placed, is_new = import_archive(target, file, tell=quiet)
    assert is_new
    assert placed.manifest == entry.manifest
    with target.open(placed) as opened:
        for path, data in FILES.items():
            assert (opened.files / path).read_bytes() == data
        assert not import_archive(target, file, tell=quiet)[1], "what is there already stays"
    assert target.find(FINGERPRINT, PLAN).hit is not None


def test_an_entry_gives_the_same_bytes_which_other_tools_list(source: CaptureStore, entry: Entry, file: Path) -> None:
    assert export(source, entry, file.with_name("again.tgz")).read_bytes() == file.read_bytes()
    assert file.read_bytes()[4:8] == bytes(4), "no time"
    with tarfile.open(file) as tar:
        members = tar.getmembers()
        first = tar.extractfile(members[0])
        assert first is not None
        assert first.read() == entry.manifest.to_bytes()
    assert [found.name for found in members[1:]] == [f"files/{index:06d}" for index in range(len(FILES))]


@pytest.mark.parametrize("damaged", [f"files/{PACKAGE}", MANIFEST_NAME])
def test_an_import_mends_a_damaged_entry(file: Path, target: CaptureStore, damaged: str) -> None:
    placed, _ = import_archive(target, file, tell=quiet)
    flip_byte(placed.folder / damaged, 20)
    assert import_archive(target, file, tell=quiet)[1]
    assert not target.read(placed.entry_id).problems()


def test_an_import_takes_the_place_of_another_build_unless_that_is_in_use(file: Path, target: CaptureStore) -> None:
    own = build(target, files={"own": b"own"})
    with target.open(own), pytest.raises(CacheError, match="in use"):
        import_archive(target, file, tell=quiet)
    assert import_archive(target, file, tell=quiet)[1]
    assert [found.path for found in target.read(own.entry_id).manifest.files] == sorted(FILES)


SMALL = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SMALL
@given(data=st.data())
def test_changed_bytes_are_refused_or_change_nothing_of_the_files(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content, is_packed = bytearray(small_file.read_bytes()), data.draw(st.booleans())
    if not is_packed:
        content = bytearray(gzip.decompress(content))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    imported(tmp_path_factory.mktemp("f"), bytes(content) if is_packed else gzip.compress(bytes(content), 1))


@SMALL
@given(data=st.binary(max_size=3000), length=st.floats(0, 1, exclude_max=True))
def test_any_bytes_and_truncated_archives_are_refused(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, data: bytes, length: float
) -> None:
    content = small_file.read_bytes()
    for bad in (data, gzip.compress(data, 1), content[: int(length * len(content))]):
        assert isinstance(imported(tmp_path_factory.mktemp("f"), bad), str)


@pytest.mark.parametrize("path", ["/tmp/outside.py", "../outside.py", "a/../../../../outside.py", "."])
def test_a_manifest_with_a_path_that_leads_out_is_refused(small_file: Path, tmp_path: Path, path: str) -> None:
    with tarfile.open(small_file) as tar:
        text = tar.extractfile(MANIFEST_NAME).read()  # type: ignore[union-attr]
    assert "without '..'" in refusal(tmp_path, tar_of(text.replace(b'"a/b.py"', f'"{path}"'.encode()), [b"abc"]))


FIRST = "files/000000"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (member("/etc/cron.d/x"), "found '/etc/cron.d/x' of 0 bytes"),
        (member("../../x"), "found '../../x' of 0 bytes"),
        (member("files/000001"), "is required, found 'files/000001'"),
        (member(FIRST, size=5), "found 'files/000000' of 5 bytes"),
        (member(FIRST, kind=tarfile.SYMTYPE, linkname="/etc/passwd"), "no regular file"),
        (member(FIRST, kind=tarfile.LNKTYPE, linkname="manifest.json"), "no regular file"),
        (member(FIRST, kind=tarfile.CHRTYPE), "no regular file"),
        (member(FIRST, kind=tarfile.DIRTYPE), "no regular file"),
        (member(FIRST, kind=tarfile.XHDTYPE, size=1 << 32), "no regular file"),
        (bytes(512), "is required, found its end"),
        (b"\xff" * 512, "damaged"),
    ],
)
def test_members_that_do_not_belong_are_refused(file: Path, tmp_path: Path, header: bytes, message: str) -> None:
    tar = bytearray(gzip.decompress(file.read_bytes()))
    start = tar.index(FIRST.encode())
    tar[start : start + 512] = header[:512]
    assert message in refusal(tmp_path, tar)


def test_a_member_too_many_or_too_few_is_refused(entry: Entry, file: Path, tmp_path: Path) -> None:
    text = entry.manifest.to_bytes()
    files = [(entry.files / stored.path).read_bytes() for stored in entry.manifest.files]
    for tar, message in (
        (tar_of(text, [*files, b"x"]), "'files/000005' is not listed"),
        (tar_of(text, files[:-1]), "found its end"),
        (tar_of(text, [files[0], files[1][::-1], *files[2:]]), "another checksum"),
        (member(FIRST, b"x") + END, "must begin with manifest.json"),
        (tar_of(text, files) + b"x" * 512, "something after its end"),
        (tar_of(text, files) + bytes(1 << 20), "something after its end"),
        (member(MANIFEST_NAME, size=MAX_MANIFEST_BYTES + 1), "of at most"),
    ):
        assert message in refusal(tmp_path, tar)
    assert "is refused" in str(imported(tmp_path, file.read_bytes() + b"garbage"))


def test_memory_stays_bounded(entry: Entry, tmp_path: Path) -> None:
    """64 MiB of zeros in a small file, as the content of a member that says so."""
    text = replace(entry.manifest, files=(replace(entry.manifest.files[0], num_bytes=1 << 26),)).to_bytes()
    packed = gzip.compress(member(MANIFEST_NAME, text) + member(FIRST, size=1 << 26) + bytes(1 << 26) + END, 1)
    tracemalloc.start()
    try:
        assert "another checksum" in str(imported(tmp_path, packed))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_more_than_fits_and_files_that_are_none(
    file: Path, target: CaptureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "nonesuch", "No such file"),
        (tmp_path, "not a regular file|Is a directory"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        with pytest.raises(CacheError, match=message):
            import_archive(target, path, tell=quiet)
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(CacheError, match="which has 5: make room"):
        import_archive(target, file, tell=quiet)


def test_an_export_that_fails_leaves_what_was_there(
    source: CaptureStore, entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CacheError, match="cannot export"):
        export(source, entry, tmp_path / "nonesuch" / "x.tgz")
    (tmp_path / "x.tgz").write_text("before")
    with source.open(entry) as opened:
        monkeypatch.setattr(archive, "open_regular", lambda _: io.BytesIO(b""))
        with pytest.raises((CacheError, io.UnsupportedOperation)):
            export_entry(opened, tmp_path / "x.tgz")
    assert (tmp_path / "x.tgz").read_text() == "before"
    assert os.listdir(tmp_path) == ["x.tgz"]


# ---- signatures ----


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
    source: CaptureStore, entry: Entry, file: Path, target: CaptureStore, tmp_path: Path, keys: dict[str, Path]
) -> None:
    signed = export(source, entry, tmp_path / "signed.tgz", keys["one"])
    with pytest.raises(CacheError, match="none of the trusted keys"):
        import_archive(target, signed, trusted_keys=[keys["two.pub"]], tell=quiet)
    with pytest.raises(CacheError, match="is not signed: export it with --sign-key"):
        import_archive(target, file, trusted_keys=[keys["one.pub"]], tell=quiet)
    tar = gzip.decompress(signed.read_bytes())
    other = replace(entry.manifest, provenance={"host": "attacker"}).to_bytes()
    changed = tmp_path / "changed.tgz"
    changed.write_bytes(gzip.compress(member(MANIFEST_NAME, other) + tar[tar.index(b"manifest.sig") :], 1))
    with pytest.raises(CacheError, match="or it was changed since"):
        import_archive(target, changed, trusted_keys=[keys["one.pub"]], tell=quiet)
    assert not target.root.exists()
    placed, _ = import_archive(target, signed, trusted_keys=[keys["two.pub"], keys["one.pub"]], tell=quiet)
    assert not placed.problems()


def test_keys_that_cannot_be_used(
    source: CaptureStore, entry: Entry, file: Path, tmp_path: Path, keys: dict[str, Path]
) -> None:
    for name in ("curve", "one.pub", "locked", "noise", "nonesuch"):
        with pytest.raises(CacheError, match="key"):
            export(source, entry, tmp_path / "x.tgz", keys.get(name, tmp_path / name))
    for name in ("curve.pub", "one", "noise", "nonesuch"):
        trusted = [keys.get(name, tmp_path / name)]
        with pytest.raises(CacheError, match="key"):
            import_archive(CaptureStore(tmp_path / "there"), file, trusted_keys=trusted, tell=quiet)
    assert not list(tmp_path.iterdir())


def test_without_the_library_signatures_are_an_error(
    file: Path, target: CaptureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(CacheError, match=r"pip install 'bullet-graph\[sign\]'"):
        import_archive(target, file, trusted_keys=[tmp_path / "x.pub"], tell=quiet)
