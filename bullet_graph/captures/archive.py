"""Entries as single files: export, signed on request, and an import that trusts nothing it reads.

The file is a gzip-compressed tar: ``manifest.json``, ``manifest.sig`` if it is signed, then ``files/000000`` and so on
in the manifest's order. No name in the archive becomes a path; paths come from the manifest, which checks them.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from bullet_graph.captures.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, Manifest, StoredFile
from bullet_graph.captures.store import FILES_NAME, CaptureStore, Entry
from bullet_graph.errors import CacheError, io_errors
from bullet_graph.files import draft_of, open_regular

MANIFEST_MEMBER = "manifest.json"
SIGNATURE_MEMBER = "manifest.sig"
SIGNATURE_BYTES = 64

_MAX_KEY_BYTES = 64 * 1024
_CONTEXT = b"bullet_graph capture cache manifest v1\0"
"""Precedes the signed bytes, so that a signature holds for nothing else that the same key signs."""

_BLOCK_BYTES = tarfile.BLOCKSIZE
# Of shared libraries, level 4 leaves 34 % at 60 MiB/s; level 6 leaves 33 % at 26 MiB/s.
_LEVEL = 4


def export_entry(entry: Entry, file: Path, *, sign_key: Path | None = None) -> None:
    """Write an open entry (:meth:`CaptureStore.open`) into one file, as a whole or not at all; replaces a file.

    Raises CacheError where the file cannot be written, the key cannot be used, or a file changed meanwhile.
    """
    text = entry.manifest.to_bytes()
    key = None if sign_key is None else _load_key(sign_key, is_private=True)
    signature: bytes | None = None if key is None else key.sign(_CONTEXT + text)
    doing = f"cannot export entry {entry.entry_id} to {file}"
    with io_errors(doing), draft_of(file) as draft, draft.open("wb") as raw:
        # Without a name and a time: the same entry always gives the same bytes.
        with (
            gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.USTAR_FORMAT) as tar,
        ):
            _add(tar, MANIFEST_MEMBER, BytesIO(text), len(text))
            if signature is not None:
                _add(tar, SIGNATURE_MEMBER, BytesIO(signature), len(signature))
            for index, stored in enumerate(entry.manifest.files):
                with open_regular(entry.files / stored.path) as source:
                    if os.fstat(source.fileno()).st_size != stored.num_bytes:
                        raise CacheError(f"{stored.path} changed while it was exported: export it again")
                    _add(tar, _member(index), source, stored.num_bytes)
        raw.flush()
        os.fsync(raw.fileno())


def import_archive(
    store: CaptureStore, file: Path, *, trusted_keys: Sequence[Path] = (), tell: Callable[[str], None]
) -> tuple[Entry, bool]:
    """Place an exported entry into the store after all of it was checked. Memory stays bounded, nothing is loaded.

    One of the ``trusted_keys`` must have signed it; without any, no signature is required. Returns the entry in the
    store; and whether it is new, since the store did not have it, or had it damaged or rejected.

    Raises CacheError where the file is not exactly as :func:`export_entry` writes it, the signature does not hold, or
    the store has no room. The store is then unchanged.
    """
    with io_errors(f"cannot import {file} into {store.root}"), open_regular(file) as raw:
        try:
            return _import(store, gzip.GzipFile(fileobj=raw), trusted_keys, tell)
        except (CacheError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CacheError(f"{file} is refused, and nothing of it is placed into the store: {error}") from error


def _import(
    store: CaptureStore, packed: gzip.GzipFile, trusted_keys: Sequence[Path], tell: Callable[[str], None]
) -> tuple[Entry, bool]:
    header = _next(packed)
    if header is None or header.name != MANIFEST_MEMBER or header.size > MAX_MANIFEST_BYTES:
        raise CacheError(f"it must begin with {MANIFEST_MEMBER} of at most {MAX_MANIFEST_BYTES} bytes")
    text, header = _content(packed, header.size), _next(packed)
    signature = None
    if header is not None and (header.name, header.size) == (SIGNATURE_MEMBER, SIGNATURE_BYTES):
        signature, header = _content(packed, header.size), _next(packed)
    # Before anything in it is parsed.
    if trusted_keys:
        _require_signature(text, signature, trusted_keys)
    manifest = Manifest.parse(text, MANIFEST_MEMBER)
    with store.building(manifest.entry_id, tell=tell) as staged:
        free = shutil.disk_usage(store.root).free
        if manifest.num_bytes > free:
            raise CacheError(f"it needs {manifest.num_bytes} bytes in {store.root}, which has {free}: make room")
        for index, stored in enumerate(manifest.files):
            if header is None or (header.name, header.size) != (_member(index), stored.num_bytes):
                found = "its end" if header is None else f"{header.name!r:.100} of {header.size} bytes"
                raise CacheError(f"{_member(index)} of {stored.num_bytes} bytes is required, found {found}")
            _extract(packed, stored, staged / FILES_NAME)
            header = _next(packed)
        if header is not None:
            raise CacheError(f"{header.name!r:.100} is not listed in the manifest")
        # The zeros that fill the last record of a tar; more of them would only keep this process busy.
        if packed.read(tarfile.RECORDSIZE).strip(b"\0") or packed.read(1):
            raise CacheError("there is something after its end")
        entry = store.whole(manifest.entry_id)
        if entry is not None and entry.manifest == manifest:
            return entry, False
        return store.place(manifest, staged), True


def _member(index: int) -> str:
    return f"files/{index:06d}"


def _add(tar: tarfile.TarFile, name: str, source: IO[bytes], num_bytes: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    tar.addfile(info, source)


def _next(packed: gzip.GzipFile) -> tarfile.TarInfo | None:
    """The next member's header; None at the end. Each header is read as it is: no links, no extended headers."""
    block = _read(packed, _BLOCK_BYTES)
    if block == bytes(_BLOCK_BYTES):
        return None
    try:
        header = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise CacheError(f"a header is damaged ({error})") from error
    if header.type != tarfile.REGTYPE or header.size < 0:
        raise CacheError(f"member {header.name!r:.100} is no regular file")
    return header


