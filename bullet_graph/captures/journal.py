"""What an interrupted build had finished: one line a finished artifact, each with its own checksum."""

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bullet_graph.captures.files import write_durably
from bullet_graph.captures.fingerprint import digest
from bullet_graph.captures.manifest import Artifact
from bullet_graph.captures.manifest_file import VERSION, artifact_from_json, load_json
from bullet_graph.errors import CacheError


class Journal:
    """The journal of one build.

    Args:
        path: of its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, artifacts: Iterable[Artifact]) -> None:
        """Write it anew, with what is finished already."""
        builder = {
            "version": VERSION,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_durably(self.path, b"".join(map(_line, (builder, *map(asdict, artifacts)))))

    def append(self, artifact: Artifact) -> None:
        """Add an artifact whose file is durable."""
        with self.path.open("ab") as file:
            file.write(_line(asdict(artifact)))
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> tuple[Artifact, ...]:
        """The artifacts that were finished, without lines that are torn; none where there is no journal."""
        header, *records = self._records() or ({},)
        if header.get("version") != VERSION:
            return ()
        return tuple(artifact_from_json(record, str(self.path)) for record in records)

    def builder(self) -> str:
        """Who writes it, in words; empty where it does not tell."""
        header, *_ = self._records() or ({},)
        if not {"pid", "host", "since_utc"} <= header.keys():
            return ""
        return f"process {header['pid']} on {header['host']} since {header['since_utc']}"

    def _records(self) -> list[dict[str, Any]]:
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [record for line in lines if (record := _record(line)) is not None]


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps({"record": record, "checksum": digest(record)}).encode("ascii") + b"\n"


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        content = load_json(line)
    except CacheError:
        return None
    if not isinstance(content, dict) or content.keys() != {"record", "checksum"}:
        return None
    record = content["record"]
    return record if isinstance(record, dict) and digest(record) == content["checksum"] else None
