"""The measured performance table: its points, what it is valid for, its file, and where files are found."""

import hashlib
import json
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.dataclasses import dataclass

from bullet_graph.errors import PerfTableError, PerfTableWarning, first_problem, io_errors
from bullet_graph.files import PACKAGE_FOLDER, draft_of
from bullet_graph.perf.performance import PerformanceModel, attention_pairs
from bullet_graph.perf.roofline import DecoderShape

PROFILE_AGAIN = "measure it again with `bullet-graph profile`"

FORMAT = "bullet_graph performance table"
VERSION = 1

Amount = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
Milliseconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]

PointKind = Literal["decode", "prefill", "mixed", "split"]
KINDS: tuple[PointKind, ...] = get_args(PointKind)

_CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One measurement: decode alone, prefill alone, both in one forward (mixed), or both at once (split).

    ``sms`` is the size of the decode lane, or of the prefill lane for prefill; None: the whole GPU. Each decode row
    attends to ``context_tokens`` tokens, itself included. A chunk's ``tokens`` rows follow ``cached_tokens`` tokens of
    the same prompt. Numbers that do not apply are 0.
    """

    kind: PointKind
    sms: int | None = None
    batch_size: int = 0
    context_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0

    def __str__(self) -> str:
        where = "the whole GPU" if self.sms is None else f"{self.sms} SMs"
        rows = f"{self.batch_size} rows of context {self.context_tokens}"
        texts: dict[PointKind, str] = {
            "decode": f"{rows} on {where}",
            "prefill": f"{self.tokens} tokens after {self.cached_tokens} on {where}",
            "mixed": f"{self.tokens} tokens with {rows}",
            "split": f"{rows} on {where} beside {self.tokens} tokens",
        }
        return texts[self.kind]

    def predicted(self, model: PerformanceModel) -> tuple[tuple[float, ...], bool]:
        """Its times in ms by a model, in the order of :data:`Measured`; and whether they rest on measured points."""
        kv_tokens = self.batch_size * self.context_tokens
        pairs = attention_pairs(self.tokens, self.cached_tokens)
        if self.kind == "split":
            both = model.split(self.sms or model.num_sms, self.batch_size, kv_tokens, self.tokens, pairs)
            return (both.decode_ms, both.prefill_ms), both.measured
        if self.kind == "decode":
            one = model.decode(self.batch_size, kv_tokens, self.sms)
        elif self.kind == "prefill":
            one = model.prefill(self.tokens, pairs, self.sms)
        else:
            one = model.mixed(self.tokens, pairs, self.batch_size, kv_tokens)
        return (one.ms,), one.measured


Measured = Mapping[ProfilePoint, Sequence[tuple[Milliseconds, ...]]]
"""Repeats of each point, in ms: the step's time; for a split, the decode step's and the prefill forward's."""


