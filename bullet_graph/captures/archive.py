"""Entries as single files, for a fleet or a container: export, and an import that trusts nothing it reads."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bullet_graph.captures.archive_file import (
    BLOCK_BYTES,
    END,
    MANIFEST_MEMBER,
    SIGNATURE_MEMBER,
    ArchiveReader,
    ArchiveWriter,
    artifact_member,
    describe_member,
    member_header,
    padding,
)
from bullet_graph.captures.entry import ARTIFACTS_NAME, Entry, OpenedEntry
from bullet_graph.captures.files import CHUNK_BYTES, copy_hashed, file_errors, make_folder, open_regular
from bullet_graph.captures.locks import build_lock
from bullet_graph.captures.manifest import Artifact, Manifest
from bullet_graph.captures.manifest_file import MAX_MANIFEST_BYTES, manifest_bytes, parse_manifest
from bullet_graph.captures.signing import SIGNATURE_BYTES, require_signature, sign
from bullet_graph.captures.store import CaptureStore
from bullet_graph.errors import CacheError

MAX_TOTAL_BYTES = 64 * 1024**3
"""Of the artifacts of an archive together."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import brought.

    Attributes:
        entry: in the store.
        is_new: it was not there before, or damaged, or held something else.
        is_signed: the archive carries a signature, whether or not it was to be checked.
    """

    entry: Entry
    is_new: bool
    is_signed: bool


def export_entry(
    opened: OpenedEntry,
    file: Path,
    *,
    sign_key: Path | None = None,
    on_bytes: Callable[[int], object] | None = None,
) -> None:
    """Write an entry into one file, whole or not at all; a file that exists is replaced.

    The same entry gives the same bytes.

    Args:
        sign_key: an Ed25519 private key in PEM; None leaves the archive unsigned.
        on_bytes: told how many more bytes of the artifacts are written.

    Raises:
        CacheError: the file cannot be written, the key cannot be used, or an artifact changed meanwhile.
    """
    manifest = opened.entry.manifest
    text = manifest_bytes(manifest)
    signature = None if sign_key is None else sign(text, sign_key)
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with file_errors(f"cannot export entry {manifest.entry_id} to {file}"), ExitStack() as undo:
        undo.callback(draft.unlink, missing_ok=True)
        with draft.open("wb") as raw:
            writer = ArchiveWriter(raw)
            _write_member(writer, MANIFEST_MEMBER, text)
            if signature is not None:
                _write_member(writer, SIGNATURE_MEMBER, signature)
            for index, artifact in enumerate(manifest.artifacts):
                _write_artifact(writer, index, artifact, opened.path(artifact.name), on_bytes)
            writer.finish()
            raw.flush()
            os.fsync(raw.fileno())
        draft.replace(file)


def import_archive(
    store: CaptureStore,
    file: Path,
    *,
    trusted_keys: Sequence[Path] = (),
    tell: Callable[[str], None],
    on_bytes: Callable[[int], object] | None = None,
) -> Imported:
    """Place an exported entry into the store after all of it was checked; memory stays bounded.

    Args:
        trusted_keys: Ed25519 public keys in PEM, one of which must have signed it; empty asks for no signature.
        tell: given a line when another process is at work on the same entry.
        on_bytes: told how many more bytes of the artifacts are read.

    Raises:
        CacheError: anything in the file is not as :func:`export_entry` writes it, the signature does not hold, or
            the store has no room; the store is as it was.
    """
    with (
        file_errors(f"cannot import {file} into {store.root}"),
        open_regular(file) as raw,
    ):
        reader = ArchiveReader(raw)
        try:
            manifest, signature, first = _read_head(reader, trusted_keys)
        except CacheError as error:
            raise _refused(file, error) from error
        store.make_folders()
        _require_room(store.root, manifest)

        def waiting() -> None:
            tell(f"another process is at work on entry {manifest.entry_id}: waiting for that to end")

        with build_lock(store.lock_file(manifest.entry_id), on_wait=waiting), ExitStack() as undo:
            there = _intact(store, manifest)
            if there is not None:
                return Imported(there, is_new=False, is_signed=signature is not None)
            staged = store.staging / f"{manifest.entry_id}.import"
            shutil.rmtree(staged, ignore_errors=True)
            undo.callback(shutil.rmtree, staged, ignore_errors=True)
            make_folder(staged / ARTIFACTS_NAME)
            try:
                _read_artifacts(reader, manifest, first, staged / ARTIFACTS_NAME, on_bytes)
            except CacheError as error:
                raise _refused(file, error) from error
            return Imported(store.place(manifest, staged), is_new=True, is_signed=signature is not None)


def _write_member(writer: ArchiveWriter, name: str, data: bytes) -> None:
    writer.write(member_header(name, len(data)) + data + padding(len(data)))


def _write_artifact(
    writer: ArchiveWriter,
    index: int,
    artifact: Artifact,
    path: Path,
    on_bytes: Callable[[int], object] | None,
) -> None:
    writer.write(member_header(artifact_member(index), artifact.num_bytes))
    left = artifact.num_bytes
    with open_regular(path) as source:
        while chunk := source.read(CHUNK_BYTES):
            writer.write(chunk)
            left -= len(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    if left != 0:
        raise CacheError(f"{path} changed while it was exported: export it again")
    writer.write(padding(artifact.num_bytes))


def _read_head(reader: ArchiveReader, trusted_keys: Sequence[Path]) -> tuple[Manifest, bytes | None, bytes]:
    """The manifest, the signature if there is one, and the header that follows them."""
    header = reader.read_exactly(BLOCK_BYTES)
    # The one size that nothing foretells.
    size = _octal(header[124:135])
    if size is None or header != member_header(MANIFEST_MEMBER, size):
        raise CacheError(f"it does not begin with a manifest: {describe_member(header, MANIFEST_MEMBER)}")
    if size > MAX_MANIFEST_BYTES:
        raise CacheError(f"its manifest has {size} bytes, more than {MAX_MANIFEST_BYTES}")
    text = _read_content(reader, size)
    following = reader.read_exactly(BLOCK_BYTES)
    signature = None
    if following == member_header(SIGNATURE_MEMBER, SIGNATURE_BYTES):
        signature = _read_content(reader, SIGNATURE_BYTES)
        following = reader.read_exactly(BLOCK_BYTES)
    # Before anything in it is parsed.
    if trusted_keys:
        require_signature(text, signature, trusted_keys)
    return parse_manifest(text, MANIFEST_MEMBER), signature, following


def _read_artifacts(
    reader: ArchiveReader,
    manifest: Manifest,
    header: bytes,
    folder: Path,
    on_bytes: Callable[[int], object] | None,
) -> None:
    for index, artifact in enumerate(manifest.artifacts):
        if header != member_header(artifact_member(index), artifact.num_bytes):
            raise CacheError(describe_member(header, artifact_member(index)))
        target = folder / artifact.path
        make_folder(target.parent)
        _, sha256 = copy_hashed(_Member(reader, artifact.num_bytes, on_bytes), target)
        if sha256 != artifact.sha256:
            raise CacheError(f"{artifact.path} has another checksum than the manifest says")
        _require_padding(reader, artifact.num_bytes)
        header = reader.read_exactly(BLOCK_BYTES)
    if header + reader.read_exactly(len(END) - BLOCK_BYTES) != END:
        raise CacheError(describe_member(header, "its end"))
    reader.require_end()


class _Member:
    """The content of one member, as a file."""

    def __init__(
        self, reader: ArchiveReader, num_bytes: int, on_bytes: Callable[[int], object] | None
    ) -> None:
        self._reader, self._left, self._on_bytes = reader, num_bytes, on_bytes

    def read(self, num_bytes: int, /) -> bytes:
        if self._left == 0:
            return b""
        data = self._reader.read(min(num_bytes, self._left))
        if not data:
            raise CacheError("it is truncated")
        self._left -= len(data)
        if self._on_bytes is not None:
            self._on_bytes(len(data))
        return data


def _read_content(reader: ArchiveReader, num_bytes: int) -> bytes:
    data = reader.read_exactly(num_bytes)
    _require_padding(reader, num_bytes)
    return data


def _require_padding(reader: ArchiveReader, num_bytes: int) -> None:
    expected = padding(num_bytes)
    if reader.read_exactly(len(expected)) != expected:
        raise CacheError("there is something between two members")


def _require_room(root: Path, manifest: Manifest) -> None:
    if manifest.num_bytes > MAX_TOTAL_BYTES:
        raise CacheError(
            f"its artifacts have {manifest.num_bytes} bytes together, more than the {MAX_TOTAL_BYTES} accepted"
        )
    free = shutil.disk_usage(root).free
    if manifest.num_bytes > free:
        raise CacheError(
            f"it needs {manifest.num_bytes} bytes in {root}, which has {free}: make room, or use `capture prune`"
        )


def _intact(store: CaptureStore, manifest: Manifest) -> Entry | None:
    """The entry where the store has the very same, whole."""
    if not os.path.lexists(store.folder(manifest.entry_id)):
        return None
    try:
        entry = store.read(manifest.entry_id)
    except CacheError:
        return None
    return None if entry.manifest != manifest or entry.check() else entry


def _octal(digits: bytes) -> int | None:
    try:
        return int(digits, 8)
    except ValueError:
        return None


def _refused(file: Path, error: CacheError) -> CacheError:
    return CacheError(f"{file} is refused, and nothing of it is placed into the cache: {error}")
