"""The folder of capture caches: its entries, the one that fits, and what keeps two processes apart.

An entry is the folder ``entries/ID`` with ``manifest.json`` and ``files/``. It is built in ``staging/ID`` and renamed
into place as a whole, so a killed builder leaves nothing that counts. The kernel's locks (flock) keep processes apart;
they end with their process. A builder holds ``locks/ID.lock``; whoever uses an entry holds a shared lock on its
manifest, for which read permission is enough.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from bullet_graph.captures.manifest import (
    MAX_MANIFEST_BYTES,
    REBUILD,
    Difference,
    Manifest,
    check_files,
    list_files,
    open_regular,
)
from bullet_graph.errors import CacheError

MANIFEST_NAME = "manifest.json"
FILES_NAME = "files"
REJECTION_NAME = "rejected"

_MAX_REASON_CHARACTERS = 500
_FOLDER_MODE = 0o700
"""A cache is code: only its owner may write it."""


@contextmanager
def file_errors(doing: str) -> Iterator[None]:
    """Turn an OSError of the block into a CacheError that begins with ``doing``."""
    try:
        yield
    except OSError as error:
        raise CacheError(f"{doing}: {error}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry whose manifest was read; its files are not yet checked.

    Attributes:
        folder: the entry's folder.
        manifest: its contents.
        last_used: time of the last start from it, or of its build.
        rejection: why a start found it to compute something else than the model; None otherwise.
    """

    folder: Path
    manifest: Manifest
    last_used: datetime
    rejection: str | None = None

    @property
    def entry_id(self) -> str:
        """Its name in the store."""
        return self.manifest.entry_id

    @property
    def files(self) -> Path:
        """The folder of its files; nothing may be written there."""
        return self.folder / FILES_NAME

    def problems(self) -> tuple[str, ...]:
        """Why it must not be used: files that are not as listed, or a rejection. Hashes every file."""
        rejected = () if self.rejection is None else (f"it was rejected: {self.rejection}",)
        return (*rejected, *check_files(self.files, self.manifest.files))


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    """An entry whose manifest cannot be used, and why."""

    entry_id: str
    problem: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the store has for a fingerprint and a plan.

    Attributes:
        hit: the entry that fits, or None.
        others: the other entries with their differences, the most similar first.
        damaged: entries that cannot be read.
    """

    hit: Entry | None
    others: tuple[tuple[Entry, tuple[Difference, ...]], ...]
    damaged: tuple[DamagedEntry, ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """An entry that was to be removed.

    Attributes:
        entry_id: its name.
        num_bytes: of its files; None where unknown.
        reason: why it was to be removed.
        kept_because: why it is still there; None where it is gone.
    """

    entry_id: str
    num_bytes: int | None
    reason: str
    kept_because: str | None


def default_root() -> Path:
    """This user's folder of capture caches."""
    return user_cache_path("bullet_graph") / "captures"


