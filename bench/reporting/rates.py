"""The best rates that any file has of each kind of work: what arithmetic about limits goes by."""

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from bench.reporting.evidence import TARGET_DEVICE, Evidence, Source
from bullet_graph.errors import ConfigError
from bullet_graph.perf.roofline import DEVICE_SPECS

PREFILL_GEMM = "prefill_gemm.json"
PREFILL_ATTENTION = "prefill_attention.json"
DECODE_ATTENTION = "decode_attention.json"
DECODE_STEP = "decode_step.json"
_LEAST_ROWS = 2048
"""Of a product that counts as one of many rows."""


_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate.

    Attributes:
        per_s: operations or bytes a second.
        watts: of the GPU meanwhile; None: no file tells.
        source: what it was measured at, and the file that tells.
    """

    per_s: float
    watts: float | None
    source: str


@dataclass(frozen=True, slots=True, order=True)
class _DecodeAlone:
    """Power of decode steps on a whole GPU, with nothing beside them; those that read the most come last.

    Attributes:
        sms: of the GPU.
        kv_tokens: that a step reads.
        watts: mean.
        file: that tells.
    """

    sms: int
    kv_tokens: int
    watts: float
    file: str


@dataclass(frozen=True, slots=True)
class Rates:
    """The highest of each, of the same card where a file of it has one; None: no file has one.

    Attributes:
        products: of a layer's four matrix products alone, operations/s.
        layers: of whole layers without attention as the engine runs them; operations of the products alone count.
        prompt_attention: operations/s.
        kv_reads: of decode attention, bytes/s.
        copy: of device memory, bytes read and written/s.
    """

    products: Rate | None
    layers: Rate | None
    prompt_attention: Rate | None
    kv_reads: Rate | None
    copy: Rate | None


def rates_of(evidence: Evidence, cards: Set[str] = frozenset()) -> Rates:
    """Look through all files of the device that the targets are for.

    Args:
        evidence: the files.
        cards: on which the figure was measured that the rates are to explain: cards of one name differ under their
            power cap, so rates of the same card go before higher ones of others.

    Raises:
        ConfigError: a file that should have a rate is damaged.
    """
    fitted = 1e12 * DEVICE_SPECS[TARGET_DEVICE].attention_tflops
    decode = max((found for _, found in _each(evidence, _decode_alone)), default=None)

    def highest(find: Callable[[Source], Iterator[Rate]]) -> Rate | None:
        found = list(_each(evidence, find))
        same = [
            replace(rate, source=f"{rate.source}, the same card")
            for source, rate in found
            if source.is_of(cards)
        ]
        return max(same or [rate for _, rate in found], default=None, key=lambda rate: rate.per_s)

    return Rates(
        products=highest(lambda source: _products(source, "products alone")),
        layers=highest(lambda source: _products(source, "engine")),
        prompt_attention=highest(_prompt_attention)
        or Rate(fitted, None, "fitted to sustained runs, `bullet_graph/perf/roofline.py`"),
        kv_reads=highest(lambda source: _kv_reads(source, decode)),
        copy=highest(_copy),
    )


def _each(evidence: Evidence, find: Callable[[Source], Iterator[_Found]]) -> Iterator[tuple[Source, _Found]]:
    for source in evidence.sources:
        if _devices(source) == {TARGET_DEVICE}:
            with damaged(source):
                for found in find(source):
                    yield source, found


@contextmanager
def damaged(source: Source) -> Iterator[None]:
    """Say which file it is that has not what was looked for.

    Raises:
        ConfigError: the code inside found a field missing, or of another type.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{source.name} is damaged: {type(error).__name__}: {error}; measure it anew or take it away"
        ) from None


def _devices(source: Source) -> set[str]:
    """As the source tells; files without a provenance may name the device themselves."""
    told = source.fields.get("device") if isinstance(source.fields, dict) else None
    return source.devices or ({told} if isinstance(told, str) else set())


def _products(source: Source, name: str) -> Iterator[Rate]:
    """Rows of many tokens whose name begins so."""
    if source.name != PREFILL_GEMM:
        return
    for row in source.fields["rows"]:
        if row["name"].startswith(name) and row.get("rows", 0) >= _LEAST_ROWS and "tflops" in row:
            told = f"{row['rows']:,} rows, {row['watts']:,} W, {row['mhz']:,} MHz, `{source.name}`"
            yield Rate(row["tflops"] * 1e12, float(row["watts"]), told)


def _prompt_attention(source: Source) -> Iterator[Rate]:
    if source.name != PREFILL_ATTENTION:
        return
    for row in source.fields["rows"]:
        if row["part"] == "attention":
            told = f"{row['prompts']:,} × {row['tokens']:,} tokens, `{source.name}`"
            for way in ("paged", "ragged"):
                yield Rate(row[f"{way}_tflops"] * 1e12, None, f"{way}, {told}")


def _kv_reads(source: Source, decode: _DecodeAlone | None) -> Iterator[Rate]:
    """Decode attention on the whole GPU; the file has no power, that of decode steps stands for it."""
    if source.name != DECODE_ATTENTION:
        return
    watts = None if decode is None else decode.watts
    power = "" if decode is None else f"; {watts:.0f} W as decode steps of `{decode.file}`"
    cases = source.fields["cases"]
    whole_gpu = max((case["num_sms"] for case in cases), default=0)
    for case in cases:
        if case["num_sms"] == whole_gpu:
            told = f"{case['rows']:,} × {case['context']:,} tokens, `{source.name}`{power}"
            for kernel in (case["flashinfer"], case["flashinfer_after"], *case["triton"]):
                yield Rate(kernel["gb_per_s"] * 1e9, watts, told)


def _decode_alone(source: Source) -> Iterator[_DecodeAlone]:
    if source.is_scaling:
        kv_tokens = source.fields["batch_size"] * source.fields["context"]
        for point in source.fields["points"]:
            if point["decode_sms"] and not point["prefill_sms"] and point["device"]["power_w"]:
                watts = point["device"]["power_w"]["mean"]
                yield _DecodeAlone(point["decode_sms"], kv_tokens, watts, source.name)


def _copy(source: Source) -> Iterator[Rate]:
    reports = [source.fields] if source.name == DECODE_STEP else source.measurements
    for one in reports:
        if one.get("copy_gb_per_s"):
            yield Rate(one["copy_gb_per_s"] * 1e9, None, f"`{source.name}`")
