"""Capture plans: what an engine captures at its start, in which order, as a value and as a TOML file. No torch."""

import json
import textwrap
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from bullet_graph.config import EngineConfig, ModelDtype
from bullet_graph.errors import ConfigError, first_problem
from bullet_graph.graphs.key import GraphKey, batch_size_buckets, row_buckets, smallest_holding
from bullet_graph.partition.masks import SMS_PER_TPC, WHOLE_GPU, SmPartition, partition_of
from bullet_graph.perf.roofline import DecoderShape
from bullet_graph.perf.table import Count, shipped_folder

DECODE_GRAPH_BYTES = 4 * 1024**2
"""Memory of a captured decode step of 32 layers: 1 to 2.5 MiB measured with stream masks, 7 with green contexts."""

DECODE_GRAPH_S = 0.022
"""Time to capture it, measured."""

PIECE_BYTES = 512 * 1024
"""Memory of one layer's piecewise graph: 1,024 of them and 144 decode steps took 692 MB (bench: ``startup.json``)."""

PIECE_S = 0.005
"""Time to capture it, measured."""

PLAN_DTYPES = get_args(ModelDtype)
FORMAT = "bullet_graph capture plan"
VERSION = 1

_LINE_CHARS = 100
_CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """Batch sizes captured for one size of the decode lane, rising; ``decode_sms`` is None for the whole GPU."""

    decode_sms: Count | None = None
    batch_sizes: tuple[Count, ...] = ()

    __pydantic_config__ = _CLOSED


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """What an engine captures at its start, no more and no less.

    Attributes:
        model: a preset's name, or the name of a model folder.
        max_num_seqs: most sequences running at once; also the largest batch size of the whole GPU.
        decode: the whole GPU, then partitions by rising size of the decode lane.
        piecewise_rows: rising row counts, prompt and decode rows together, of forwards with prompt tokens that run as
            piecewise CUDA graphs on the whole GPU. Longer forwards are launched kernel by kernel.

    A wrong one raises ConfigError at construction, which names the entry and the values found and required.
    """

    model: str
    dtype: str
    num_sms: Annotated[int, Field(strict=True, ge=2)]
    max_num_seqs: Count
    decode: tuple[DecodeSizes, ...]
    piecewise_rows: tuple[Count, ...] = ()

    __pydantic_config__ = _CLOSED

    def __post_init__(self) -> None:
        is_name = self.model != "" and self.model.isprintable()
        _require(is_name, "model", self.model, "the name of a preset or of a model folder")
        _require(self.dtype in PLAN_DTYPES, "dtype", self.dtype, f"one of {', '.join(PLAN_DTYPES)}")
        most, lanes = self.max_num_seqs, [entry.decode_sms for entry in self.decode]
        whole_first = lanes[:1] == [None] and None not in lanes[1:]
        required = "the whole GPU (an entry without decode_sms) first, and once"
        _require(whole_first, "decode", [sms or "the whole GPU" for sms in lanes], required)
        most_sms = self.num_sms - SMS_PER_TPC
        fits = all(sms and sms % SMS_PER_TPC == 0 and sms <= most_sms for sms in lanes[1:])
        required = f"rising multiples of {SMS_PER_TPC} (a TPC) of at most {most_sms}, each once"
        _require(fits and _is_rising(lanes[1:]), "decode_sms of the partitions", lanes[1:], required)
        for index, entry in enumerate(self.decode):
            key, sizes = f"decode[{index}].batch_sizes", entry.batch_sizes
            required = f"rising integers of 1 to max_num_seqs={most}, at least one"
            _require(bool(sizes) and _is_rising(sizes) and sizes[-1] <= most, key, list(sizes), required)
        required = f"sizes that end with max_num_seqs={most}, since the whole GPU serves every batch"
        sizes = self.decode[0].batch_sizes
        _require(sizes[-1] == most, "decode[0].batch_sizes", list(sizes), required)
        required = "rising integers of at least 1, each once"
        _require(_is_rising(self.piecewise_rows), "piecewise_rows", list(self.piecewise_rows), required)

    @property
    def decode_sms(self) -> tuple[int, ...]:
        """Sizes of the decode lane besides the whole GPU, rising."""
        return tuple(entry.decode_sms for entry in self.decode if entry.decode_sms is not None)

    @property
    def batch_sizes(self) -> Mapping[SmPartition, tuple[int, ...]]:
        """Batch sizes to capture by partition, the whole GPU first."""
        return {partition_of(e.decode_sms, num_sms=self.num_sms): e.batch_sizes for e in self.decode}

    def padded(self, batch_size: int, decode_sms: int | None = None) -> int:
        """Rows of the graph that serves a batch; the batch's own size where none does."""
        for entry in self.decode:
            if entry.decode_sms == decode_sms:
                return smallest_holding(batch_size, entry.batch_sizes) or batch_size
        return batch_size

    @property
    def num_decode_graphs(self) -> int:
        return sum(len(entry.batch_sizes) for entry in self.decode)

    def graph_bytes(self, num_layers: int) -> int:
        """Estimated device memory of the captured graphs, without the buffers of piecewise graphs."""
        pieces = len(self.piecewise_rows) * num_layers
        return self.num_decode_graphs * DECODE_GRAPH_BYTES * max(num_layers, 32) // 32 + pieces * PIECE_BYTES

    def capture_s(self, num_layers: int) -> float:
        """Estimated seconds of capturing, without compiling."""
        return self.num_decode_graphs * DECODE_GRAPH_S + len(self.piecewise_rows) * num_layers * PIECE_S


