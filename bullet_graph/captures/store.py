"""The folder of capture caches: its entries, the one that fits, and what keeps two processes apart.

An entry is the folder ``entries/ID`` with ``manifest.json`` and ``files/``. It is built in ``staging/ID`` and renamed
into place as a whole, so a killed builder leaves nothing that counts. The kernel's locks (flock) end with their
process: a builder holds ``locks/ID.lock``, and whoever uses an entry holds a shared lock on its manifest, for which
read permission is enough.
"""

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from bullet_graph.captures import manifest as manifests
from bullet_graph.errors import CacheError, io_errors
from bullet_graph.files import open_regular

MANIFEST_NAME = "manifest.json"
FILES_NAME = "files"
REJECTION_NAME = "rejected"

_MAX_REASON_BYTES = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry whose manifest was read; its files are not yet checked.

    Attributes:
        last_used: time of the last start from it, or of its build.
        rejection: why a start found it to compute something else than the model; None otherwise.
        copy: folder with a copy of the files that was made while they were checked; None for none.
    """

    folder: Path
    manifest: manifests.Manifest
    last_used: datetime
    rejection: str | None = None
    copy: Path | None = None

    @property
    def entry_id(self) -> str:
        """Its name in the store."""
        return self.manifest.entry_id

    @property
    def files(self) -> Path:
        """The folder of its files; nothing may be written there."""
        return self.folder / FILES_NAME if self.copy is None else self.copy

    def problems(self, copy_to: Path | None = None) -> tuple[str, ...]:
        """Why it must not be used: files that are not as listed, or a rejection. Hashes every file, and may copy it."""
        rejected = () if self.rejection is None else (f"it was rejected: {self.rejection}",)
        return (*rejected, *manifests.check_files(self.folder / FILES_NAME, self.manifest.files, copy_to))


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    """An entry whose manifest cannot be used, and why."""

    entry_id: str
    problem: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the store has for a fingerprint and a plan: the nearest entry, and in what it differs."""

    nearest: Entry | None
    differences: tuple[manifests.Difference, ...]
    damaged: tuple[DamagedEntry, ...]

    @property
    def hit(self) -> Entry | None:
        """The entry that fits, or None."""
        return None if self.differences else self.nearest


@dataclass(frozen=True, slots=True)
class Pruned:
    """An entry that was to be removed, and why; ``kept_because`` says why it is still there."""

    entry_id: str
    num_bytes: int | None
    reason: str
    kept_because: str | None


def default_root() -> Path:
    """This user's folder of capture caches."""
    return user_cache_path("bullet_graph") / "captures"


