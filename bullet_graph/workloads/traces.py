"""Readers of recorded traces.

Blank lines are passed over. A row that asks for an empty prompt or no output is malformed: an engine always
computes at least one token, so such a row could only be replayed as something it was not.
"""

import csv
import itertools
import json
import reprlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from bullet_graph.errors import WorkloadError
from bullet_graph.workloads.request import Tokenize, Workload, WorkloadRequest

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Header of the Azure LLM inference traces."""

MAX_TRACE_TOKENS = 10**9
"""A row that asks for more tokens than this is taken for a broken one."""

MAX_TIMESTAMP_MS = 2**53
"""The latest Mooncake timestamp: beyond it a float no longer holds whole milliseconds."""


def read_azure_csv(path: Path, num_requests: int | None = None) -> Workload:
    """Read a trace in the format of Azure's LLM inference traces (2023 and 2024).

    Args:
        path: CSV file with the header ``TIMESTAMP,ContextTokens,GeneratedTokens``; timestamps are ISO 8601
            (digits beyond the microsecond are dropped) and do not decrease.
        num_requests: take the first so many rows and read no further; None takes all.

    Raises:
        WorkloadError: with the file and line, for a file that cannot be read, a missing header, a malformed
            row, or fewer rows than asked for.
    """
    return _take(_azure_requests(path), num_requests, path)


def read_mooncake_jsonl(path: Path, num_requests: int | None = None) -> Workload:
    """Read a Mooncake trace: a JSON object a line.

    Args:
        path: file whose lines have ``timestamp`` (milliseconds, not decreasing), ``input_length`` and
            ``output_length`` (tokens); other keys, ``hash_ids`` among them, are not used.
        num_requests: take the first so many lines and read no further; None takes all.

    Raises:
        WorkloadError: with the file and line, for a file that cannot be read, a malformed line, or fewer
            lines than asked for.
    """
    return _take(_mooncake_requests(path), num_requests, path)


def read_sharegpt_json(path: Path, num_requests: int | None = None, *, tokenize: Tokenize | None) -> Workload:
    """Read conversations in ShareGPT's format; the requests have prompts and no arrival times.

    The prompt is the first ``human`` turn, the output the first ``gpt`` turn after it. Conversations without
    such a pair, or with an empty text in it, are passed over: the published data set has thousands of them.

    Args:
        path: JSON file, a list of ``{"conversations": [{"from": ..., "value": ...}, ...]}``.
        num_requests: take the first so many usable conversations; None takes all.
        tokenize: turns a text into token ids.

    Raises:
        WorkloadError: with the file and line (or the record, counted from 1), for a file that cannot be read,
            a malformed record, fewer usable conversations than asked for, or no tokenizer.
    """
    if tokenize is None:
        raise WorkloadError(
            f"{path}: a ShareGPT file holds text, so a tokenizer is required to count its tokens and none "
            "was given; use a model folder with a tokenizer.json"
        )
    return _take(_sharegpt_requests(path, tokenize), num_requests, path)


def _take(requests: Iterator[WorkloadRequest], num_requests: int | None, path: Path) -> Workload:
    taken = tuple(itertools.islice(requests, num_requests))
    if not taken:
        raise WorkloadError(f"{path}: at least one request is required, the file holds none")
    if num_requests is not None and len(taken) < num_requests:
        raise WorkloadError(
            f"{path}: {num_requests} requests were asked for, the file holds {len(taken)}; ask for fewer"
        )
    return Workload(name=path.name, requests=taken)


def _azure_requests(path: Path) -> Iterator[WorkloadRequest]:
    rows = _csv_rows(path)
    where, header = next(rows, (f"{path}, line 1", []))
    if tuple(header) != AZURE_COLUMNS:
        raise WorkloadError(
            f"{where}: the header {','.join(AZURE_COLUMNS)} is required, found {_shorten(','.join(header))}"
        )
    first: datetime | None = None
    previous_s = 0.0
    for where, row in rows:
        if len(row) != len(AZURE_COLUMNS):
            raise WorkloadError(
                f"{where}: {len(AZURE_COLUMNS)} columns ({', '.join(AZURE_COLUMNS)}) are required, "
                f"found {len(row)}"
            )
        timestamp, context, generated = row
        try:
            time = datetime.fromisoformat(timestamp)
            first = first or time
            arrival_s = (time - first).total_seconds()
        except (ValueError, TypeError) as error:
            # TypeError: a time with an offset from UTC beside one without.
            raise WorkloadError(
                f"{where}: TIMESTAMP must be a time such as 2023-11-16 18:17:03.9799600, "
                f"found {_shorten(timestamp)} ({error})"
            ) from error
        _check_order(arrival_s, previous_s, "TIMESTAMP", where)
        previous_s = arrival_s
        yield WorkloadRequest(
            prompt_tokens=_check_tokens(_int_or_text(context), "ContextTokens", where),
            output_tokens=_check_tokens(_int_or_text(generated), "GeneratedTokens", where),
            arrival_s=arrival_s,
        )


def _mooncake_requests(path: Path) -> Iterator[WorkloadRequest]:
    first_ms: float | None = None
    previous_s = 0.0
    for where, line in _rows(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkloadError(
                f"{where}: a JSON object is required, found {_shorten(line)} ({error})"
            ) from error
        if not isinstance(row, dict):
            raise WorkloadError(f"{where}: a JSON object is required, found {_shorten(row)}")
        missing = [key for key in ("timestamp", "input_length", "output_length") if key not in row]
        if missing:
            raise WorkloadError(f"{where}: {', '.join(missing)} required, found {_shorten(list(row))}")
        time_ms = row["timestamp"]
        if not _is_number(time_ms) or not 0 <= time_ms <= MAX_TIMESTAMP_MS:
            raise WorkloadError(
                f"{where}: timestamp must be milliseconds from 0 to {MAX_TIMESTAMP_MS}, "
                f"found {_shorten(time_ms)}"
            )
        first_ms = time_ms if first_ms is None else first_ms
        arrival_s = (time_ms - first_ms) / 1e3
        _check_order(arrival_s, previous_s, "timestamp", where)
        previous_s = arrival_s
        yield WorkloadRequest(
            prompt_tokens=_check_tokens(row["input_length"], "input_length", where),
            output_tokens=_check_tokens(row["output_length"], "output_length", where),
            arrival_s=arrival_s,
        )


def _sharegpt_requests(path: Path, tokenize: Tokenize) -> Iterator[WorkloadRequest]:
    text = "".join(line for _, line in _lines(path))
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{path}: a JSON list of conversations is required ({error})") from error
    if not isinstance(records, list):
        raise WorkloadError(f"{path}: a JSON list of conversations is required, found {_shorten(records)}")
    for number, record in enumerate(records, 1):
        where = f"{path}, record {number}"
        prompt, output = _first_exchange(_turns(record, where))
        if not prompt or not output:
            continue
        try:
            prompt_ids, output_tokens = tuple(tokenize(prompt)), len(tokenize(output))
        except UnicodeEncodeError as error:
            raise WorkloadError(f"{where}: text that UTF-8 can hold is required ({error})") from error
        if prompt_ids and output_tokens:
            yield WorkloadRequest(
                prompt_tokens=len(prompt_ids),
                output_tokens=output_tokens,
                arrival_s=None,
                prompt_text=prompt,
                prompt_token_ids=prompt_ids,
            )


def _turns(record: object, where: str) -> list[tuple[str, str]]:
    """The (speaker, text) pairs of a ShareGPT record."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise WorkloadError(
            f"{where}: an object with a list named conversations is required, found {_shorten(record)}"
        )
    pairs = []
    for turn in turns:
        match turn:
            case {"from": str(speaker), "value": str(value)}:
                pairs.append((speaker, value))
            case _:
                raise WorkloadError(
                    f"{where}: a turn must have the texts from and value, found {_shorten(turn)}"
                )
    return pairs


