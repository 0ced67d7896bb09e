"""Builds an entry part by part, so that a kill at any moment loses at most the part under way."""

import io
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bullet_graph.captures.entry import ARTIFACTS_NAME, Entry, OpenedEntry
from bullet_graph.captures.files import (
    Reader,
    check_files,
    copy_hashed,
    file_errors,
    make_folder,
    open_regular,
    sync_folder,
)
from bullet_graph.captures.fingerprint import (
    ALL_KINDS,
    ArtifactKind,
    Fingerprint,
    entry_id,
    plan_differences,
    stale_kinds,
)
from bullet_graph.captures.journal import Journal
from bullet_graph.captures.locks import build_lock
from bullet_graph.captures.manifest import Artifact, Manifest, check_path
from bullet_graph.captures.store import CaptureStore
from bullet_graph.errors import CacheError

_UNKNOWN_SHA256 = "0" * 64


class Build:
    """One entry under construction, or found finished; made by :func:`open_build`.

    Attributes:
        entry: the finished entry: found so, or committed; None while there is something to build.
        resumed: names of the artifacts that an earlier, interrupted build or a damaged entry had finished.
    """

    def __init__(
        self,
        store: CaptureStore,
        fingerprint: Fingerprint,
        plan: Mapping[str, Any],
        *,
        tell: Callable[[str], None],
    ) -> None:
        self.entry: Entry | None = None
        self.resumed: tuple[str, ...] = ()
        self._store, self._fingerprint, self._plan, self._tell = store, fingerprint, dict(plan), tell
        self._name = entry_id(fingerprint, plan)
        self._staging = store.staging / self._name
        self._files = self._staging / ARTIFACTS_NAME
        # Beside the folder: the folder becomes the entry as it is.
        self._journal = Journal(store.staging / f"{self._name}.journal")
        self._artifacts: dict[str, Artifact] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the artifact of this name is finished."""
        return name in self._artifacts

    def path(self, name: str) -> Path:
        """Where the finished artifact of this name lies; as :meth:`OpenedEntry.path`.

        Raises:
            CacheError: there is none.
        """
        if name not in self._artifacts:
            raise CacheError(f"entry {self._name} has no artifact {name!r} yet")
        return self._files / self._artifacts[name].path

    def of_kind(self, kind: ArtifactKind) -> tuple[Artifact, ...]:
        """The finished artifacts of a kind."""
        return tuple(artifact for artifact in self._artifacts.values() if artifact.kind is kind)

    def start(self) -> None:
        """Find out what is there already; the caller holds the entry's lock."""
        found = self._finished_entry()
        if isinstance(found, Entry):
            self.entry = found
            self._clear()
            return
        self._artifacts = self._resumable()
        self._journal.start(self._artifacts.values())
        for artifact in found:
            if artifact.name not in self._artifacts:
                with open_regular(self._store.folder(self._name) / ARTIFACTS_NAME / artifact.path) as source:
                    self._place(artifact, source)
        self.resumed = tuple(self._artifacts)

    def add_bytes(
        self, name: str, kind: ArtifactKind, data: bytes, *, path: str, build_seconds: float
    ) -> None:
        """Add an artifact; when this returns, it outlives a crash.

        Args:
            name: unique in the entry.
            kind: says what makes it stale.
            data: its content.
            path: where it lies below the entry's ``artifacts`` folder.
            build_seconds: what making it took.

        Raises:
            CacheError: the name or path is taken or impossible, or it cannot be written.
        """
        self._add(name, kind, io.BytesIO(data), path, build_seconds)

    def add_file(
        self, name: str, kind: ArtifactKind, source: Path, *, path: str, build_seconds: float
    ) -> None:
        """Add a copy of a regular file; as :meth:`add_bytes`."""
        with file_errors(f"cannot add {source} to the cache"), open_regular(source) as file:
            self._add(name, kind, file, path, build_seconds)

    def add_folder(
        self, name: str, kind: ArtifactKind, source: Path, *, path: str, build_seconds: float
    ) -> None:
        """Add every file below a folder, as artifacts ``name/RELATIVE_PATH`` that share ``build_seconds``.

        Those that are finished already are left as they are. Raises as :meth:`add_bytes`; also where the folder
        holds links or special files.
        """
        with file_errors(f"cannot add {source} to the cache"):
            inside = sorted(found for found in source.rglob("*") if found.is_symlink() or not found.is_dir())
        if not inside:
            raise CacheError(f"cannot add {source} to the cache: it holds no files")
        for file in inside:
            relative = file.relative_to(source).as_posix()
            if f"{name}/{relative}" not in self:
                self.add_file(
                    f"{name}/{relative}",
                    kind,
                    file,
                    path=f"{path}/{relative}",
                    build_seconds=build_seconds / len(inside),
                )

    def adopt(self, opened: OpenedEntry) -> tuple[str, ...]:
        """Copy from another entry what holds here as well; returns the names of the artifacts copied.

        Raises:
            CacheError: the copy cannot be written, or a file changed since the entry was checked.
        """
        theirs = opened.entry.manifest
        differences = theirs.fingerprint.differences(self._fingerprint) + plan_differences(
            theirs.plan, self._plan
        )
        usable = frozenset(ALL_KINDS) - stale_kinds(differences)
        wanted = [a for a in theirs.artifacts if a.kind in usable and a.name not in self._artifacts]
        for artifact in wanted:
            self._check_addition(artifact)
            with (
                file_errors(f"cannot copy {artifact.path} of entry {opened.entry.entry_id}"),
                open_regular(opened.path(artifact.name)) as source,
            ):
                self._place(artifact, source)
        return tuple(artifact.name for artifact in wanted)

    def commit(self, *, self_check: Mapping[str, Any] | None, provenance: Mapping[str, Any]) -> Entry:
        """Make the entry visible, at once and as a whole; a damaged one of the same name makes way.

        Args:
            self_check: what a start compares its outputs with, as a JSON object.
            provenance: of the build, as a JSON object.

        Raises:
            CacheError: it is finished already, a file has vanished, or it cannot be written.
        """
        self._require_open()
        manifest = Manifest(
            fingerprint=self._fingerprint,
            plan=self._plan,
            artifacts=tuple(self._artifacts.values()),
            self_check=self_check,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            provenance=provenance,
        )
        with file_errors(f"cannot finish entry {self._name}"):
            self.entry = self._store.place(manifest, self._staging)
            self._clear()
        return self.entry

    def waiting_for(self) -> str:
        """Who builds this entry now, as a line for people."""
        who = self._journal.builder()
        return f"entry {self._name} is being built by {who or 'another process'}: waiting for that to end"

    def _finished_entry(self) -> Entry | Collection[Artifact]:
        """The entry where it is there and whole; else what is left of it."""
        if not os.path.lexists(self._store.folder(self._name)):
            return ()
        try:
            entry = self._store.read(self._name)
        except CacheError as error:
            self._tell(f"rebuilding entry {self._name}: {error}")
            return ()
        rejected: tuple[ArtifactKind, ...] = ()
        if entry.rejection is not None:
            self._tell(f"rebuilding parts of entry {self._name}: {entry.rejection.reason}")
            rejected = entry.rejection.kinds
        damages = entry.check()
        if not damages and entry.rejection is None:
            return entry
        if damages:
            self._tell(
                f"rebuilding parts of entry {self._name}: {'; '.join(damage.problem for damage in damages)}"
            )
        damaged = {damage.artifact for damage in damages}
        return [a for a in entry.manifest.artifacts if a not in damaged and a.kind not in rejected]

    def _resumable(self) -> dict[str, Artifact]:
        """Artifacts that the journal of an interrupted build lists and whose files are whole; others are deleted."""
        listed = self._journal.read()
        damages = check_files(self._files, listed)
        for damage in damages:
            if damage.artifact is not None:
                self._tell(f"building {damage.artifact.name} of entry {self._name} again: {damage.problem}")
            (self._files / damage.path).unlink(missing_ok=True)
        damaged = {damage.artifact for damage in damages}
        return {artifact.name: artifact for artifact in listed if artifact not in damaged}

    def _clear(self) -> None:
        """Delete what a build leaves beside the entry."""
        self._journal.path.unlink(missing_ok=True)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _add(self, name: str, kind: ArtifactKind, source: Reader, path: str, build_seconds: float) -> None:
        expected = Artifact(name, kind, path, 0, _UNKNOWN_SHA256, build_seconds)
        self._check_addition(expected)
        with file_errors(f"cannot add {name} to the cache"):
            self._write(expected, source)

    def _check_addition(self, artifact: Artifact) -> None:
        self._require_open()
        check_path(artifact.path, f"artifact {artifact.name!r:.80}")
        if artifact.name in self._artifacts:
            raise CacheError(f"entry {self._name} has an artifact {artifact.name!r} already")
        if any(artifact.path == other.path for other in self._artifacts.values()):
            raise CacheError(f"entry {self._name} has an artifact at {artifact.path} already")

    def _require_open(self) -> None:
        if self.entry is not None:
            raise CacheError(f"entry {self._name} is finished: nothing can be added to it")

    def _place(self, artifact: Artifact, source: Reader) -> None:
        """Copy an artifact that was built elsewhere, whose size and checksum are known."""

        def check(written: Artifact) -> None:
            if written != artifact:
                raise CacheError(f"{artifact.path} changed while it was copied: start the build again")

        self._write(artifact, source, check)

    def _write(
        self, artifact: Artifact, source: Reader, check: Callable[[Artifact], None] = lambda _: None
    ) -> None:
        target = self._files / artifact.path
        make_folder(target.parent)
        num_bytes, sha256 = copy_hashed(source, target)
        try:
            written = replace(artifact, num_bytes=num_bytes, sha256=sha256)
            check(written)
            sync_folder(target.parent)
            self._journal.append(written)
        except BaseException:
            # An entry with a file that is not listed counts as damaged.
            target.unlink(missing_ok=True)
            raise
        self._artifacts[artifact.name] = written


@contextmanager
def open_build(
    store: CaptureStore,
    fingerprint: Fingerprint,
    plan: Mapping[str, Any],
    *,
    tell: Callable[[str], None],
) -> Iterator[Build]:
    """Build an entry, or go on with it, alone: a second builder waits here, and then finds it finished.

    A block that ends without :meth:`Build.commit` keeps what was added for the next build.

    Args:
        tell: given a line when this has to wait, and for each part that is built again because it was damaged.

    Raises:
        CacheError: the store cannot be written.
    """
    name = entry_id(fingerprint, plan)
    build = Build(store, fingerprint, plan, tell=tell)
    with ExitStack() as held:
        with file_errors(f"cannot build into {store.root}"):
            store.make_folders()
            held.enter_context(build_lock(store.lock_file(name), on_wait=lambda: tell(build.waiting_for())))
            build.start()
        yield build
