"""Capture plans as TOML files, read strictly."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bullet_graph.errors import ConfigError
from bullet_graph.graphs.capture_plan import CapturePlan, DecodeSizes
from bullet_graph.perf.shipped import shipped_folder

FORMAT = "bullet_graph capture plan"
VERSION = 1

_LINE_CHARS = 100
_OLD_ROWS = "short_forward_rows"
"""The name that earlier releases gave ``piecewise_rows``."""


def format_plan(plan: CapturePlan, notes: Sequence[str] = ()) -> str:
    """A plan as TOML.

    Args:
        notes: lines of comment to put before it.
    """
    lines = [f"# {note}".rstrip() for text in notes for note in text.splitlines()]
    lines += [
        f"format = {_quoted(FORMAT)}",
        f"version = {VERSION}",
        f"model = {_quoted(plan.model)}",
        f"dtype = {_quoted(plan.dtype)}",
        f"num_sms = {plan.num_sms}",
        f"max_num_seqs = {plan.max_num_seqs}",
        "# Forwards with prompt tokens run as piecewise CUDA graphs, padded to one of these row counts.",
        *_list_lines("piecewise_rows", plan.piecewise_rows),
    ]
    for entry in plan.decode:
        what = "the whole GPU" if entry.decode_sms is None else "a decode lane of so many SMs"
        lines += ["", f"[[decode]]  # {what}"]
        if entry.decode_sms is not None:
            lines.append(f"decode_sms = {entry.decode_sms}")
        lines += _list_lines("batch_sizes", entry.batch_sizes)
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> CapturePlan:
    """Read a plan from TOML.

    Raises:
        ConfigError: the text is no TOML, has unknown keys or lacks some, or holds a plan that cannot be; the message
            names the key, but no file.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"it is not valid TOML ({cause}): mend it, or write it again") from cause
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise ConfigError(
            f"format and version must be {FORMAT!r} and {VERSION}; found {content.get('format')!r:.80} and "
            f"{content.get('version')!r:.80}: make one with `bullet-graph capture plan`"
        )
    if _OLD_ROWS in content:
        content = {("piecewise_rows" if key == _OLD_ROWS else key): value for key, value in content.items()}
    names = {field.name: field.type for field in fields(CapturePlan)}
    _check_keys("", content, required={"format", "version", *names} - {"piecewise_rows"}, known=names)
    entries = content["decode"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"decode must be tables, each written [[decode]]; found {entries!r:.80}")
    for index, entry in enumerate(entries):
        _check_keys(f"decode[{index}].", entry, required={"batch_sizes"}, known={"decode_sms"})
    decode = tuple(
        DecodeSizes(entry.get("decode_sms"), _sizes(f"decode[{index}].batch_sizes", entry["batch_sizes"]))
        for index, entry in enumerate(entries)
    )
    rows = _sizes("piecewise_rows", content.get("piecewise_rows", []))
    single = {name: content[name] for name in ("model", "dtype", "num_sms", "max_num_seqs")}
    return CapturePlan(**single, decode=decode, piecewise_rows=rows)


def read_plan(path: Path) -> CapturePlan:
    """Read a plan's file.

    Raises:
        ConfigError: it cannot be read, or is wrong; the message names the file and the key.
    """
    try:
        return parse_plan(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ConfigError(
            f"cannot read the capture plan {path} ({cause.strerror}): name a file that is there, or a plan that comes "
            f"with the package ({_shipped_names()})"
        ) from cause
    except UnicodeDecodeError as cause:
        raise ConfigError(f"the capture plan {path} is no text in UTF-8: write it again") from cause
    except ConfigError as error:
        raise ConfigError(f"cannot use the capture plan {path}: {error}") from error


def load_plan(name_or_path: str) -> CapturePlan:
    """Read a plan: a path that ends in ``.toml``, or the name of one that comes with the package.

    Raises:
        ConfigError: there is no such plan, or it is wrong.
    """
    if name_or_path.endswith(".toml"):
        return read_plan(Path(name_or_path))
    for path in list_plans():
        if path.stem == name_or_path:
            return read_plan(path)
    raise ConfigError(
        f"no capture plan {name_or_path!r} comes with the package (there: {_shipped_names()}): give one of these, or "
        "the path of a file that ends in .toml"
    )


def list_plans() -> tuple[Path, ...]:
    """Files of the plans that come with the package, by name."""
    return tuple(sorted(shipped_folder().glob("*.toml")))


def _shipped_names() -> str:
    return ", ".join(path.stem for path in list_plans()) or "none"


def _quoted(text: str) -> str:
    # Printable text, as a plan's is, is quoted by TOML as by JSON.
    return json.dumps(text, ensure_ascii=False)


def _list_lines(name: str, sizes: Sequence[int]) -> list[str]:
    """``name = [...]`` on as few lines as it takes."""
    line = f"{name} = [{', '.join(map(str, sizes))}]"
    if len(line) <= _LINE_CHARS:
        return [line]
    lines, row = [f"{name} = ["], "   "
    for size in sizes:
        if len(row) + len(f" {size},") > _LINE_CHARS:
            lines.append(row)
            row = "   "
        row += f" {size},"
    return [*lines, row, "]"]


def _check_keys(where: str, found: dict[str, Any], *, required: set[str], known: Any) -> None:
    if missing := sorted(required - found.keys()):
        raise ConfigError(f"{where}{missing[0]} is missing: add it")
    if unknown := sorted(found.keys() - required - set(known)):
        raise ConfigError(
            f"{where}{unknown[0]} is no key of a capture plan (they are {', '.join(sorted(required | set(known)))}): "
            "remove it, or write it as one of these"
        )


def _sizes(key: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{key} must be a list of sizes, such as [1, 2, 4]; found {value!r:.80}")
    return tuple(value)