def median_ms(repeats: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """A point's times in ms: of each lane that it keeps busy, the median of its repeats."""
    return tuple(map(statistics.median, zip(*repeats, strict=True)))


@dataclass(frozen=True, slots=True, config=_CLOSED)
class TableKey:
    """What a table is valid for: times measured under one key say nothing about another.

    Attributes:
        gpu: the device's name, such as ``NVIDIA H200``.
        model: a preset's name, or the name of a model folder; not compared, as the shape decides the times.
        shape: see :func:`shape_numbers`.
        kernels: versions of the libraries whose kernels run, by name.
    """

    gpu: str
    num_sms: Count
    model: str
    shape: Mapping[str, Amount]
    dtype: Annotated[str, Field(pattern=r"^(bfloat16|float16|float32)$")]
    kernels: Mapping[str, str]


@dataclass(frozen=True, slots=True, config=_CLOSED)
class PerfTable:
    """The measurements of one ``bullet-graph profile``. Predictions use ``points``; ``held_back`` serve to judge them.

    ``provenance`` holds date, driver, versions, commit, and how it was measured. A profile that was interrupted and can
    be resumed is not ``complete``.
    """

    key: TableKey
    points: Measured
    held_back: Measured
    provenance: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True


_NAMES = tuple(each.name for each in fields(DecoderShape))
_WINDOW = "layers_of_window_"


def shape_numbers(shape: DecoderShape) -> dict[str, int]:
    """The numbers of a model that decide its times; flags are 0 or 1. Windows, experts, … only where there are."""
    left_out = {"layer_windows", "fp8", "fp8_kv"} | ({"num_ranks"} if shape.num_ranks == 1 else set())
    left_out |= set() if shape.expert_parallel else {"expert_parallel"}
    left_out |= {name for name in _NAMES if "expert" in name} if not shape.num_experts else set()
    numbers = {name: int(getattr(shape, name)) for name in _NAMES if name not in left_out}
    windows = Counter(window for window in shape.layer_windows if window is not None)
    numbers |= {f"{_WINDOW}{window}": count for window, count in sorted(windows.items())}
    if shape.fp8 is not None:
        numbers["fp8_blocks" if shape.fp8.blocks else "fp8_channels"] = 1
        numbers |= {f"fp8_without_{name}": 1 for name in shape.fp8.plain}
    return numbers | {"fp8_kv": 1} if shape.fp8_kv else numbers


def format_name(dtype: str, numbers: Mapping[str, int]) -> str:
    """A dtype, what a model of these :func:`shape_numbers` has in FP8, and its ranks: ``bfloat16-fp8_channels-tp2``.

    Ranks that divide the experts are ``ep2``.
    """
    names = [dtype, *(name for name in numbers if name.startswith("fp8_"))]
    if "num_ranks" in numbers:
        names.append(f"{'ep' if 'expert_parallel' in numbers else 'tp'}{numbers['num_ranks']}")
    return "-".join(names)


def rank_differences(required: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """What differs in how :func:`shape_numbers` are divided among ranks, by the names of settings."""
    of_ranks = [
        {"tensor_parallel_size": numbers.get("num_ranks", 1), "expert_parallel": "expert_parallel" in numbers}
        for numbers in (required, found)
    ]
    return _differences(*of_ranks)


def for_lengths(table: PerfTable, max_model_len: int) -> PerfTable:
    """The same table without the windows that hold every sequence, as ``models.config.without_wide_windows`` has it."""
    shape = table.key.shape
    wide = {name for name in shape if name.startswith(_WINDOW) and int(name[len(_WINDOW) :]) >= max_model_len}
    left = {name: number for name, number in shape.items() if name not in wide}
    return replace(table, key=replace(table.key, shape=left))


def require_match(table: PerfTable, key: TableKey, *, any_versions: bool = False) -> None:
    """Check that a table is valid for this key; the PerfTableError names every component that differs.

    With ``any_versions``, a PerfTableWarning names the libraries of other versions.
    """
    found = table.key
    plain = ("gpu", "num_sms", "dtype")
    differences = _differences(*({name: getattr(each, name) for name in plain} for each in (key, found)))
    if ranks := rank_differences(key.shape, found.shape):
        # All other numbers of the shape are a rank's.
        differences += ranks
    elif numbers := _differences(key.shape, found.shape):
        differences.append(f"model {key.model!r} required, {found.model!r} found ({'; '.join(numbers)})")
    versions = [f"kernels: {text}" for text in _differences(key.kernels, found.kernels)]
    if versions and any_versions:
        warnings.warn(
            f"the performance table of {found.model} on {found.gpu} was measured with other versions, so its times may "
            f"be off: {'; '.join(versions)}. Run `bullet-graph profile` here to measure one that fits",
            PerfTableWarning,
            stacklevel=2,
        )
    elif versions:
        differences += versions
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


# ---- a table's file: versioned JSON with a checksum ----

_SHAPES: Mapping[PointKind, Mapping[str, Any]] = {
    "decode": {"batch_size": Count, "context_tokens": Count, "sms": Count | None},
    "prefill": {"tokens": Count, "cached_tokens": Amount, "sms": Count | None},
    "mixed": {"tokens": Count, "batch_size": Count, "context_tokens": Count},
    "split": {"decode_sms": Count, "batch_size": Count, "context_tokens": Count, "tokens": Count},
}
"""What the record of a point begins with; for each lane, its median time and its repeats follow."""


def _lanes(kind: PointKind) -> tuple[str, ...]:
    """What the names of a lane's times begin with."""
    return ("decode_", "prefill_") if kind == "split" else ("",)


def _record_type(kind: PointKind) -> Any:
    types = {**_SHAPES[kind], **{f"{lane}ms": Milliseconds for lane in _lanes(kind)}}
    types |= {f"{lane}repeats_ms": Annotated[list[Milliseconds], Field(min_length=1)] for lane in _lanes(kind)}
    required: dict[str, Any] = {name: (each, ...) for name, each in types.items()}
    return create_model(kind, __config__=_CLOSED, **required)


_RECORDS: dict[str, Any] = {kind: (list[_record_type(kind)], []) for kind in KINDS}  # type: ignore[misc]
_RECORDS_BY_KIND = create_model("Points", __config__=_CLOSED, **_RECORDS)


def _records(measured: Measured) -> dict[PointKind, list[dict[str, Any]]]:
    records: dict[PointKind, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for point, repeats in measured.items():
        lanes = _lanes(point.kind)
        records[point.kind].append(
            {name: getattr(point, name.removeprefix("decode_")) for name in _SHAPES[point.kind]}
            | {f"{lane}ms": ms for lane, ms in zip(lanes, median_ms(repeats), strict=True)}
            | {f"{lane}repeats_ms": each for lane, each in zip(lanes, zip(*repeats, strict=True), strict=True)}
        )
    return records


def _measured(points: Any) -> Measured:
    measured = {}
    for kind in KINDS:
        for record in getattr(points, kind):
            shape = {name.removeprefix("decode_"): getattr(record, name) for name in _SHAPES[kind]}
            repeats = (getattr(record, f"{lane}repeats_ms") for lane in _lanes(kind))
            measured[ProfilePoint(kind, **shape)] = list(zip(*repeats, strict=True))
    return measured


def write_table(table: PerfTable, path: Path) -> None:
    """Write a table as JSON, replacing an existing file atomically; PerfTableError where that fails."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "num_layers": table.key.shape["num_layers"],
        "key": asdict(table.key),
        "points": _records(table.points),
        "held_back": _records(table.held_back),
        "provenance": table.provenance,
        "complete": table.complete,
    }
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=1, allow_nan=False) + "\n"
    with io_errors(f"cannot write the performance table {path}", PerfTableError), draft_of(path) as draft:
        draft.write_text(text, encoding="utf-8")


def read_table(path: Path) -> PerfTable:
    """Read a table and check that it is complete and unchanged.

    Raises PerfTableError where the file is missing, truncated, edited, of another version, or holds bad numbers.
    """
    try:
        wanted = "where a finite number is required"
        content = json.loads(path.read_bytes(), parse_constant=lambda name: _fail(f"it holds {name} {wanted}"))
        return _read_content(content)
    except FileNotFoundError as cause:
        raise PerfTableError(f"there is no performance table {path}: make one with `bullet-graph profile`") from cause
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
    # Of format 1; the key has it, too.
    for name in ("format", "version", "num_layers"):
        content.pop(name, None)
    try:
        for name in [name for name in ("points", "held_back") if name in content]:
            content[name] = _measured(_RECORDS_BY_KIND.model_validate(content[name]))
        return TypeAdapter(PerfTable).validate_python(content)
    except ValueError as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        _fail(f"its fields are not those of a table ({problem})")


def _fail(problem: str) -> NoReturn:
    raise PerfTableError(f"{problem}; {PROFILE_AGAIN}")


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


# ---- tables by name ----


def shipped_folder() -> Path:
    """Folder of shipped tables: inside an installed package, or beside the package in a checkout."""
    installed = PACKAGE_FOLDER / "_capture"
    return installed if installed.is_dir() else PACKAGE_FOLDER.parent / "capture"


def gpu_nickname(gpu: str) -> str:
    """A GPU's name in files and options: ``h100`` for ``NVIDIA H100 80GB HBM3``."""
    words = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\b(\d+gb|hbm\w+|sxm\d)\b", "", gpu.lower())).strip("-")
    return words.removeprefix("nvidia-")


def table_file_name(gpu: str, model: str, dtype: str) -> str:
    """Name of a table's file, such as ``h200_llama-3.1-8b_bfloat16.json``.

    ``model`` is a preset or a model folder, ``dtype`` that of :func:`format_name`.
    """
    return f"{gpu_nickname(gpu)}_{Path(model).name}_{dtype}.json"


def own_table_file_name(key: TableKey) -> str:
    """Name of the file of a user's own table: as shipped ones, with a digest of the shape, as names of folders recur.

    Windows do not count: one table serves for all lengths, see :func:`for_lengths`.
    """
    shape = sorted((name, number) for name, number in key.shape.items() if not name.startswith(_WINDOW))
    digest = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:8]
    return table_file_name(key.gpu, f"{Path(key.model).name}-{digest}", format_name(key.dtype, key.shape))


def list_tables() -> tuple[Path, ...]:
    """The shipped tables, sorted by name."""
    return tuple(sorted(shipped_folder().glob("*_*_*.json")))


def load_table(gpu_or_path: str | Path, *, model: str, dtype: str = "bfloat16") -> PerfTable:
    """Read a table from a path that ends in ``.json``, or a shipped one by its GPU, such as ``h200``.

    Raises PerfTableError where there is no such table (the message lists those that there are), or it is unusable.
    """
    if Path(gpu_or_path).suffix == ".json":
        return read_table(Path(gpu_or_path))
    path = shipped_folder() / table_file_name(str(gpu_or_path), model, dtype)
    if path.is_file():
        return read_table(path)
    there = ", ".join(table.name for table in list_tables()) or "none"
    raise PerfTableError(
        f"no performance table {path.name} is known in {path.parent} (there: {there}): measure one with "
        "`bullet-graph profile`, give the path of a table, or take an estimate, such as roofline:h200"
    )
