"""Loads what a user gives as ``--trace``: a trace file, a shipped excerpt, or a synthetic workload.

Readers skip blank lines. They refuse a row with an empty prompt or no output, because no engine can replay it.
"""

import csv
import dataclasses
import itertools
import re
import reprlib
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from bullet_graph.errors import WorkloadError, first_problem, io_errors
from bullet_graph.workloads.synthetic import CHAT_THINK_S, SYNTHETIC_NAMES, synthetic_workload
from bullet_graph.workloads.workload import Tokenize, TurnBefore, Workload, WorkloadRequest

AZURE_EXCERPTS = ("conv", "code")
"""The first 1,000 requests of these traces are shipped with the package."""

DEFAULT_SYNTHETIC_REQUESTS = 1000

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 10**9
_HASHED_TOKENS = 512
"""Tokens that each of Mooncake's ``hash_ids`` stands for."""


def load_workload(spec: str, *, num_requests: int | None, seed: int = 0, tokenize: Tokenize | None = None) -> Workload:
    """Load a workload by name or from a file.

    Args:
        spec: ``azure:NAME`` (a shipped excerpt), ``synthetic:NAME``, or a file: ``.csv`` (Azure LLM inference trace),
            ``.json`` (ShareGPT) or ``.jsonl`` (Mooncake).
        num_requests: take the first N, and read no further; None takes the whole trace, or
            ``DEFAULT_SYNTHETIC_REQUESTS`` of a synthetic workload, which can be made longer, and which ``seed`` (at
            least 0) decides. It also decides how long the users of a ShareGPT file think.
        tokenize: counts the tokens of a ShareGPT file; the other sources need none.

    Raises WorkloadError for an unknown name, an unreadable file, a malformed row (with its line), too few requests.
    """
    if num_requests is not None and num_requests < 1:
        raise WorkloadError(f"the number of requests must be at least 1, got {num_requests}")
    family, _, name = spec.partition(":")
    if family == "synthetic":
        made = partial(synthetic_workload, name, seed=seed)
        if num_requests is not None:
            return made(num_requests)
        return dataclasses.replace(made(DEFAULT_SYNTHETIC_REQUESTS), longer=made)
    if family == "azure":
        if name not in AZURE_EXCERPTS:
            raise WorkloadError(f"unknown excerpt {spec!r}: use azure:{' or azure:'.join(AZURE_EXCERPTS)}")
        with resources.as_file(resources.files(__package__) / "data" / f"azure_{name}.csv") as path:
            return Workload(spec, _take(_azure_requests(path), num_requests, path))
    path = Path(spec)
    match path.suffix.lower():
        case ".csv":
            requests = _azure_requests(path)
        case ".jsonl":
            requests = _mooncake_requests(path)
        case ".json":
            if tokenize is None:
                raise WorkloadError(
                    f"{path}: a ShareGPT file holds text, so a tokenizer is required to count its tokens and none "
                    "was given; use a model folder with a tokenizer.json"
                )
            requests = _sharegpt_requests(path, tokenize, seed)
        case _:
            names = [f"azure:{n}" for n in AZURE_EXCERPTS] + [f"synthetic:{n}" for n in SYNTHETIC_NAMES]
            raise WorkloadError(
                f"{spec!r} is no workload: give a file ending in .csv (Azure), .json (ShareGPT) or .jsonl "
                f"(Mooncake), or one of {', '.join(names)}"
            )
    return Workload(path.name, _take(requests, num_requests, path))


def _take(requests: Iterator[WorkloadRequest], num_requests: int | None, path: Path) -> tuple[WorkloadRequest, ...]:
    taken = tuple(itertools.islice(requests, num_requests and min(num_requests, sys.maxsize)))
    if not taken:
        raise WorkloadError(f"{path}: at least one request is required, the file holds none")
    if num_requests is not None and len(taken) < num_requests:
        raise WorkloadError(
            f"{path}: {num_requests} requests were asked for, the file holds {len(taken)}; ask for fewer"
        )
    return taken


def _azure_requests(path: Path) -> Iterator[WorkloadRequest]:
    """Rows of Azure's traces of 2023 and 2024; ``fromisoformat`` drops digits beyond the microsecond."""
    rows = _csv_rows(path)
    where, header = next(rows, (f"{path}, line 1", []))
    columns = ",".join(_AZURE_COLUMNS)
    if tuple(header) != _AZURE_COLUMNS:
        raise _wrong(where, f"the header {columns} is required", ",".join(header))
    first: datetime | None = None
    previous_s = 0.0
    for where, row in rows:
        if len(row) != len(_AZURE_COLUMNS):
            raise _wrong(where, f"{len(_AZURE_COLUMNS)} columns ({columns}) are required", len(row))
        try:
            time = datetime.fromisoformat(row[0])
            first = first or time
            arrival_s = (time - first).total_seconds()
        except (ValueError, TypeError) as error:
            # TypeError: a time with an offset from UTC beside one without.
            form = "TIMESTAMP must be a time such as 2023-11-16 18:17:03.9799600"
            raise _wrong(where, form, row[0], error) from error
        previous_s = _in_order(arrival_s, previous_s, "TIMESTAMP", where)
        # int() also takes signs, underscores and the digits of other scripts.
        lengths = [int(text) if re.fullmatch(r"[0-9]{1,10}", text) else text for text in row[1:]]
        prompt, output = map(_tokens, lengths, _AZURE_COLUMNS[1:], (where, where))
        yield WorkloadRequest(prompt, output, arrival_s)


