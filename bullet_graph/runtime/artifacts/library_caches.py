"""The cache folders of Inductor and Triton: set aside for a start, taken from and put into a capture cache."""

import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bullet_graph.captures.builder import Build
from bullet_graph.captures.files import file_errors
from bullet_graph.captures.fingerprint import ArtifactKind
from bullet_graph.runtime.artifacts.source import ArtifactSource

_GROUP_PREFIX = "__grp__"
"""Begins the names of Triton's files that name a kernel's other files, by absolute path."""


@dataclass(frozen=True, slots=True)
class LibraryCache:
    """A library's cache folder, as an artifact.

    Attributes:
        name: of the artifacts' folder.
        kind: theirs.
        variable: of the environment, in which the library looks for its folder.
        unwanted: its subfolders that hold nothing a start needs.
    """

    name: str
    kind: ArtifactKind
    variable: str
    unwanted: frozenset[str] = frozenset()


INDUCTOR = LibraryCache(
    "inductor", ArtifactKind.TORCH_COMPILE, "TORCHINDUCTOR_CACHE_DIR", unwanted=frozenset({"locks"})
)
TRITON = LibraryCache("triton", ArtifactKind.TRITON, "TRITON_CACHE_DIR")
LIBRARY_CACHES = (INDUCTOR, TRITON)


@contextmanager
def caches_below(folder: Path) -> Iterator[None]:
    """Have Inductor and Triton keep their caches below ``folder`` while the block runs.

    The variables that they take them from are put back as they were.
    """
    before = {cache.variable: os.environ.get(cache.variable) for cache in LIBRARY_CACHES}
    try:
        for cache in LIBRARY_CACHES:
            (folder / cache.name).mkdir(parents=True, exist_ok=True)
            os.environ[cache.variable] = str(folder / cache.name)
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


@contextmanager
def triton_hashed_meanwhile() -> Iterator[None]:
    """Have a thread work out what Triton's cache keys begin with, which Triton keeps; the block goes on meanwhile.

    Triton hashes itself for them at the first kernel of a process: 0.3 s, most of it without the interpreter's lock.
    """
    from triton.runtime.cache import triton_key  # noqa: PLC0415 - published for Linux only

    thread = threading.Thread(target=triton_key, name="bullet-graph-triton-key")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def collect(build: Build, cache: LibraryCache, folder: Path, *, build_seconds: float) -> None:
    """Add what is in a library's cache folder to a build; what it has by that name stays.

    Args:
        folder: the library's.
        build_seconds: what making all of it took.
    """
    with file_errors(f"cannot read {folder}"):
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and _is_wanted(cache.unwanted, path.relative_to(folder))
        ]
        added = [(path, f"{cache.name}/{path.relative_to(folder).as_posix()}") for path in files]
        added = [(path, name) for path, name in added if name not in build]
        for path, name in added:
            seconds = build_seconds / len(added)
            data = path.read_bytes()
            if path.name.startswith(_GROUP_PREFIX):
                data = _relative_group(data)
            build.add_bytes(name, cache.kind, data, path=name, build_seconds=seconds)


def restore(source: ArtifactSource, cache: LibraryCache, folder: Path) -> int:
    """Copy what a source has of a library's cache into a folder, as far as it is missing there; returns how many files.

    Each file appears whole or not at all, and after those that it names.
    """
    wanted = [
        artifact for artifact in source.of_kind(cache.kind) if artifact.name.startswith(f"{cache.name}/")
    ]
    copied = 0
    with file_errors(f"cannot copy captures to {folder}"):
        for artifact in sorted(wanted, key=lambda artifact: _is_group(artifact.name)):
            target = folder / artifact.name.removeprefix(f"{cache.name}/")
            if target.exists():
                continue
            data = source.path(artifact.name).read_bytes()
            if _is_group(artifact.name):
                data = _absolute_group(data, target.parent)
            _write_whole(target, data)
            copied += 1
    return copied


def _is_wanted(unwanted: frozenset[str], path: Path) -> bool:
    parts = path.parts
    # Triton's and Inductor's unfinished files.
    unfinished = any(part.startswith("tmp.") or part.endswith((".tmp", ".lock")) for part in parts)
    return not unfinished and parts[0] not in unwanted and path.name != "lock"


def _is_group(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_GROUP_PREFIX)


def _relative_group(data: bytes) -> bytes:
    return _with_paths(data, lambda path: os.path.basename(path))


def _absolute_group(data: bytes, folder: Path) -> bytes:
    # The names of files beside it, whatever a manifest with a right checksum says.
    return _with_paths(data, lambda path: str(folder / os.path.basename(path)))


def _with_paths(data: bytes, change: Callable[[str], str]) -> bytes:
    group = json.loads(data)
    group["child_paths"] = {name: change(path) for name, path in group["child_paths"].items()}
    return json.dumps(group).encode()


def _write_whole(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"tmp.{secrets.token_hex(8)}")
    try:
        draft.write_bytes(data)
        # Shared libraries are mapped, none is executed by the kernel's own loader.
        draft.chmod(0o700 if target.suffix == ".so" else 0o600)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
