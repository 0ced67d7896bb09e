"""The folder of precomputed captures: its entries, which of them fits, and the paths of one that was checked."""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from bullet_graph.captures.entry import (
    MANIFEST_NAME,
    REJECTION_NAME,
    DamagedEntry,
    Entry,
    Lookup,
    Mismatch,
    OpenedEntry,
    Rejection,
    compare,
)
from bullet_graph.captures.files import file_errors, make_folder, sync_folder, sync_tree, write_durably
from bullet_graph.captures.fingerprint import ALL_KINDS, ArtifactKind, Fingerprint, entry_id
from bullet_graph.captures.locks import InUse, build_lock, unused
from bullet_graph.captures.manifest import REBUILD, Manifest
from bullet_graph.captures.manifest_file import MAX_MANIFEST_BYTES, manifest_bytes, parse_manifest
from bullet_graph.errors import CacheError


def default_root() -> Path:
    """Where this user's captures are kept unless told otherwise."""
    return user_cache_path("bullet_graph") / "captures"


class CaptureStore:
    """Entries below one folder, which need not exist: ``entries``, ``staging`` (being built), ``locks``, ``trash``.

    Whoever can write the folder decides what code an engine runs: it must belong to somebody trusted.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def staging(self) -> Path:
        """Where entries are built."""
        return self.root / "staging"

    @property
    def trash(self) -> Path:
        """Where entries are moved to before they are deleted."""
        return self.root / "trash"

    def folder(self, entry_id: str) -> Path:
        """Where the entry of this name lies, or would."""
        return self.root / "entries" / entry_id

    def lock_file(self, entry_id: str) -> Path:
        """The lock of whoever builds, imports or removes the entry."""
        return self.root / "locks" / f"{entry_id}.lock"

    def make_folders(self) -> None:
        """Make what a builder needs.

        Raises:
            OSError: that cannot be done.
        """
        for name in ("entries", "staging", "locks"):
            make_folder(self.root / name)

    def entries(self) -> tuple[tuple[Entry, ...], tuple[DamagedEntry, ...]]:
        """All entries, those used last first; and those whose manifest cannot be used."""
        good: list[Entry] = []
        damaged: list[DamagedEntry] = []
        with file_errors(f"cannot list the captures in {self.root}"):
            try:
                names = sorted(os.listdir(self.root / "entries"))
            except FileNotFoundError:
                names = []
        for name in names:
            try:
                good.append(self.read(name))
            except CacheError as error:
                # Removed since it was listed, or damaged.
                if os.path.lexists(self.folder(name)):
                    damaged.append(DamagedEntry(name, str(error)))
        good.sort(key=lambda entry: entry.last_used, reverse=True)
        return tuple(good), tuple(damaged)

    def read(self, name: str) -> Entry:
        """The entry of this name; its artifacts are not checked.

        Raises:
            CacheError: there is none, or its manifest cannot be used.
        """
        folder = self.folder(name)
        manifest_file = folder / MANIFEST_NAME
        with file_errors(f"entry {name} of {self.root} cannot be read"):
            try:
                status = manifest_file.lstat()
                if folder.is_symlink() or not stat.S_ISREG(status.st_mode):
                    raise CacheError(f"entry {name}: {manifest_file} is a link or no regular file; {REBUILD}")
                data = _read_up_to(manifest_file, MAX_MANIFEST_BYTES + 1)
            except FileNotFoundError:
                raise CacheError(f"there is no entry {name} in {self.root}, or it has no manifest") from None
        manifest = parse_manifest(data, str(manifest_file))
        if manifest.entry_id != name:
            raise CacheError(f"{manifest_file} is the manifest of entry {manifest.entry_id}; {REBUILD}")
        return Entry(folder, manifest, datetime.fromtimestamp(status.st_mtime, UTC), _rejection(folder))

    def find(self, fingerprint: Fingerprint, plan: Mapping[str, Any] | None) -> Lookup:
        """Look for captures that hold for a machine, a model and a plan.

        Args:
            plan: None takes any: the entry used last among those with the fingerprint.
        """
        entries, damaged = self.entries()
        hit: Entry | None = None
        mismatches: list[Mismatch] = []
        for entry in entries:
            mismatch = compare(entry, fingerprint, plan)
            if mismatch is not None:
                mismatches.append(mismatch)
            elif hit is None:
                hit = entry
        mismatches.sort(key=lambda miss: (len(miss.stale), miss.rebuild_seconds, len(miss.differences)))
        return Lookup(hit, tuple(mismatches), damaged)

    def get(self, fingerprint: Fingerprint, plan: Mapping[str, Any]) -> Entry | None:
        """The entry for exactly this, or None; one that cannot be read is an error.

        Raises:
            CacheError: it is there, but its manifest cannot be used.
        """
        name = entry_id(fingerprint, plan)
        return self.read(name) if os.path.lexists(self.folder(name)) else None

    def open(self, entry: Entry) -> OpenedEntry:
        """Check every file of an entry and keep it from being removed.

        Raises:
            CacheError: it was removed or rejected, or a file is missing, changed, or not listed; all of them are named.
        """
        manifest_file = entry.folder / MANIFEST_NAME
        with file_errors(f"entry {entry.entry_id} cannot be opened, it may have been removed"):
            mark = InUse(manifest_file)
        try:
            # Read again under the mark: a rebuild may have taken its place.
            entry = self.read(entry.folder.name)
            if damages := entry.check():
                problems = "; ".join(damage.problem for damage in damages)
                raise CacheError(f"entry {entry.entry_id} is damaged: {problems}; {REBUILD}")
            if entry.rejection is not None:
                raise CacheError(f"entry {entry.entry_id} was rejected: {entry.rejection.reason}; {REBUILD}")
        except BaseException:
            mark.release()
            raise
        with suppress(OSError):
            # The file's time says when the entry was used; a cache that only can be read has no use for it.
            os.utime(manifest_file)
        return OpenedEntry(entry, mark)

    def reject(self, entry: Entry, rejection: Rejection) -> bool:
        """Mark an entry as not to be used until its parts are built anew; False where the store cannot be written."""
        mark = {"reason": rejection.reason, "kinds": list(rejection.kinds)}
        try:
            write_durably(entry.folder / REJECTION_NAME, json.dumps(mark).encode())
        except OSError:
            return False
        return True

    def place(self, manifest: Manifest, staged: Path) -> Entry:
        """Make a folder of artifacts an entry, at once; one of the same name makes way. The caller holds its lock.

        Args:
            staged: on the store's own file system; what the manifest lists lies in its ``artifacts`` folder.

        Raises:
            CacheError: the entry of that name is in use.
            OSError: it cannot be written.
        """
        folder = self.folder(manifest.entry_id)
        write_durably(staged / MANIFEST_NAME, manifest_bytes(manifest))
        sync_tree(staged)
        self.discard(manifest.entry_id)
        staged.rename(folder)
        sync_folder(folder.parent)
        return self.read(manifest.entry_id)

    def remove(self, name: str) -> None:
        """Remove an entry, at once for all who look for it.

        Raises:
            CacheError: it is not there, in use, being built, or cannot be removed.
        """
        if "/" in name or name in ("", ".", "..") or not os.path.lexists(self.folder(name)):
            raise CacheError(f"there is no entry {name!r} in {self.root}")
        with file_errors(f"cannot remove entry {name}"):
            self.make_folders()
            with build_lock(self.lock_file(name), on_wait=None):
                self.discard(name)

    def discard(self, name: str) -> None:
        """Remove an entry if it is there; the caller holds its lock.

        Raises:
            CacheError: it is in use.
            OSError: it cannot be removed.
        """
        folder = self.folder(name)
        manifest_file = folder / MANIFEST_NAME
        if not manifest_file.is_file() or manifest_file.is_symlink():
            # Nobody can have opened it.
            if os.path.lexists(folder):
                self.throw_away(folder)
            return
        with unused(manifest_file) as is_unused:
            if not is_unused:
                raise CacheError(f"entry {name} is in use by a running engine: stop that first")
            self.throw_away(folder)

    def throw_away(self, path: Path) -> None:
        """Move something of the store out of the way at once, then delete it; the caller holds its lock."""
        make_folder(self.trash)
        path.rename(self.trash / f"{path.name}.{secrets.token_hex(8)}")
        self.empty_trash()

    def empty_trash(self) -> None:
        """Delete what was thrown away, as far as that can be done; it may have been left by a killed process."""
        for left in self.trash.iterdir() if self.trash.is_dir() else ():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _rejection(folder: Path) -> Rejection | None:
    path = folder / REJECTION_NAME
    if not os.path.lexists(path):
        return None
    try:
        mark = json.loads(_read_up_to(path, MAX_MANIFEST_BYTES))
        return Rejection(str(mark["reason"])[:500], tuple(ArtifactKind(kind) for kind in mark["kinds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Rejection("its mark of rejection cannot be read", ALL_KINDS)


def _read_up_to(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(num_bytes)