def _csv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    # Line by line: an open quote is an error of its own line, and does not swallow those after it.
    for where, line in _lines(path):
        if line.strip():
            try:
                yield where, [field.strip() for field in next(csv.reader([line], strict=True))]
            except csv.Error as error:
                raise _wrong(where, f"a row of CSV is required ({error})", line) from error


class _MooncakeRow(BaseModel):
    # Beyond the limit a float no longer holds whole milliseconds.
    timestamp: Annotated[float, Field(strict=True, ge=0, le=2**53)]
    input_length: Annotated[int, Field(strict=True, ge=1, le=_MOST_TOKENS)]
    output_length: Annotated[int, Field(strict=True, ge=1, le=_MOST_TOKENS)]
    hash_ids: tuple[Annotated[int, Field(strict=True, ge=0, lt=2**64)], ...] = ()


def _mooncake_requests(path: Path) -> Iterator[WorkloadRequest]:
    """A JSON object per line with ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), ``hash_ids``."""
    first_ms: float | None = None
    previous_s = 0.0
    for where, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = _MooncakeRow.model_validate_json(line)
        except ValidationError as error:
            raise WorkloadError(f"{where}: {first_problem(error)}") from error
        # A last id may stand for fewer tokens.
        if len(row.hash_ids) > -(-row.input_length // _HASHED_TOKENS):
            most = f"at most one of hash_ids for each {_HASHED_TOKENS} tokens of input_length={row.input_length}"
            raise _wrong(where, f"{most} is required", len(row.hash_ids))
        first_ms = row.timestamp if first_ms is None else first_ms
        previous_s = _in_order((row.timestamp - first_ms) / 1e3, previous_s, "timestamp", where)
        pieces = (row.hash_ids, _HASHED_TOKENS) if row.hash_ids else ()
        yield WorkloadRequest(row.input_length, row.output_length, previous_s, None, *pieces)


class _Turn(BaseModel):
    speaker: str = Field(alias="from")
    value: str


class _Conversation(BaseModel):
    conversations: list[_Turn]


def _sharegpt_requests(path: Path, tokenize: Tokenize, seed: int) -> Iterator[WorkloadRequest]:
    """A request for each ``human`` turn and the first ``gpt`` turn after it, until one of their texts is empty."""
    # The published data set has thousands of conversations without such a pair, or with an empty text in it.
    try:
        records = TypeAdapter(list[_Conversation]).validate_json("".join(line for _, line in _lines(path)))
    except ValidationError as error:
        problem = f"a JSON list of conversations is required, 0 the first; {first_problem(error)}"
        raise WorkloadError(f"{path}: {problem}") from error
    generator = np.random.Generator(np.random.PCG64(seed))
    num_requests = 0
    for record in records:
        turns = iter(record.conversations)
        before: TurnBefore | None = None
        while True:
            prompt = next((turn.value for turn in turns if turn.speaker == "human"), "")
            output = next((turn.value for turn in turns if turn.speaker == "gpt"), "")
            prompt_ids, output_tokens = tuple(tokenize(prompt)), len(tokenize(output))
            if not (prompt and output and prompt_ids and output_tokens):
                break
            prompt_tokens = len(prompt_ids) + (0 if before is None else before.num_tokens)
            yield WorkloadRequest(prompt_tokens, output_tokens, None, prompt_ids, follows=before)
            # The data set has no times.
            think_s = CHAT_THINK_S.at(np.array(generator.standard_normal())).item()
            before = TurnBefore(num_requests, prompt_tokens + output_tokens, think_s)
            num_requests += 1


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line, line end included, after the words that name its place in an error."""
    with io_errors("a readable file is required", WorkloadError), path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                yield where, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise WorkloadError(f"{where}: UTF-8 text is required ({error})") from error


def _tokens(value: object, name: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        raise _wrong(where, f"{name} must be a whole number of tokens from 1 to {_MOST_TOKENS}", value)
    return value


def _in_order(arrival_s: float, previous_s: float, name: str, where: str) -> float:
    if arrival_s < previous_s:
        raise WorkloadError(
            f"{where}: {name} must not be earlier than in the row before, found {previous_s - arrival_s:g} s "
            "earlier; sort the file by it"
        )
    return arrival_s


def _wrong(where: str, required: str, found: object, error: Exception | None = None) -> WorkloadError:
    short = reprlib.Repr()
    short.maxstring = 80
    return WorkloadError(f"{where}: {required}, found {short.repr(found)}{f' ({error})' if error else ''}")