class CaptureStore:
    """Entries below a folder, which need not exist yet. Whoever can write it decides which code an engine runs."""

    def __init__(self, root: Path) -> None:
        self.root, self._entries, self._staging = root, root / "entries", root / "staging"

    def require_trusted(self) -> None:
        """Raise CacheError where other users than this one and root could decide what the engine runs."""
        for folder in (self.root, self._entries):
            with io_errors(f"cannot look at {folder}"), suppress(FileNotFoundError):
                found = folder.stat()
                if found.st_uid not in (0, os.geteuid()):
                    raise CacheError(
                        f"{folder} must belong to this user or root, for an engine runs the code in it, but belongs "
                        f"to user {found.st_uid}: chown it, or import the entry into a folder of your own"
                    )
                if found.st_mode & stat.S_IWOTH:
                    raise CacheError(
                        f"every user can write {folder}, and so decide what the engine runs: chmod o-w, then look at "
                        "what it holds"
                    )

    # ---- reading ----

    def entries(self) -> tuple[tuple[Entry, ...], tuple[DamagedEntry, ...]]:
        """All entries, the last used first; and those whose manifest cannot be used."""
        good, damaged, names = list[Entry](), list[DamagedEntry](), list[str]()
        with io_errors(f"cannot list the capture caches in {self.root}"), suppress(FileNotFoundError):
            names = sorted(os.listdir(self._entries))
        for name in names:
            try:
                good.append(self.read(name))
            except CacheError as error:
                # Removed meanwhile, or damaged.
                if os.path.lexists(self._entries / name):
                    damaged.append(DamagedEntry(name, str(error)))
        good.sort(key=lambda entry: entry.last_used, reverse=True)
        return tuple(good), tuple(damaged)

    def read(self, name: str) -> Entry:
        """An entry by its name; CacheError where there is none, or its manifest cannot be used."""
        folder, rejection = self._entries / name, None
        where = folder / MANIFEST_NAME
        with io_errors(f"entry {name} of {self.root} cannot be read, or has no manifest"):
            with open_regular(where) as file:
                data, status = file.read(manifests.MAX_MANIFEST_BYTES), os.fstat(file.fileno())
            with suppress(FileNotFoundError), open_regular(folder / REJECTION_NAME) as file:
                rejection = manifests.printable(file.read(_MAX_REASON_BYTES).decode(errors="replace"))
        manifest = manifests.Manifest.parse(data, str(where))
        if manifest.entry_id != name or folder.is_symlink():
            raise CacheError(
                f"{where} is the manifest of entry {manifest.entry_id}, or its folder a link; {manifests.REBUILD}"
            )
        return Entry(folder, manifest, datetime.fromtimestamp(status.st_mtime, UTC), rejection)

    def find(self, fingerprint: Mapping[str, str], plan: Mapping[str, Any]) -> Lookup:
        """Look for the entry of a fingerprint and a plan."""
        entries, damaged = self.entries()
        found: list[tuple[Entry, tuple[manifests.Difference, ...]]] = []
        for entry in entries:
            differences = entry.manifest.differences(fingerprint, plan)
            if entry.rejection is not None:
                differences += (manifests.Difference("self_check", entry.rejection, None),)
            found.append((entry, differences))
        nearest, differences = min(found, key=lambda item: len(item[1]), default=(None, ()))
        return Lookup(nearest, differences, damaged)

    @contextmanager
    def open(self, entry: Entry, copy_to: Path | None = None) -> Iterator[Entry]:
        """Check every file of an entry, and keep it from being removed during the block.

        With ``copy_to``, an empty folder of this user's own, the yielded entry has its files there: what is loaded is
        what was checked, whoever changes the store meanwhile.
        Raises CacheError where it is gone or rejected, or a file is missing, changed or not listed; names all of them.
        """
        where = entry.folder / MANIFEST_NAME
        with _use_lock(where, fcntl.LOCK_SH, f"entry {entry.entry_id} cannot be opened, it may have been removed"):
            # Read again under the lock: a rebuild may have taken its place.
            entry = self.read(entry.folder.name)
            if problems := entry.problems(copy_to):
                raise CacheError(f"entry {entry.entry_id} is damaged: {'; '.join(problems)}; {manifests.REBUILD}")
            with suppress(OSError):
                # The file's time says when the entry was last used; a read-only store does without.
                os.utime(where)
            yield replace(entry, copy=copy_to)

    # ---- writing ----

    @contextmanager
    def building(self, name: str, *, tell: Callable[[str], None]) -> Iterator[Path]:
        """Hold an entry's build lock, and give an empty folder to build it in, which is gone after the block.

        A second builder is told so and waits here; it should then look whether the entry is there. Raises CacheError
        where the store cannot be written.
        """
        with self._build_lock(name, lambda: tell(f"another process builds entry {name}: waiting for it to end")):
            staged = self._staging / name
            with io_errors(f"cannot build into {self.root}"):
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

    def place(self, manifest: manifests.Manifest, staged: Path) -> Entry:
        """Make a staged folder the entry, at once; an earlier one of its name makes way. Needs its build lock.

        Raises CacheError where the earlier one is in use, or the store cannot be written.
        """
        with io_errors(f"cannot finish entry {manifest.entry_id}"):
            (staged / MANIFEST_NAME).write_bytes(manifest.to_bytes())
            self._discard(manifest.entry_id)
            staged.rename(self._entries / manifest.entry_id)
        return self.read(manifest.entry_id)

    def reject(self, entry: Entry, reason: str) -> bool:
        """Mark an entry as not to be used until it is built anew; False where the store cannot be written."""
        with suppress(OSError):
            (entry.folder / REJECTION_NAME).write_text(reason, encoding="utf-8")
            return True
        return False

    def remove(self, name: str) -> None:
        """Remove an entry; CacheError where it is not there, in use, being built, or cannot be removed."""
        if "/" in name or name in ("", ".", "..") or not os.path.lexists(self._entries / name):
            raise CacheError(f"there is no entry {name!r} in {self.root}")
        with io_errors(f"cannot remove entry {name}"), self._build_lock(name):
            self._discard(name)

    def prune(
        self, *, max_age: timedelta | None = None, max_total_bytes: int | None = None, dry_run: bool
    ) -> tuple[Pruned, ...]:
        """Remove damaged entries, and those that a rule applies to; then what killed builders left.

        These are the entries not used for longer than ``max_age``, and those used longest ago until the others fit into
        ``max_total_bytes``. ``dry_run`` removes nothing.
        """
        entries, damaged = self.entries()
        doomed: list[tuple[str, int | None, str]] = [(entry.entry_id, None, "damaged") for entry in damaged]
        total_bytes, now = sum(entry.manifest.num_bytes for entry in entries), datetime.now(UTC)
        for entry in reversed(entries):
            size, age = entry.manifest.num_bytes, now - entry.last_used
            if max_age is not None and age > max_age:
                unused = f"{age.days} days" if age.days > 1 else f"{age // timedelta(hours=1)} hours"
                doomed.append((entry.entry_id, size, f"not used for {unused}"))
            elif max_total_bytes is not None and total_bytes > max_total_bytes:
                doomed.append((entry.entry_id, size, f"over the total of {max_total_bytes} bytes"))
            else:
                break
            total_bytes -= size
        pruned = []
        for name, num_bytes, reason in doomed:
            kept_because = None
            if not dry_run:
                try:
                    self.remove(name)
                except CacheError as error:
                    kept_because = str(error)
            pruned.append(Pruned(name, num_bytes, reason, kept_because))
        for left in self._staging.iterdir() if self._staging.is_dir() and not dry_run else ():
            with suppress(CacheError, OSError), self._build_lock(left.name.partition(".")[0]):
                _delete(left)
        return tuple(pruned)

    @contextmanager
    def _build_lock(self, name: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold an entry's build lock; without ``on_wait``, which is called before waiting, never wait."""
        lock = FileLock(self.root / "locks" / f"{name}.lock")
        with io_errors(f"cannot write into {self.root}"):
            for folder in (self._entries, self._staging, self.root / "locks"):
                _make_folder(folder)
            try:
                held = lock.acquire(timeout=0)
            except Timeout:
                if on_wait is None:
                    raise CacheError(f"entry {name} is kept: another process builds it") from None
                on_wait()
                held = lock.acquire()
        with held:
            yield

    def _discard(self, name: str) -> None:
        """Remove an entry that may be there; the caller holds its build lock."""
        folder = self._entries / name
        if not os.path.lexists(folder):
            return
        gone = self._staging / f"{name}.{secrets.token_hex(4)}"
        where = folder / MANIFEST_NAME
        refusal = f"entry {name} is in use by a running engine: stop that first"
        # Without a manifest, nobody can have opened it.
        can_be_open = where.is_file() and not where.is_symlink()
        with _use_lock(where, fcntl.LOCK_EX | fcntl.LOCK_NB, refusal) if can_be_open else nullcontext():
            folder.rename(gone)
        _delete(gone)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents for the owner alone: a capture cache is code."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _use_lock(manifest: Path, operation: int, refusal: str) -> Iterator[None]:
    """Hold a lock (flock) on an entry's manifest; a CacheError that begins with ``refusal`` where that fails."""
    # Some network file systems give an exclusive lock to writers only; a manifest may be read-only all the same.
    mode = os.O_RDWR if operation != fcntl.LOCK_SH and os.access(manifest, os.W_OK) else os.O_RDONLY
    with io_errors(refusal):
        descriptor = os.open(manifest, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        with io_errors(refusal):
            fcntl.flock(descriptor, operation)
            if not os.path.samestat(os.stat(manifest), os.fstat(descriptor)):
                raise FileNotFoundError(f"{manifest} was replaced just now")
        yield
    finally:
        os.close(descriptor)
