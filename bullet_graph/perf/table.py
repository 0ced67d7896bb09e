"""The measured performance table: its points, what it is valid for, its file, and where files are found."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from bullet_graph.errors import PerfTableError
from bullet_graph.perf.roofline import DecoderShape

PROFILE_AGAIN = "measure it again with `bullet-graph profile`"

FORMAT = "bullet_graph performance table"
VERSION = 1

_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


class _Checked:
    """Checks the numbers of a point at construction."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            name, value = entry.name, getattr(self, entry.name)
            if name == "ms" or name.endswith("_ms"):
                times = value if isinstance(value, tuple) else (value,)
                good, required = all(map(_is_time, times)), "finite and above 0"
            else:
                least = 0 if name == "cached_tokens" else 1
                good = _is_int(value, least) or (value is None and name == "sms")
                required = f"an integer of at least {least}"
            if not good:
                raise PerfTableError(
                    f"{type(self).__name__}.{name} must be {required}, got {value!r}: {PROFILE_AGAIN}"
                )


# Of each point, ``ms`` is the median of its repeats, which are kept in order. ``sms`` is the lane's number of SMs, None
# for the whole GPU. Decode rows attend to ``context_tokens`` tokens each. Prefill forwards run all layers of one chunk.


@dataclass(frozen=True, slots=True)
class DecodePoint(_Checked):
    """One decode step of ``batch_size`` rows, alone."""

    batch_size: int
    context_tokens: int
    sms: int | None
    ms: float
    repeats_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PrefillPoint(_Checked):
    """A forward of ``tokens`` prompt rows after ``cached_tokens`` tokens of the same prompt, alone."""

    tokens: int
    cached_tokens: int
    sms: int | None
    ms: float
    repeats_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MixedPoint(_Checked):
    """One forward of ``tokens`` prompt rows without a prefix and ``batch_size`` decode rows, on the whole GPU."""

    tokens: int
    batch_size: int
    context_tokens: int
    ms: float
    repeats_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SplitPoint(_Checked):
    """Decode steps on ``decode_sms`` SMs beside forwards of ``tokens`` prompt rows on the others, both lanes busy."""

    decode_sms: int
    batch_size: int
    context_tokens: int
    tokens: int
    decode_ms: float
    prefill_ms: float
    decode_repeats_ms: tuple[float, ...]
    prefill_repeats_ms: tuple[float, ...]


POINT_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {"decode": DecodePoint, "prefill": PrefillPoint, "mixed": MixedPoint, "split": SplitPoint}
)
"""Points by the field of ``Points`` that holds them."""


