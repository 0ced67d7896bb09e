"""What an entry of the cache holds, as values that are checked when they are made."""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, NoReturn

from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint, entry_id
from bullet_graph.errors import CacheError

MAX_ARTIFACTS = 20_000
MAX_ARTIFACT_BYTES = 8 * 1024**3 - 1
"""The largest size that an archive's headers can tell."""

REBUILD = "build it again with `bullet-graph capture build`"

_MAX_PART_BYTES = 255
_MAX_PATH_BYTES = 1024
_MAX_TEXT_CHARACTERS = 2000
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of an entry.

    Attributes:
        name: unique in its entry.
        kind: what it is, which also says what makes it stale.
        path: where it lies below the entry's ``artifacts`` folder, with ``/``.
        num_bytes: its size.
        sha256: of its bytes, 64 hexadecimal digits.
        build_seconds: what making it took.

    Raises:
        CacheError: a value is impossible, or the path would leave the folder.
    """

    name: str
    kind: ArtifactKind
    path: str
    num_bytes: int
    sha256: str
    build_seconds: float

    def __post_init__(self) -> None:
        check_text(self.name, "an artifact's name")
        where = f"artifact {self.name!r:.80}"
        check_path(self.path, where)
        if not 0 <= self.num_bytes <= MAX_ARTIFACT_BYTES:
            _fail(f"{where}: num_bytes must be from 0 to {MAX_ARTIFACT_BYTES}, found {self.num_bytes}")
        if not _SHA256.fullmatch(self.sha256):
            _fail(f"{where}: sha256 must be 64 hexadecimal digits, found {self.sha256!r:.80}")
        if not (math.isfinite(self.build_seconds) and self.build_seconds >= 0):
            _fail(f"{where}: build_seconds must be finite and at least 0, found {self.build_seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an entry holds, what it was built for and with.

    Attributes:
        fingerprint: what its contents depend on.
        plan: what was to be captured, as a JSON object.
        artifacts: its files, in the order they were built.
        self_check: of the outputs seen at the build, for checking them at a start; a JSON object, or None.
        created_utc: ISO 8601 with the offset +00:00.
        provenance: of the build, as a JSON object.

    Raises:
        CacheError: names or paths occur twice, one path is the folder of another, or a value is no plain JSON.
    """

    fingerprint: Fingerprint
    plan: Mapping[str, Any]
    artifacts: tuple[Artifact, ...]
    self_check: Mapping[str, Any] | None
    created_utc: str
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("plan", "self_check", "provenance"):
            _check_json(getattr(self, name), name)
        if len(self.artifacts) > MAX_ARTIFACTS:
            _fail(f"it lists {len(self.artifacts)} artifacts, more than {MAX_ARTIFACTS}")
        _check_unique([artifact.name for artifact in self.artifacts], "name")
        paths = [artifact.path for artifact in self.artifacts]
        _check_unique(paths, "path")
        folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
        if clash := folders.intersection(paths):
            _fail(f"the path {min(clash)!r:.80} is both a file and a folder")
        created = _moment(self.created_utc)
        if created is None or created.utcoffset() != timedelta(0):
            _fail(f"created_utc must be ISO 8601 with the offset +00:00, found {self.created_utc!r:.80}")

    @property
    def entry_id(self) -> str:
        """Name of the entry: 16 hexadecimal digits."""
        return entry_id(self.fingerprint, self.plan)

    @property
    def num_bytes(self) -> int:
        """Of all artifacts together."""
        return sum(artifact.num_bytes for artifact in self.artifacts)

    def build_seconds(self, kinds: Collection[ArtifactKind]) -> float:
        """What making the artifacts of these kinds took."""
        return math.fsum(artifact.build_seconds for artifact in self.artifacts if artifact.kind in kinds)


def check_path(path: str, where: str) -> None:
    """Make sure that a path stays below the folder it is joined to, whatever the platform makes of it.

    Raises:
        CacheError: it is absolute, has ``..``, or is not in its simplest form.
    """
    parts = path.split("/")
    if path.startswith("/"):
        _fail(f"{where}: the path {path!r:.80} is absolute, a relative one is required")
    if ".." in parts:
        _fail(f"{where}: the path {path!r:.80} has '..', which could lead out of the cache")
    if not path.isprintable() or "\\" in path or any(part in ("", ".") for part in parts):
        _fail(f"{where}: a relative path in its simplest form, with '/', is required, found {path!r:.80}")
    # isprintable() has refused lone surrogates, which UTF-8 cannot encode.
    if len(path.encode()) > _MAX_PATH_BYTES or any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        _fail(f"{where}: the path {path!r:.80} is too long for a file system")


def check_text(text: str, where: str) -> None:
    """Make sure that a text can be shown on a terminal.

    Raises:
        CacheError: it is empty, too long, or has control characters.
    """
    if not text.isprintable() or not 0 < len(text) <= _MAX_TEXT_CHARACTERS:
        _fail(f"{where} needs 1 to {_MAX_TEXT_CHARACTERS} printable characters, found {text!r:.80}")


def _check_json(value: Any, where: str) -> None:
    if value is None and where == "self_check":
        return
    if type(value) is not dict:
        _fail(f"{where} must be of type dict, found {value!r:.80}")
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        _fail(f"{where} must be plain JSON: {error!s:.200}")
    if plain != value:
        _fail(f"{where} must be plain JSON, with text for keys and lists for sequences")


def _check_unique(values: list[str], what: str) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            _fail(f"two artifacts have the {what} {value!r:.80}")
        seen.add(value)


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _fail(problem: str) -> NoReturn:
    raise CacheError(problem)
