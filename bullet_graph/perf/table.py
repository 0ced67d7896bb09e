"""The measured performance table: its points, and what it holds for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bullet_graph.errors import PerfTableError
from bullet_graph.perf.traffic import DecoderShape

PROFILE_AGAIN = "measure it again with `bullet-graph profile`"
_SHAPE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "qkv_bias",
    "qk_norm",
)


class _Checked:
    """Checks the numbers of a point when it is made, so that no table can hold a bad one."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            name, value = entry.name, getattr(self, entry.name)
            if name.endswith("_ms") and isinstance(value, tuple):
                good, required = all(map(_is_time, value)), "finite numbers above 0"
            elif name == "ms" or name.endswith("_ms"):
                good, required = _is_time(value), "a finite number above 0"
            else:
                least = 0 if name == "cached_tokens" else 1
                good = _is_int(value, least) or (value is None and name == "sms")
                required = f"an integer of at least {least}"
            if not good:
                raise PerfTableError(
                    f"{type(self).__name__}.{name} must be {required}, got {value!r}: {PROFILE_AGAIN}"
                )


@dataclass(frozen=True, slots=True)
class DecodePoint(_Checked):
    """One decode step, alone.

    Attributes:
        batch_size: rows.
        context_tokens: tokens that each row attends to.
        sms: SMs of the lane, None for the whole GPU.
        ms: median time of a step.
        repeats_ms: every repeat, in the order measured.
    """

    batch_size: int
    context_tokens: int
    sms: int | None
    ms: float
    repeats_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PrefillPoint(_Checked):
    """A forward, all layers, of one prompt chunk, alone.

    Attributes:
        tokens: rows.
        cached_tokens: tokens of the prompt before them.
        sms: SMs of the prefill lane, None for the whole GPU.
        ms: median time of the forward.
        repeats_ms: every repeat, in the order measured.
    """

    tokens: int
    cached_tokens: int
    sms: int | None
    ms: float
    repeats_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MixedPoint(_Checked):
    """A forward of one prompt chunk (no cached prefix) and decode rows together, on the whole GPU.

    Attributes:
        tokens: rows of the prompt.
        batch_size: decode rows.
        context_tokens: tokens that each decode row attends to.
        ms: median time of the forward.
        repeats_ms: every repeat, in the order measured.
    """

    tokens: int
    batch_size: int
    context_tokens: int
    ms: float
    repeats_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SplitPoint(_Checked):
    """Decode steps beside forwards of prompt chunks (no cached prefix), both lanes kept busy.

    Attributes:
        decode_sms: SMs of the decode lane; the prefill lane has the others.
        batch_size: decode rows.
        context_tokens: tokens that each decode row attends to.
        tokens: rows of the prompt chunk.
        decode_ms: median time of a decode step.
        prefill_ms: median time of a forward, all layers.
        decode_repeats_ms: decode step of every repeat.
        prefill_repeats_ms: forward of every repeat.
    """

    decode_sms: int
    batch_size: int
    context_tokens: int
    tokens: int
    decode_ms: float
    prefill_ms: float
    decode_repeats_ms: tuple[float, ...]
    prefill_repeats_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Points:
    """Measured points by kind."""

    decode: tuple[DecodePoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    mixed: tuple[MixedPoint, ...] = ()
    split: tuple[SplitPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class TableKey:
    """What a table holds for: times measured under one key say nothing about another.

    Attributes:
        gpu: the device's name, such as ``NVIDIA H200``.
        num_sms: its SMs.
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
    """All that one ``bullet-graph profile`` measured.

    Attributes:
        key: what the table holds for.
        num_layers: layers of the model; the key's shape says the same.
        points: what predictions are made of.
        held_back: points that predictions do not see, to judge them by.
        provenance: date, driver, versions, commit, how it was measured.
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
    """The numbers of a model that decide its times, as a table keeps them; flags are 0 or 1."""
    return {name: int(getattr(shape, name)) for name in _SHAPE_NUMBERS}


def require_match(table: PerfTable, key: TableKey) -> None:
    """Make sure that a table holds for this GPU, model, dtype and these kernels.

    Raises:
        PerfTableError: it does not; the message names every component that differs.
    """
    found = table.key
    differences = [
        f"{name} {required!r} required, {value!r} found"
        for name, required, value in (
            ("gpu", key.gpu, found.gpu),
            ("num_sms", key.num_sms, found.num_sms),
            ("dtype", key.dtype, found.dtype),
        )
        if required != value
    ]
    if dict(key.shape) != dict(found.shape):
        numbers = _mapping_differences(key.shape, found.shape)
        differences.append(f"model {key.model!r} required, {found.model!r} found ({'; '.join(numbers)})")
    differences += [f"kernels: {text}" for text in _mapping_differences(key.kernels, found.kernels)]
    if differences:
        raise PerfTableError(
            f"the performance table was measured under other conditions: {'; '.join(differences)}. "
            "Run `bullet-graph profile` here to measure one that fits"
        )


def _mapping_differences(required: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    names = sorted(required.keys() | found.keys())
    return [
        f"{name} {required.get(name)!r} required, {found.get(name)!r} found"
        for name in names
        if required.get(name) != found.get(name)
    ]


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