class CaptureStore:
    """Entries below a folder, which need not exist yet.

    Whoever can write the folder decides which code an engine runs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        """The folder of an entry, which need not exist."""
        return self.root / "entries" / name

    @property
    def is_open_to_all(self) -> bool:
        """Whether every user of the machine can write the folder."""
        with suppress(OSError):
            return any(path.stat().st_mode & 0o002 for path in (self.root, self.root / "entries"))
        return False

    # ---- reading ----

    def entries(self) -> tuple[tuple[Entry, ...], tuple[DamagedEntry, ...]]:
        """All entries, the last used first; and those whose manifest cannot be used."""
        good: list[Entry] = []
        damaged: list[DamagedEntry] = []
        with file_errors(f"cannot list the capture caches in {self.root}"):
            try:
                names = sorted(os.listdir(self.root / "entries"))
            except FileNotFoundError:
                names = []
        for name in names:
            try:
                good.append(self.read(name))
            except CacheError as error:
                # Removed meanwhile, or damaged.
                if os.path.lexists(self.folder(name)):
                    damaged.append(DamagedEntry(name, str(error)))
        good.sort(key=lambda entry: entry.last_used, reverse=True)
        return tuple(good), tuple(damaged)

    def read(self, name: str) -> Entry:
        """An entry by its name.

        Raises:
            CacheError: there is none, or its manifest cannot be used.
        """
        folder = self.folder(name)
        where = folder / MANIFEST_NAME
        with file_errors(f"entry {name} of {self.root} cannot be read"):
            try:
                with open_regular(where) as file:
                    data, status = file.read(MAX_MANIFEST_BYTES + 1), os.fstat(file.fileno())
            except FileNotFoundError:
                raise CacheError(f"there is no entry {name} in {self.root}, or it has no manifest") from None
        manifest = Manifest.parse(data, str(where))
        if manifest.entry_id != name or folder.is_symlink():
            raise CacheError(
                f"{where} is the manifest of entry {manifest.entry_id}, or its folder a link; {REBUILD}"
            )
        rejection = None
        if os.path.lexists(folder / REJECTION_NAME):
            rejection = "its mark of rejection cannot be read"
            with suppress(OSError, ValueError):
                text = (folder / REJECTION_NAME).read_text(encoding="utf-8")[:_MAX_REASON_CHARACTERS]
                rejection = text if text.isprintable() else rejection
        return Entry(folder, manifest, datetime.fromtimestamp(status.st_mtime, UTC), rejection)

    def find(self, fingerprint: Mapping[str, str], plan: Mapping[str, Any] | None) -> Lookup:
        """Look for an entry; ``plan`` None accepts any plan."""
        entries, damaged = self.entries()
        compared = [(entry, entry.manifest.differences(fingerprint, plan)) for entry in entries]
        compared = [
            (
                entry,
                found
                if entry.rejection is None
                else (*found, Difference("self_check", entry.rejection, None)),
            )
            for entry, found in compared
        ]
        hit = next((entry for entry, differences in compared if not differences), None)
        others = sorted((item for item in compared if item[1]), key=lambda item: len(item[1]))
        return Lookup(hit, tuple(others), damaged)

    @contextmanager
    def open(self, entry: Entry) -> Iterator[Entry]:
        """Check every file of an entry, and keep it from being removed during the block.

        Raises:
            CacheError: it was removed or rejected, or a file is missing, changed or not listed; names all of them.
        """
        where = entry.folder / MANIFEST_NAME
        with _locked(
            where, f"entry {entry.entry_id} cannot be opened, it may have been removed", shared=True
        ):
            # Read again under the lock: a rebuild may have taken its place.
            entry = self.read(entry.folder.name)
            if problems := entry.problems():
                raise CacheError(f"entry {entry.entry_id} is damaged: {'; '.join(problems)}; {REBUILD}")
            with suppress(OSError):
                # The file's time says when the entry was last used; a read-only store does without.
                os.utime(where)
            yield entry

    # ---- writing ----

    @contextmanager
    def building(self, name: str, *, tell: Callable[[str], None]) -> Iterator[Path]:
        """Hold an entry's build lock, and give an empty folder to build it in, which is gone after the block.

        A second builder waits here; it should then look whether the entry is there.

        Args:
            tell: told a line when this has to wait.

        Raises:
            CacheError: the store cannot be written.
        """
        with file_errors(f"cannot build into {self.root}"):
            for part in ("entries", "staging", "locks"):
                _make_folder(self.root / part)
            lock = self._lock_file(name)
            lock.touch()
        with _locked(
            lock,
            f"cannot build entry {name}",
            on_wait=lambda: tell(f"another process builds entry {name}: waiting for it to end"),
        ):
            staged = self.root / "staging" / name
            with file_errors(f"cannot build into {self.root}"):
                # What a killed builder left counts for nothing.
                shutil.rmtree(staged, ignore_errors=True)
                _make_folder(staged / FILES_NAME)
            try:
                yield staged
            finally:
                shutil.rmtree(staged, ignore_errors=True)

    def whole(self, name: str) -> Entry | None:
        """The entry of this name where it can be used."""
        with suppress(CacheError):
            entry = self.read(name)
            return None if entry.problems() else entry
        return None

    def place(self, manifest: Manifest, staged: Path) -> Entry:
        """Make a staged folder the entry, at once; an earlier one of its name makes way. Needs its build lock.

        Raises:
            CacheError: the earlier one is in use, or the store cannot be written.
        """
        with file_errors(f"cannot finish entry {manifest.entry_id}"):
            (staged / MANIFEST_NAME).write_bytes(manifest.to_bytes())
            self._discard(manifest.entry_id)
            staged.rename(self.folder(manifest.entry_id))
        return self.read(manifest.entry_id)

    def commit(self, staged: Path, **fields: Any) -> Entry:
        """As :meth:`place`, of the files in the staged folder.

        Args:
            fields: of the manifest, but for its files.
        """
        with file_errors(f"cannot read {staged}"):
            files = list_files(staged / FILES_NAME)
        return self.place(Manifest(files=files, **fields), staged)

    def reject(self, entry: Entry, reason: str) -> bool:
        """Mark an entry as not to be used until it is built anew; False where the store cannot be written."""
        with suppress(OSError):
            shown = "".join(c if c.isprintable() else "?" for c in reason)[:_MAX_REASON_CHARACTERS]
            (entry.folder / REJECTION_NAME).write_text(shown, encoding="utf-8")
            return True
        return False

    def remove(self, name: str) -> None:
        """Remove an entry.

        Raises:
            CacheError: it is not there, in use, being built, or cannot be removed.
        """
        if "/" in name or name in ("", ".", "..") or not os.path.lexists(self.folder(name)):
            raise CacheError(f"there is no entry {name!r} in {self.root}")
        with file_errors(f"cannot remove entry {name}"):
            _make_folder(self.root / "locks")
            _make_folder(self.root / "staging")
            self._lock_file(name).touch()
            with _locked(self._lock_file(name), f"cannot remove entry {name}: another process builds it"):
                self._discard(name)

    def prune(
        self,
        *,
        max_age: timedelta | None = None,
        max_total_bytes: int | None = None,
        misfit: Callable[[Entry], bool] | None = None,
        dry_run: bool,
    ) -> tuple[Pruned, ...]:
        """Remove damaged entries, and those that any of the rules applies to; then what killed builders left.

        Args:
            max_age: entries that were not used for longer.
            max_total_bytes: those used longest ago, until the others fit.
            misfit: entries for which it is true.
            dry_run: remove nothing, only say what would be removed.
        """
        entries, damaged = self.entries()
        doomed: list[tuple[str, int | None, str]] = [(entry.entry_id, None, "damaged") for entry in damaged]
        kept_bytes, now = 0, datetime.now(UTC)
        for entry in entries:
            size, reason = entry.manifest.num_bytes, None
            if max_age is not None and now - entry.last_used > max_age:
                reason = f"not used for {(now - entry.last_used).days} days"
            elif misfit is not None and misfit(entry):
                reason = "it does not fit this machine"
            elif max_total_bytes is not None and kept_bytes + size > max_total_bytes:
                reason = f"over the total of {max_total_bytes} bytes"
            if reason is None:
                kept_bytes += size
            else:
                doomed.append((entry.entry_id, size, reason))
        pruned = []
        for name, num_bytes, reason in doomed:
            kept_because = None
            if not dry_run:
                try:
                    self.remove(name)
                except CacheError as error:
                    kept_because = str(error)
            pruned.append(Pruned(name, num_bytes, reason, kept_because))
        if not dry_run:
            self._clear_staging()
        return tuple(pruned)

    def _lock_file(self, name: str) -> Path:
        return self.root / "locks" / f"{name}.lock"

    def _discard(self, name: str) -> None:
        """Remove an entry that may be there; the caller holds its build lock."""
        folder = self.folder(name)
        if not os.path.lexists(folder):
            return
        gone = self.root / "staging" / f"{name}.{secrets.token_hex(4)}"
        where = folder / MANIFEST_NAME
        if where.is_file() and not where.is_symlink():
            with _locked(where, f"entry {name} is in use by a running engine: stop that first"):
                folder.rename(gone)
        else:
            # Nobody can have opened it.
            folder.rename(gone)
        _delete(gone)

    def _clear_staging(self) -> None:
        staging = self.root / "staging"
        for left in staging.iterdir() if staging.is_dir() else ():
            lock = self._lock_file(left.name.partition(".")[0])
            with suppress(CacheError, OSError), _locked(lock, "it is being built"):
                _delete(left)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, for the owner alone."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(
    path: Path, refusal: str, *, shared: bool = False, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold the kernel's lock on a file that exists.

    Args:
        refusal: message where the lock cannot be had.
        shared: others may hold it as well; waits for an exclusive holder, which is quick.
        on_wait: called before waiting for other holders; None does not wait for an exclusive lock.

    Raises:
        CacheError: somebody holds it, the file is gone, or the file system knows no such locks.
    """
    # Some network file systems give an exclusive lock to writers only.
    mode = os.O_RDONLY if shared or not os.access(path, os.W_OK) else os.O_RDWR
    with file_errors(refusal):
        descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        with file_errors(refusal):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    raise CacheError(refusal) from None
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            there, here = os.stat(path), os.fstat(descriptor)
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
                raise FileNotFoundError(f"{path} was replaced just now")
        yield
    finally:
        os.close(descriptor)
