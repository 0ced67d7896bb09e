"""Entries of the store, as found, as looked up, and as opened."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bullet_graph.captures.files import Damage, check_files
from bullet_graph.captures.fingerprint import (
    ArtifactKind,
    Difference,
    Fingerprint,
    plan_differences,
    stale_kinds,
)
from bullet_graph.captures.locks import InUse
from bullet_graph.captures.manifest import REBUILD, Artifact, Manifest
from bullet_graph.errors import CacheError

MANIFEST_NAME = "manifest.json"
ARTIFACTS_NAME = "artifacts"
REJECTION_NAME = "rejected.json"
CANARY = "self_check"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A start has found parts of an entry to compute something else than the model.

    Attributes:
        reason: what was found.
        kinds: of artifacts that are to be built anew.
    """

    reason: str
    kinds: tuple[ArtifactKind, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the store whose manifest can be read; its artifacts are not yet checked.

    Attributes:
        folder: where it lies.
        manifest: what it should hold.
        last_used: when it was opened last, or made.
        rejection: why it is not to be used; None: nothing is known against it.
    """

    folder: Path
    manifest: Manifest
    last_used: datetime
    rejection: Rejection | None = None

    @property
    def entry_id(self) -> str:
        """Its name in the store."""
        return self.manifest.entry_id

    def check(self) -> tuple[Damage, ...]:
        """Compare all files with the manifest's checksums; empty: all is well."""
        return check_files(self.folder / ARTIFACTS_NAME, self.manifest.artifacts)


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    """An entry whose manifest cannot be used.

    Attributes:
        entry_id: its name in the store.
        problem: why.
    """

    entry_id: str
    problem: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why an entry does not serve, and which of its parts would.

    Attributes:
        entry: the one that was looked at.
        differences: component by component.
        rebuild_seconds: what the stale parts took to build.
    """

    entry: Entry
    differences: tuple[Difference, ...]
    rebuild_seconds: float

    @property
    def stale(self) -> frozenset[ArtifactKind]:
        """Kinds of artifacts that have to be built anew."""
        return stale_kinds(self.differences)


def compare(entry: Entry, here: Fingerprint, plan: Mapping[str, Any] | None) -> Mismatch | None:
    """Where an entry differs from what is needed; None: nowhere.

    Args:
        plan: None takes any.
    """
    differences = entry.manifest.fingerprint.differences(here)
    if plan is not None:
        differences += plan_differences(entry.manifest.plan, plan)
    if entry.rejection is not None:
        differences += (Difference(CANARY, entry.rejection.reason, None, entry.rejection.kinds),)
    if not differences:
        return None
    return Mismatch(entry, differences, entry.manifest.build_seconds(stale_kinds(differences)))


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the store has for a fingerprint and a plan.

    Attributes:
        hit: the entry that fits exactly, or None.
        mismatches: the other entries, those that would need the shortest rebuild first.
        damaged: entries that cannot be read.
    """

    hit: Entry | None
    mismatches: tuple[Mismatch, ...]
    damaged: tuple[DamagedEntry, ...]


class OpenedEntry:
    """A checked entry, kept from being removed until :meth:`close` or the end of ``with``."""

    def __init__(self, entry: Entry, mark: InUse) -> None:
        self.entry = entry
        self._mark = mark
        self._artifacts = {artifact.name: artifact for artifact in entry.manifest.artifacts}

    def path(self, name: str) -> Path:
        """Where the artifact of this name lies.

        Raises:
            CacheError: the entry has none.
        """
        if name not in self._artifacts:
            raise CacheError(f"entry {self.entry.entry_id} has no artifact {name!r}: {REBUILD}")
        return self.entry.folder / ARTIFACTS_NAME / self._artifacts[name].path

    def of_kind(self, kind: ArtifactKind) -> tuple[Artifact, ...]:
        """The artifacts of a kind, in the order they were built."""
        return tuple(artifact for artifact in self._artifacts.values() if artifact.kind is kind)

    def close(self) -> None:
        """Let the entry be removed again."""
        self._mark.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