def _first_exchange(turns: list[tuple[str, str]]) -> tuple[str, str]:
    """The first ``human`` text and the first ``gpt`` text after it, each empty where there is none."""
    rest = iter(turns)
    prompt = next((text for speaker, text in rest if speaker == "human"), "")
    return prompt, next((text for speaker, text in rest if speaker == "gpt"), "")


def _csv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    for where, line in _rows(path):
        try:
            yield where, [field.strip() for field in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise WorkloadError(
                f"{where}: a row of CSV is required, found {_shorten(line)} ({error})"
            ) from error


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    return ((where, line) for where, line in _lines(path) if line.strip())


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line, line end included, after the words that name its place in an error."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path}, line {number}"
                try:
                    yield where, raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise WorkloadError(f"{where}: UTF-8 text is required ({error})") from error
    except OSError as error:
        raise WorkloadError(f"{path}: a readable file is required ({error.strerror})") from error


def _int_or_text(text: str) -> int | str:
    # Python's int() also takes signs, underscores and the digits of other scripts.
    return (
        int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_TRACE_TOKENS)) else text
    )


def _check_tokens(value: object, name: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TRACE_TOKENS:
        raise WorkloadError(
            f"{where}: {name} must be a whole number of tokens from 1 to {MAX_TRACE_TOKENS}, "
            f"found {_shorten(value)}"
        )
    return value


def _check_order(arrival_s: float, previous_s: float, name: str, where: str) -> None:
    if arrival_s < previous_s:
        raise WorkloadError(
            f"{where}: {name} must not be earlier than in the row before, found {previous_s - arrival_s:g} s "
            "earlier; sort the file by it"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shorten(value: object) -> str:
    short = reprlib.Repr()
    short.maxstring = 80
    return short.repr(value)
