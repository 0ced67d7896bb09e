"""Who may touch an entry: one builder at a time, and nobody removes what is in use.

Both are the kernel's locks on open files (flock), so they end with the process that holds them, however it ends.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from bullet_graph.errors import CacheError

_POLL_S = 0.1


@contextmanager
def build_lock(file: Path, *, on_wait: Callable[[], None] | None) -> Iterator[None]:
    """Hold the lock of an entry's builder.

    Args:
        file: the lock's, in a folder that exists.
        on_wait: called once when another process holds it, before waiting for that; None does not wait.

    Raises:
        CacheError: another process holds it and ``on_wait`` is None, or the file system knows no such locks.
        OSError: the file cannot be made.
    """
    _require_flock(file)
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if on_wait is None:
            raise CacheError(f"another process is at work on it (it holds {file}): wait for that") from None
        on_wait()
        lock.acquire(poll_interval=_POLL_S)
    try:
        yield
    finally:
        lock.release()


class InUse:
    """A mark that an entry is in use: a shared lock on its manifest, for which read permission is enough.

    Args:
        manifest: the entry's manifest file.

    Raises:
        FileNotFoundError: there is none, or it was removed just now.
        OSError: it cannot be opened or locked.
    """

    def __init__(self, manifest: Path) -> None:
        self._descriptor: int | None = os.open(manifest, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            # Waits for a removal under way, which is over in no time.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            there, here = os.stat(manifest), os.fstat(self._descriptor)
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
                raise FileNotFoundError(f"{manifest} was replaced just now")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the mark up; a second time does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def unused(manifest: Path) -> Iterator[bool]:
    """Whether nobody uses the entry; while the block runs, nobody starts to.

    Raises:
        OSError: the manifest is not there, or cannot be locked.
    """
    # Some network file systems give an exclusive lock to writers only.
    flags = os.O_RDWR if os.access(manifest, os.W_OK) else os.O_RDONLY
    descriptor = os.open(manifest, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _require_flock(file: Path) -> None:
    """filelock's stand-in where there is no flock would outlive a killed process."""
    with file.open("ab") as probe:
        try:
            fcntl.flock(probe, fcntl.LOCK_UN)
        except OSError as error:
            raise CacheError(
                f"builders of a cache take turns by flock, which the file system of {file.parent} does not know "
                f"({error}): put the cache on another one with --cache-dir"
            ) from error
