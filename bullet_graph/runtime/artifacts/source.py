"""Where artifacts are taken from."""

from pathlib import Path
from typing import Protocol

from bullet_graph.captures.fingerprint import ArtifactKind
from bullet_graph.captures.manifest import Artifact


class ArtifactSource(Protocol):
    """An opened entry of the store, or one under construction."""

    def of_kind(self, kind: ArtifactKind) -> tuple[Artifact, ...]:
        """The artifacts of a kind."""

    def path(self, name: str) -> Path:
        """Where one of them lies; nothing may be written there."""


def path_of(source: ArtifactSource, kind: ArtifactKind, name: str) -> Path | None:
    """Where an artifact lies; None where there is none of this name."""
    if all(artifact.name != name for artifact in source.of_kind(kind)):
        return None
    return source.path(name)


def data_of(source: ArtifactSource, kind: ArtifactKind, name: str) -> bytes | None:
    """What an artifact holds; None where there is none of this name."""
    path = path_of(source, kind, name)
    return None if path is None else path.read_bytes()