@dataclass(frozen=True, slots=True)
class Points:
    """Measured points by kind."""

    decode: tuple[DecodePoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    mixed: tuple[MixedPoint, ...] = ()
    split: tuple[SplitPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class TableKey:
    """What a table is valid for: times measured under one key say nothing about another.

    Attributes:
        gpu: the device's name, such as ``NVIDIA H200``.
        model: a preset's name, or the name of a model folder; not compared, as the shape decides the times.
        shape: the model's numbers, see :func:`shape_numbers`.
        dtype: of weights and KV cache, such as ``bfloat16``.
        kernels: versions of the libraries whose kernels run, by name.
    """

    gpu: str
    num_sms: int
    model: str
    shape: Mapping[str, int]
    dtype: str
    kernels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PerfTable:
    """The measurements of one ``bullet-graph profile``.

    Attributes:
        num_layers: layers of the model, as in the key's shape.
        points: predictions are made from them.
        held_back: points that predictions do not use; they serve to judge predictions.
        provenance: date, driver, versions, commit, and how it was measured.
        complete: False for a profile that was interrupted and can be resumed.
    """

    key: TableKey
    num_layers: int
    points: Points
    held_back: Points
    provenance: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True

    def __post_init__(self) -> None:
        if self.key.shape.get("num_layers") != self.num_layers:
            raise PerfTableError(
                f"num_layers of a table must be its shape's {self.key.shape.get('num_layers')!r}, "
                f"got {self.num_layers!r}: {PROFILE_AGAIN}"
            )


def shape_numbers(shape: DecoderShape) -> dict[str, int]:
    """The numbers of a model that decide its times; flags are 0 or 1."""
    return {name: int(getattr(shape, name)) for name in vars(DecoderShape) if not name.startswith("_")}


def require_match(table: PerfTable, key: TableKey) -> None:
    """Check that a table is valid for this GPU, model, dtype and these kernels.

    Raises:
        PerfTableError: it is not; the message names every component that differs.
    """
    found = table.key
    plain = ("gpu", "num_sms", "dtype")
    differences = _differences(
        {name: getattr(key, name) for name in plain}, {name: getattr(found, name) for name in plain}
    )
    if numbers := _differences(key.shape, found.shape):
        differences.append(f"model {key.model!r} required, {found.model!r} found ({'; '.join(numbers)})")
    differences += [f"kernels: {text}" for text in _differences(key.kernels, found.kernels)]
    if differences:
        raise PerfTableError(
            f"the performance table was measured under other conditions: {'; '.join(differences)}. "
            "Run `bullet-graph profile` here to measure one that fits"
        )


def _differences(required: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {required.get(name)!r} required, {found.get(name)!r} found"
        for name in sorted(required.keys() | found.keys())
        if required.get(name) != found.get(name)
    ]


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# ---- a table's file: versioned JSON with a checksum ----


def write_table(table: PerfTable, path: Path) -> None:
    """Write a table as JSON, replacing an existing file atomically.

    Raises:
        PerfTableError: the file cannot be written.
    """
    # Through JSON once: tuples become lists, so that the checksum is the same after reading.
    values = json.loads(json.dumps(asdict(table), allow_nan=False))
    content = {"format": FORMAT, "version": VERSION, **values}
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=1, allow_nan=False) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as cause:
        draft.unlink(missing_ok=True)
        raise PerfTableError(f"cannot write the performance table {path}: {cause}") from cause


def read_table(path: Path) -> PerfTable:
    """Read a table and check that it is complete and unchanged.

    Raises:
        PerfTableError: the file is missing, truncated, edited, of another version, or holds bad numbers.
    """
    try:
        return _read_content(json.loads(path.read_bytes(), parse_constant=_reject_constant))
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


def _read_content(content: Any) -> PerfTable:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        _fail(f'a JSON object with "format": "{FORMAT}" is required; this is something else')
    if content.get("version") != VERSION:
        _fail(f"version {VERSION} of the format is required, found {content.get('version')!r}")
    if content.pop("checksum", None) != _checksum(content):
        _fail("its checksum does not fit its content: the file was edited or damaged")
    del content["format"], content["version"]
    try:
        content["key"] = TableKey(**content["key"])
        for name in ("points", "held_back"):
            content[name] = _read_points(content[name])
        return PerfTable(**content)
    except (AttributeError, KeyError, TypeError) as cause:
        _fail(f"its fields are not those of a table ({cause})")


def _read_points(lists: dict[str, list[dict[str, Any]]]) -> Points:
    return Points(
        **{
            kind: tuple(
                POINT_KINDS[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in point.items()})
                for point in points
            )
            for kind, points in lists.items()
        }
    )


def _fail(problem: str) -> NoReturn:
    raise PerfTableError(f"{problem}; {PROFILE_AGAIN}")


def _reject_constant(name: str) -> NoReturn:
    _fail(f"it holds {name} where a finite number is required")


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


# ---- tables by name ----


def shipped_folder() -> Path:
    """Folder of shipped tables: inside an installed package, or beside the package in a checkout."""
    installed = _PACKAGE_FOLDER / "_capture"
    return installed if installed.is_dir() else _PACKAGE_FOLDER.parent / "capture"


def gpu_nickname(gpu: str) -> str:
    """A GPU's name in files and options: ``h200`` for ``NVIDIA H200``."""
    words = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return words.removeprefix("nvidia-")


def table_file_name(gpu: str, model: str, dtype: str) -> str:
    """Name of a table's file, such as ``h200_llama-3.1-8b_bfloat16.json``.

    Args:
        gpu: the device's name or nickname.
        model: a preset's name, or a model folder, of which the last part is used.
        dtype: of weights and KV cache.
    """
    return f"{gpu_nickname(gpu)}_{Path(model).name}_{dtype}.json"


def list_tables(folder: Path | None = None) -> tuple[Path, ...]:
    """Tables of a folder, sorted by name; None lists the shipped ones."""
    return tuple(sorted((folder or shipped_folder()).glob("*_*_*.json")))


def load_table(
    gpu_or_path: str | Path, *, model: str, dtype: str = "bfloat16", folder: Path | None = None
) -> PerfTable:
    """Read a table by the name of its GPU, or a file.

    Args:
        gpu_or_path: a path that ends in ``.json``, or a GPU such as ``h200``.
        model, dtype: of the table; ignored for a file.
        folder: where to look; None takes the shipped tables.

    Raises:
        PerfTableError: there is no such table (the message lists those of the folder), or it cannot be used.
    """
    if Path(gpu_or_path).suffix == ".json":
        return read_table(Path(gpu_or_path))
    folder = folder or shipped_folder()
    path = folder / table_file_name(str(gpu_or_path), model, dtype)
    if path.is_file():
        return read_table(path)
    there = ", ".join(table.name for table in list_tables(folder)) or "none"
    raise PerfTableError(
        f"no performance table {path.name} is known in {folder} (there: {there}): measure one with "
        "`bullet-graph profile`, or give the path of a table"
    )