def _content(packed: gzip.GzipFile, num_bytes: int) -> bytes:
    data = _read(packed, num_bytes)
    _read(packed, -num_bytes % _BLOCK_BYTES)
    return data


def _extract(packed: gzip.GzipFile, stored: StoredFile, folder: Path) -> None:
    target = folder / stored.path
    target.parent.mkdir(parents=True, exist_ok=True)
    hashed, left = hashlib.sha256(), stored.num_bytes
    with target.open("xb") as file:
        while left:
            chunk = _read(packed, min(left, CHUNK_BYTES))
            hashed.update(chunk)
            file.write(chunk)
            left -= len(chunk)
    if hashed.hexdigest() != stored.sha256:
        raise CacheError(f"{stored.path} has another checksum than the manifest says")
    _read(packed, -stored.num_bytes % _BLOCK_BYTES)


def _read(packed: gzip.GzipFile, num_bytes: int) -> bytes:
    data = packed.read(num_bytes)
    if len(data) != num_bytes:
        raise CacheError("it is truncated")
    return data


# ---- signatures: Ed25519 (RFC 8032), by the cryptography package ----


def _require_signature(manifest: bytes, signature: bytes | None, key_files: Sequence[Path]) -> None:
    keys = [_load_key(file, is_private=False) for file in key_files]
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra

    if signature is None:
        raise CacheError("a signature by a trusted key is required, but it is not signed: export it with --sign-key")
    for key in keys:
        try:
            key.verify(signature, _CONTEXT + manifest)
            return
        except InvalidSignature:
            continue
    names = ", ".join(map(str, key_files))
    raise CacheError(f"none of the trusted keys ({names}) made its signature, or it was changed since")


def _load_key(file: Path, *, is_private: bool) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise CacheError(
            "signatures need the cryptography package, which is not installed: pip install 'bullet-graph[sign]'"
        ) from error
    with io_errors(f"cannot read the key {file}"), file.open("rb") as opened:
        pem = opened.read(_MAX_KEY_BYTES)
    try:
        if is_private:
            key: object = serialization.load_pem_private_key(pem, password=None)
        else:
            key = serialization.load_pem_public_key(pem)
    # TypeError: the private key is encrypted.
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise CacheError(f"the key {file} cannot be used, unencrypted PEM is required: {error}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey if is_private else ed25519.Ed25519PublicKey):
        kind, make = ("private", "genpkey -algorithm ed25519") if is_private else ("public", "pkey -pubout")
        raise CacheError(f"the key {file} is no Ed25519 {kind} key: make one with `openssl {make}`")
    return key
