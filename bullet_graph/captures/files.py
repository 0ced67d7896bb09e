"""Files that survive a crash, and their checksums."""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Protocol

from bullet_graph.captures.manifest import Artifact
from bullet_graph.errors import CacheError


class Reader(Protocol):
    """Something to read bytes from."""

    def read(self, num_bytes: int, /) -> bytes:
        """Up to so many bytes; none at the end."""


CHUNK_BYTES = 1024**2
_MAX_HASHING_THREADS = 8
_FOLDER_MODE = 0o700
"""A cache is code: nobody but its owner is to write it."""


@contextmanager
def file_errors(doing: str) -> Iterator[None]:
    """Turn what the file system refuses into a CacheError that begins with ``doing``."""
    try:
        yield
    except OSError as error:
        raise CacheError(f"{doing}: {error}") from error


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, for the owner alone."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make the names in a folder and all folders below durable."""
    for below, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(below))


def write_durably(path: Path, data: bytes) -> None:
    """Write or replace a small file: whole or not at all, whenever the machine stops. One process at a time."""
    # The same name each time: what a killed process left is overwritten.
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading that is no link, no device and no pipe.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    # O_NONBLOCK: a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def copy_hashed(source: Reader, target: Path) -> tuple[int, str]:
    """Copy to a new file, made durable or not at all; returns its size and SHA-256.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    hashed, num_bytes = hashlib.sha256(), 0
    with target.open("xb") as file:
        try:
            while chunk := source.read(CHUNK_BYTES):
                hashed.update(chunk)
                file.write(chunk)
                num_bytes += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            target.unlink()
            raise
    return num_bytes, hashed.hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with one file of an entry.

    Attributes:
        path: below the folder of artifacts.
        artifact: whose file it is; None for a file that no artifact lists.
        problem: in words, with the path.
    """

    path: str
    artifact: Artifact | None
    problem: str


def check_files(folder: Path, artifacts: Sequence[Artifact]) -> tuple[Damage, ...]:
    """Compare the files below a folder with what they should be, by checksum; several at a time.

    Hashing runs at gigabytes a second on a processor with SHA instructions, so there is no quicker check by size.
    """
    irregular, found = _walk(folder)
    expected = {artifact.path for artifact in artifacts}
    extra = [
        Damage(path, None, f"{path} is not listed in the manifest")
        for path in sorted((found | irregular) - expected)
    ]
    # hashlib lets other threads run.
    with ThreadPoolExecutor(min(_MAX_HASHING_THREADS, os.cpu_count() or 1)) as pool:
        problems = list(pool.map(lambda artifact: _problem(folder, artifact, found, irregular), artifacts))
    damaged = zip(artifacts, problems, strict=True)
    return (
        *(Damage(artifact.path, artifact, problem) for artifact, problem in damaged if problem is not None),
        *extra,
    )


def _problem(folder: Path, artifact: Artifact, found: set[str], irregular: set[str]) -> str | None:
    path = artifact.path
    if path in irregular:
        return f"{path} is a link or a special file, not a regular one"
    if path not in found:
        return f"{path} is missing"
    try:
        num_bytes = (folder / path).stat().st_size
        if num_bytes != artifact.num_bytes:
            return f"{path} has {num_bytes} bytes instead of {artifact.num_bytes}"
        if hash_file(folder / path) != artifact.sha256:
            return f"{path} has another checksum than when it was built"
    except OSError as error:
        return f"{path} cannot be read ({error})"
    return None


def _walk(folder: Path) -> tuple[set[str], set[str]]:
    """Paths below a folder: of all that is neither file nor folder, links among them, and of regular files."""
    irregular: set[str] = set()
    regular: set[str] = set()
    waiting = [] if folder.is_symlink() else [folder]
    while waiting:
        inside = waiting.pop()
        try:
            entries = list(os.scandir(inside))
        except OSError:
            # Its files are missing then.
            continue
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            else:
                is_file = entry.is_file(follow_symlinks=False)
                (regular if is_file else irregular).add(path.relative_to(folder).as_posix())
    return irregular, regular
