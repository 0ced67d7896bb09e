"""A performance table's file: versioned JSON with a checksum, written whole or not at all."""

import hashlib
import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from bullet_graph.errors import PerfTableError
from bullet_graph.perf.table import (
    PROFILE_AGAIN,
    DecodePoint,
    MixedPoint,
    PerfTable,
    Points,
    PrefillPoint,
    SplitPoint,
    TableKey,
)

FORMAT = "bullet_graph performance table"
VERSION = 1

_KEY_TYPES = {"gpu": str, "num_sms": int, "model": str, "shape": dict, "dtype": str, "kernels": dict}

_Point = TypeVar("_Point")


def write_table(table: PerfTable, path: Path) -> None:
    """Write a table as JSON, whole or not at all; an existing file is replaced.

    Raises:
        PerfTableError: the file cannot be written.
    """
    content = {"format": FORMAT, "version": VERSION, **_plain(asdict(table))}
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=1, allow_nan=False) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as cause:
        draft.unlink(missing_ok=True)
        raise PerfTableError(f"cannot write the performance table {path}: {cause}") from cause


def read_table(path: Path) -> PerfTable:
    """Read a table, checking that it is whole and unchanged.

    Raises:
        PerfTableError: the file is missing, truncated, edited, of another version, or holds bad numbers.
    """
    try:
        content = json.loads(path.read_bytes(), parse_constant=_reject_constant)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            _fail(f'a JSON object with "format": "{FORMAT}" is required; this is something else')
        if content.get("version") != VERSION:
            _fail(f"version {VERSION} of the format is required, found {content.get('version')!r}")
        checksum = content.pop("checksum", None)
        if checksum != _checksum(content):
            _fail("its checksum does not fit its content: the file was edited or damaged")
        return _read_content(content)
    except FileNotFoundError as cause:
        raise PerfTableError(
            f"there is no performance table {path}: measure one with `bullet-graph profile`"
        ) from cause
    except OSError as cause:
        raise PerfTableError(f"cannot read the performance table {path}: {cause}") from cause
    except PerfTableError as error:
        raise PerfTableError(f"cannot use the performance table {path}: {error}") from error
    except ValueError as cause:
        raise PerfTableError(
            f"the performance table {path} is not valid JSON ({cause}), perhaps truncated: {PROFILE_AGAIN}"
        ) from cause


def _read_content(content: dict[str, Any]) -> PerfTable:
    entries = {name: value for name, value in content.items() if name not in ("format", "version")}
    table = _record(PerfTable, entries, "the table")
    key = _record(TableKey, table["key"], "key")
    for name, kind in _KEY_TYPES.items():
        _require_type(key[name], kind, f"key.{name}")
    _require_type(table["complete"], bool, "complete")
    _require_type(table["provenance"], dict, "provenance")
    table["key"] = TableKey(**key)
    for name in ("points", "held_back"):
        table[name] = _read_points(table[name], name)
    return PerfTable(**table)


def _read_points(value: Any, where: str) -> Points:
    lists = _record(Points, value, where)
    for name in lists:
        _require_type(lists[name], list, f"{where}.{name}")
    return Points(
        decode=_point_list(DecodePoint, lists["decode"], f"{where}.decode"),
        prefill=_point_list(PrefillPoint, lists["prefill"], f"{where}.prefill"),
        mixed=_point_list(MixedPoint, lists["mixed"], f"{where}.mixed"),
        split=_point_list(SplitPoint, lists["split"], f"{where}.split"),
    )


def _point_list(kind: type[_Point], values: list[Any], where: str) -> tuple[_Point, ...]:
    records = (_record(kind, value, f"{where}[{index}]") for index, value in enumerate(values))
    return tuple(
        kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})
        for record in records
    )


def _record(kind: type[Any], value: Any, where: str) -> dict[str, Any]:
    """The object's entries, which must be exactly the fields of a dataclass."""
    _require_type(value, dict, where)
    names = {entry.name for entry in fields(kind)}
    if missing := names - value.keys():
        _fail(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := value.keys() - names:
        _fail(f"{where} has unknown entries: {', '.join(sorted(unknown))}")
    return dict(value)


def _require_type(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        _fail(f"{where} must be of type {kind.__name__}, found {value!r:.80}")


def _fail(problem: str) -> NoReturn:
    raise PerfTableError(f"{problem}; {PROFILE_AGAIN}")


def _reject_constant(name: str) -> NoReturn:
    _fail(f"it holds {name} where a finite number is required")


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back (tuples are lists), so that the checksum is the same after reading."""
    plain: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    return plain


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
