"""A batch's files: the input's rows, the part files that workers append to, and the output that is made of them."""

import hashlib
import io
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pydantic_core import from_json, to_json

from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.files import draft_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OUTPUT_NAME = "output.jsonl"

_MOST_TOKENS = 2**31 - 1
"""Stands for a chat without an output limit."""
_DEFAULT_COMPLETION_TOKENS = 16
_ENVELOPE = ("custom_id", "method", "url", "body")
_INPUT_NAME = re.compile(r"\.(parquet|(jsonl|ndjson|json)(\.(gz|bz2|lz4|zst))?)$")
_LIMITS = ("max_completion_tokens", "max_tokens")
"""Two names of one field."""


@dataclass(frozen=True)
class BatchInput:
    """The rows of an input, in its order.

    Attributes:
        custom_ids: one per row, all different; ``row-5`` for the fifth row if it has none.
        lines: the rows as JSON: ``method``, ``url`` and ``body``.
        output_tokens: [rows], int64: the most tokens that each asks for.
        digest: of all this, to tell another input.
    """

    custom_ids: list[str]
    lines: list[bytes]
    output_tokens: np.ndarray[Any, np.dtype[np.int64]]
    digest: str

    def longest_first(self, left: set[str]) -> pa.Table:
        """Those rows whose ``custom_id`` is ``left``, with the longest outputs first and then the longest prompts.

        A table with ``custom_id`` (string) and ``line`` (binary).
        """
        lengths = np.fromiter(map(len, self.lines), np.int64, len(self.lines))
        order = [int(i) for i in np.lexsort((-lengths, -self.output_tokens)) if self.custom_ids[i] in left]
        columns = [self.custom_ids[i] for i in order], [self.lines[i] for i in order]
        return pa.table(
            {"custom_id": pa.array(columns[0], pa.large_string()), "line": pa.array(columns[1], pa.large_binary())}
        )


def read_input(location: str, defaults: Mapping[str, Any] | None = None) -> BatchInput:
    """Read a batch: OpenAI's batch format, or rows that are bodies of requests (``prompt`` or ``messages``).

    ``location`` is a file, a folder of files, or a URI that pyarrow knows, such as ``s3://bucket/prompts.jsonl``. Files
    are JSON lines, perhaps compressed, or parquet. ``defaults`` are fields of bodies that leave them out. A folder
    may have other files too if their names begin with ``.`` or ``_``.

    Raises WorkloadError, with file and row, where a file cannot be read, a row has neither form, or two rows have one
    ``custom_id``. What is wrong inside a body is an error of that row alone.
    """
    ids, lines, tokens = dict[str, str](), list[bytes](), list[int]()
    digest = hashlib.blake2b(digest_size=16)
    for where, row in _rows(location):
        custom_id, request = _request(row, where, len(lines) + 1, defaults or {})
        if custom_id in ids:
            raise WorkloadError(f"{where}: each custom_id must be unique, found {custom_id!r:.80} in {ids[custom_id]}")
        ids[custom_id] = where
        lines.append(to_json(request))
        tokens.append(_output_tokens(request))
        digest.update(to_json([custom_id, request]))
    if not lines:
        raise WorkloadError(f"{location}: at least one row is required, found none")
    return BatchInput(list(ids), lines, np.array(tokens, np.int64), digest.hexdigest())


def _rows(location: str) -> Iterator[tuple[str, Any]]:
    """The rows of all files, each with its place for messages."""
    try:
        if "://" in location:
            files, path = pafs.FileSystem.from_uri(location)
        else:
            files, path = pafs.LocalFileSystem(), str(Path(location).absolute())
        found = files.get_file_info(path)
        if found.type == pafs.FileType.NotFound:
            raise WorkloadError(f"{location}: there is no such file; give a file, a folder or a URI of rows")
        paths = [path]
        if found.type == pafs.FileType.Directory:
            each = files.get_file_info(pafs.FileSelector(path, recursive=True))
            paths = sorted(info.path for info in each if info.is_file and _is_input(info.path, path))
        for path in paths:
            yield from (_parquet_rows if path.endswith(".parquet") else _json_rows)(files, path)
    except (OSError, pa.ArrowException) as error:
        raise WorkloadError(f"{location}: this input cannot be read: {error}") from error