def default_plan(
    config: EngineConfig, *, dtype: str, num_sms: int, shape: DecoderShape, decode_sms: Sequence[int]
) -> CapturePlan:
    """The plan of an engine that names none: all sizes, for the whole GPU and each partition; ``decode_sms`` rise."""
    sizes = batch_size_buckets(config.max_num_seqs)
    return CapturePlan(
        model=config.model_name,
        dtype=dtype,
        num_sms=num_sms,
        max_num_seqs=config.max_num_seqs,
        decode=tuple(DecodeSizes(sms, sizes) for sms in (None, *decode_sms)),
        piecewise_rows=row_buckets(config.max_forward_rows, shape),
    )


# ---- files ----


def format_plan(plan: CapturePlan, notes: Sequence[str] = ()) -> str:
    """A plan as TOML, with ``notes`` as comments at its top."""
    lines = [f"# {note}".rstrip() for text in notes for note in text.splitlines()]
    lines += [
        f'format = "{FORMAT}"',
        f"version = {VERSION}",
        # TOML quotes printable text as JSON does.
        f"model = {json.dumps(plan.model, ensure_ascii=False)}",
        f'dtype = "{plan.dtype}"',
        f"num_sms = {plan.num_sms}",
        f"max_num_seqs = {plan.max_num_seqs}",
        "# Forwards with prompt tokens run as piecewise CUDA graphs, padded to one of these row counts.",
        _list_line("piecewise_rows", plan.piecewise_rows),
    ]
    for entry in plan.decode:
        lines += ["", "[[decode]]"]
        if entry.decode_sms is not None:
            lines.append(f"decode_sms = {entry.decode_sms}")
        lines.append(_list_line("batch_sizes", entry.batch_sizes))
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> CapturePlan:
    """Read a plan from TOML; ConfigError, which names the key, where that cannot be a plan."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"it is not valid TOML ({cause}): mend it, or write it again") from cause
    if (content.pop("format", None), content.pop("version", None)) != (FORMAT, VERSION):
        raise ConfigError(
            f"format and version must be {FORMAT!r} and {VERSION}; found others: make a plan with "
            "`bullet-graph capture plan`"
        )
    try:
        return TypeAdapter(CapturePlan).validate_python(content)
    except ValidationError as error:
        keys = "model, dtype, num_sms, max_num_seqs, piecewise_rows, and for each [[decode]] decode_sms and batch_sizes"
        raise ConfigError(f"{first_problem(error)} (a plan's keys are {keys})") from error


def load_plan(name_or_path: str) -> CapturePlan:
    """Read a plan by a path that ends in ``.toml``, or by the name of one that comes with the package.

    Raises ConfigError, which names the file and the key, where there is none or it is wrong.
    """
    shipped = {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}
    names = ", ".join(shipped) or "none"
    path = Path(name_or_path) if name_or_path.endswith(".toml") else shipped.get(name_or_path)
    if path is None:
        raise ConfigError(
            f"no capture plan {name_or_path!r} comes with the package (there: {names}): give one of these, or the "
            "path of a file that ends in .toml"
        )
    try:
        return parse_plan(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(
            f"cannot read the capture plan {path} ({cause}): name a text file in UTF-8, or a plan that comes with the "
            f"package ({names})"
        ) from cause
    except ConfigError as error:
        raise ConfigError(f"cannot use the capture plan {path}: {error}") from error


def named_plan(config: EngineConfig, *, dtype: str, num_sms: int) -> CapturePlan | None:
    """The plan that the configuration names; None where it names none.

    Raises ConfigError where it cannot be read, or was made for another engine or GPU.
    """
    if config.capture_plan is None:
        return None
    plan, name = load_plan(config.capture_plan), f"the capture plan {config.capture_plan}"
    for key, found, required in (
        ("model", plan.model, config.model_name),
        ("dtype", plan.dtype, dtype),
        ("num_sms", plan.num_sms, num_sms),
        ("max_num_seqs", plan.max_num_seqs, config.max_num_seqs),
    ):
        if found != required:
            raise ConfigError(
                f"{name} was made for {key}={found}, but the engine has {key}={required}: set the engine's to that of "
                "the plan, or make another plan with `bullet-graph capture plan`"
            )
    max_rows = config.max_forward_rows
    if plan.piecewise_rows and plan.piecewise_rows[-1] > max_rows:
        raise ConfigError(
            f"{name} captures forwards of {plan.piecewise_rows[-1]} rows in piecewise_rows, but the longest of "
            f"this engine has {max_rows} (chunk and max_num_seqs): remove the larger sizes, or allow longer chunks"
        )
    sms = config.policy.decode_sms
    if sms is not None and sms not in plan.decode_sms:
        raise ConfigError(
            f"{name} has no decode lane of {sms} SMs, which the policy {config.policy} needs, but "
            f"{', '.join(map(str, plan.decode_sms)) or 'the whole GPU only'}: choose one of these, or add a [[decode]]"
        )
    return plan


def _list_line(name: str, sizes: Sequence[int]) -> str:
    return textwrap.fill(f"{name} = [{', '.join(map(str, sizes))}]", _LINE_CHARS, subsequent_indent="    ")


def _require(good: bool, key: str, found: object, required: str) -> None:
    if not good:
        raise ConfigError(f"{key} must be {required}; found {found!r:.120}")


def _is_rising(sizes: Sequence[Any]) -> bool:
    return all(before < after for before, after in pairwise((0, *sizes)))


# ---- the order of captures ----


@dataclass(frozen=True, slots=True)
class PieceKey:
    """One piecewise graph: forwards of ``rows`` rows, padding included, up to the attention of ``layer``."""

    rows: int
    layer: int
    partition: ClassVar[SmPartition] = WHOLE_GPU


CaptureKey = GraphKey | PieceKey


def hot_keys(plan: CapturePlan) -> list[GraphKey]:
    """The graphs that an engine cannot serve well without, in the order of their capture.

    First comes the largest step of the whole GPU, which serves any batch and in whose memory all others find room. The
    smallest follows, whose kernels may differ; then the smallest set that at most doubles the rows planned for a batch.
    """
    sizes = plan.decode[0].batch_sizes
    hot = {sizes[-1]: None, sizes[0]: None}
    served = sizes[0]
    while served < sizes[-1]:
        smallest = sizes[bisect_right(sizes, served)]
        served = sizes[bisect_right(sizes, 2 * smallest) - 1]
        hot[served] = None
    return [GraphKey(size) for size in hot]


def capture_order(plan: CapturePlan, num_layers: int) -> list[CaptureKey]:
    """All that a plan captures, the hottest first.

    After :func:`hot_keys` come the other sizes of the whole GPU, the largest of each partition, piecewise graphs, and
    the other sizes of the partitions. The largest piecewise graph comes first of its kind; then sizes rise.
    """
    hot = hot_keys(plan)
    whole = [key for size in plan.decode[0].batch_sizes if (key := GraphKey(size)) not in hot]
    parts = [(partition, sizes) for partition, sizes in plan.batch_sizes.items() if partition != WHOLE_GPU]
    largest = [GraphKey(sizes[-1], partition) for partition, sizes in parts]
    others = [GraphKey(size, partition) for partition, sizes in parts for size in sizes[:-1]]
    rows = plan.piecewise_rows
    pieces = [PieceKey(size, layer) for size in (*rows[-1:], *rows[:-1]) for layer in range(num_layers)]
    return [*hot, *whole, *largest, *pieces, *sorted(others, key=lambda key: key.batch_size)]


class CaptureProgress:
    """What is captured of a plan, and what is next."""

    def __init__(self, plan: CapturePlan, num_layers: int) -> None:
        self._sizes = plan.batch_sizes
        self._missing = dict.fromkeys(capture_order(plan, num_layers))

    @property
    def missing(self) -> list[CaptureKey]:
        """What is left, in the order of its capture."""
        return list(self._missing)

    @property
    def next(self) -> CaptureKey | None:
        """The next to capture; None: nothing is left."""
        return next(iter(self._missing), None)

    def note(self, key: CaptureKey) -> None:
        del self._missing[key]

    def max_batch_size(self, partition: SmPartition) -> int:
        """Most rows of a step that may be placed on a partition now, 0 for none.

        The whole GPU takes any batch as soon as its first graph is there. Another partition only takes batches that are
        padded as planned, since predictions count with that.
        """
        sizes = self._sizes[partition]
        if partition == WHOLE_GPU:
            return 0 if GraphKey(sizes[-1]) in self._missing else sizes[-1]
        return max(takewhile(lambda size: GraphKey(size, partition) not in self._missing, sizes), default=0)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """Cost of capturing at a start; ``num_bytes`` of device memory include workspaces allocated on the way."""

    num_graphs: int
    compile_seconds: float
    capture_seconds: float
    num_bytes: int
