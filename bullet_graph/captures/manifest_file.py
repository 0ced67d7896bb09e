"""A manifest's file: versioned JSON with a checksum, read strictly."""

import json
import math
from dataclasses import asdict, fields
from typing import Any, NoReturn

from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint, digest
from bullet_graph.captures.manifest import REBUILD, Artifact, Manifest
from bullet_graph.errors import CacheError

FORMAT = "bullet_graph capture cache"
VERSION = 1

MAX_MANIFEST_BYTES = 16 * 1024**2


def manifest_bytes(manifest: Manifest) -> bytes:
    """The manifest as the JSON text of its file, with a checksum over its content."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": manifest.fingerprint.values,
        "plan": manifest.plan,
        "artifacts": [asdict(artifact) for artifact in manifest.artifacts],
        "self_check": manifest.self_check,
        "created_utc": manifest.created_utc,
        "provenance": manifest.provenance,
    }
    text = json.dumps({**content, "checksum": digest(content)}, indent=1, allow_nan=False)
    return f"{text}\n".encode("ascii")


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest, strictly.

    Args:
        data: the file's content.
        where: the file, for messages.

    Raises:
        CacheError: it is damaged, of another version, or lists what must not be listed.
    """
    try:
        return _parse(data)
    except CacheError as error:
        raise CacheError(f"{where} cannot be used: {error}; {REBUILD}") from error


def artifact_from_json(value: Any, where: str) -> Artifact:
    """Read one artifact.

    Raises:
        CacheError: entries are missing, unknown or of a wrong type.
    """
    record = _record(value, {field.name for field in fields(Artifact)}, where)
    for name in ("name", "kind", "path", "sha256"):
        _require(record[name], str, f"{where}.{name}")
    _require(record["num_bytes"], int, f"{where}.num_bytes")
    seconds = record["build_seconds"]
    if type(seconds) is not int:
        _require(seconds, float, f"{where}.build_seconds")
    try:
        kind = ArtifactKind(record["kind"])
    except ValueError:
        _fail(f"{where}.kind must be one of {', '.join(ArtifactKind)}, found {record['kind']!r:.80}")
    try:
        return Artifact(**{**record, "kind": kind, "build_seconds": float(seconds)})
    except OverflowError:
        _fail(f"{where}.build_seconds is too large")


def load_json(data: bytes) -> Any:
    """Read JSON that this package wrote.

    Raises:
        CacheError: it is no JSON, has a key twice, or numbers that JSON does not know.
    """
    try:
        return json.loads(data, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
    # RecursionError: brackets within brackets, thousands deep.
    except (ValueError, RecursionError) as error:
        if isinstance(error, CacheError):
            raise
        _fail(f"it is not valid JSON ({error!s:.200}), perhaps truncated")


def _parse(data: bytes) -> Manifest:
    if len(data) > MAX_MANIFEST_BYTES:
        _fail(f"it has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
    content = load_json(data)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        _fail(f'a JSON object with "format": "{FORMAT}" is required; this is something else')
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        hint = ": use the bullet-graph that wrote it, or a newer one" if _is_newer(version) else ""
        _fail(f"version {VERSION} of the format is required, found {version!r:.80}{hint}")
    names = {"format", "version", "checksum", *(field.name for field in fields(Manifest))}
    record = _record(content, names, "the manifest")
    checksum = record.pop("checksum")
    if checksum != digest(record):
        _fail("its checksum is not that of its content: it is damaged or was edited")
    _require(record["artifacts"], list, "artifacts")
    _require(record["created_utc"], str, "created_utc")
    components = record["fingerprint"]
    _require(components, dict, "fingerprint")
    for name, value in components.items():
        _require(value, str, f"fingerprint.{name}")
    return Manifest(
        fingerprint=Fingerprint.of(components),
        plan=record["plan"],
        artifacts=tuple(
            artifact_from_json(value, f"artifacts[{index}]")
            for index, value in enumerate(record["artifacts"])
        ),
        self_check=record["self_check"],
        created_utc=record["created_utc"],
        provenance=record["provenance"],
    )


def _record(value: Any, names: set[str], where: str) -> dict[str, Any]:
    _require(value, dict, where)
    if missing := names - value.keys():
        _fail(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := value.keys() - names:
        _fail(f"{where} has unknown entries: {', '.join(sorted(unknown))!r:.200}")
    return dict(value)


def _require(value: Any, kind: type, where: str) -> None:
    # Not isinstance: true is no number here.
    if type(value) is not kind:
        _fail(f"{where} must be of type {kind.__name__}, found {value!r:.80}")


def _is_newer(version: object) -> bool:
    return type(version) is int and version > VERSION


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _fail("an object has a key twice")
    return found


def _finite(text: str) -> float:
    # JSON's 1e999 is Python's infinity.
    number = float(text)
    return number if math.isfinite(number) else _no_constant(text)


def _no_constant(name: str) -> NoReturn:
    _fail(f"it holds {name} where a finite number is required")


def _fail(problem: str) -> NoReturn:
    raise CacheError(problem)