def _is_input(path: str, folder: str) -> bool:
    if _INPUT_NAME.search(path):
        return True
    # Spark and others put such files beside theirs: _SUCCESS, .part-0.crc.
    if any(name.startswith((".", "_")) for name in path.removeprefix(folder).split("/")):
        return False
    raise WorkloadError(
        f"{path}: files of an input folder must end in .jsonl, .ndjson or .json, perhaps with .gz, .bz2, .lz4 or .zst, "
        "or in .parquet: rename it, or move it away"
    )


def _json_rows(files: pafs.FileSystem, path: str) -> Iterator[tuple[str, Any]]:
    # By its ending, pyarrow decompresses a file.
    with files.open_input_stream(path) as stream:
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, from_json(line.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
            except ValueError as error:
                raise WorkloadError(f"{where}: a JSON object is required ({error}), found {line!r:.80}") from None


def _parquet_rows(files: pafs.FileSystem, path: str) -> Iterator[tuple[str, Any]]:
    with files.open_input_file(path) as file:
        number = 0
        for batch in pq.ParquetFile(file).iter_batches():
            for cells in zip(*batch.columns, strict=True):
                number += 1
                found = {name: _value(cell) for name, cell in zip(batch.schema.names, cells, strict=True)}
                row = {name: value for name, value in found.items() if value is not None}
                if isinstance(row.get("body"), str):
                    try:
                        row["body"] = from_json(row["body"])
                    except ValueError as error:
                        raise WorkloadError(f"{path}, row {number}: `body` must be JSON ({error})") from None
                yield f"{path}, row {number}", row


def _value(cell: pa.Scalar) -> Any:
    """A cell as a value of JSON."""
    try:
        return _plain(cell.as_py())
    except UnicodeDecodeError as error:
        return [[str(error)]]  # which no field of a request takes


def _plain(value: Any) -> Any:
    """Bytes as text, and structs without nulls: they have each field of all rows."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


def _request(row: Any, where: str, number: int, defaults: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise WorkloadError(f"{where}: a JSON object is required, found {row!r:.80}")
    if "body" in row:
        if missing := [name for name in _ENVELOPE if name not in row]:
            raise WorkloadError(f"{where}: {', '.join(_ENVELOPE)} are required, {', '.join(missing)} not found")
        request = {name: row[name] for name in _ENVELOPE[1:]}
    elif "prompt" in row or "messages" in row:
        body = {name: value for name, value in row.items() if name != "custom_id"}
        request = {"method": "POST", "url": CHAT if "messages" in row else COMPLETIONS, "body": body}
    else:
        raise WorkloadError(
            f"{where}: OpenAI's batch format ({', '.join(_ENVELOPE)}), or a `prompt`, or `messages` are required, "
            f"found {', '.join(map(str, row)) or 'nothing':.200}"
        )
    custom_id = row.get("custom_id", f"row-{number}")
    if not isinstance(custom_id, str) or not custom_id:
        raise WorkloadError(f"{where}: custom_id must be a text that is not empty, found {custom_id!r:.80}")
    if isinstance(request["body"], dict):
        left_out = _LIMITS if not request["body"].keys().isdisjoint(_LIMITS) else ()
        request["body"] = {k: v for k, v in defaults.items() if k not in left_out} | request["body"]
    return custom_id, request


def _output_tokens(request: Mapping[str, Any]) -> int:
    """The most tokens that a request asks for, as far as it is valid."""
    body = request["body"] if isinstance(request["body"], dict) else {}
    default = _DEFAULT_COMPLETION_TOKENS if request["url"] == COMPLETIONS else _MOST_TOKENS
    tokens = next((each for each in map(body.get, _LIMITS) if isinstance(each, int)), default)
    samples, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not any(isinstance(each, int) for each in prompt) else 1
    return max(0, min(tokens * (samples if isinstance(samples, int) else 1) * prompts, _MOST_TOKENS))


class PartFile:
    """A file of its own for each worker, to which it appends rows: a row is there whole, or it does not count.

    Each row is one ``write`` to a file that nobody else writes. Of a worker that is killed inside it, readers see a
    last line without its end, which they leave out.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "parts" / f"{uuid.uuid4().hex}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row of the output; OSError where it has no room, and then nothing of it is there."""
        line = to_json(row) + b"\n"
        if (written := os.write(self._file, line)) < len(line):
            # The next row would go on in its line.
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(f"a row of {len(line)} bytes must be written, and {written} bytes were: is the disk full?")

    def sync(self) -> None:
        """Return when all rows are on the disk."""
        os.fdatasync(self._file)


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    offset: int
    length: int
    failed: bool
    refused: bool


class OutputFolder:
    """What a batch has written, over all its runs; a context manager that keeps others out.

    ``output.jsonl`` has each row once. Before it is whole, rows are in part files. A row that two workers have
    written, since one died between writing and reporting it, is there twice: the first without an error of the
    server's side counts.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._identity = dict(identity)
        self._places: dict[str, _Place] = {}
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Make the folder, or continue the one that is there.

        Raises ConfigError where it cannot be written, is in use, or holds the rows of another batch.
        """
        manifest = self.path / "batch.json"
        try:
            (self.path / "parts").mkdir(parents=True, exist_ok=True)
            self._held.enter_context(filelock.FileLock(self.path / ".lock", timeout=0))
            if not manifest.exists():
                with draft_of(manifest) as draft:
                    draft.write_text(json.dumps(self._identity))
            if not isinstance(found := json.loads(manifest.read_text()), dict):
                raise ValueError(f"{manifest} is damaged: give a new folder")
            other = [name for name, value in self._identity.items() if found.get(name, value) != value]
            self.refresh()
        except filelock.Timeout:
            raise ConfigError(
                f"--output {self.path}: another batch writes there: wait for it, or give another folder"
            ) from None
        except (OSError, ValueError) as error:
            self._held.close()
            raise ConfigError(f"--output {self.path} must be a folder for this batch, but: {error}") from error
        if other:
            self._held.close()
            raise ConfigError(
                f"--output {self.path} holds the rows of another batch, which differs in {', '.join(other)}: give "
                "another folder, or the same input and options again"
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def refresh(self) -> None:
        """Read which rows are written."""
        self._places.clear()
        for path in [self.path / OUTPUT_NAME, *sorted((self.path / "parts").glob("*.jsonl"))]:
            if not path.exists():
                continue
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    # A torn or damaged line is no row, which is done again.
                    with suppress(ValueError, KeyError, TypeError):
                        row = from_json(line)
                        status = row["response"]["status_code"]
                        place = _Place(path, offset, len(line), status >= 500, status >= 400)
                        known = self._places.get(row["custom_id"])
                        if line.endswith(b"\n") and (known is None or known.failed):
                            self._places[row["custom_id"]] = place
                    offset += len(line)

    @property
    def done(self) -> set[str]:
        """The ``custom_id`` of rows that need not be done again: answered, or refused for what they ask."""
        return {custom_id for custom_id, place in self._places.items() if not place.failed}

    @property
    def written(self) -> set[str]:
        """The ``custom_id`` of all rows that are there, with failures of the server's side."""
        return set(self._places)

    @property
    def num_errors(self) -> int:
        """Rows that are written with an error."""
        return sum(place.refused for place in self._places.values())

    def finish(self, custom_ids: list[str]) -> Path:
        """Write the output in this order, each row once, as a whole; then remove the part files."""
        target = self.path / OUTPUT_NAME
        parts = sorted((self.path / "parts").glob("*.jsonl"))
        with draft_of(target) as draft, ExitStack() as files, draft.open("wb") as output:
            sources = {path: files.enter_context(path.open("rb")) for path in (target, *parts) if path.exists()}
            for custom_id in custom_ids:
                place = self._places.get(custom_id)
                if place is not None:
                    sources[place.path].seek(place.offset)
                    output.write(sources[place.path].read(place.length))
            output.flush()
            os.fsync(output.fileno())
        for left in (*parts, *self.path.glob(f".{OUTPUT_NAME}.*.tmp")):  # those of a process that was killed here
            left.unlink()
        self.refresh()
        return target
