"""Prediction errors on points that the model has not seen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bullet_graph.perf.performance import PerformanceModel, attention_pairs
from bullet_graph.perf.table import PerfTable


@dataclass(frozen=True, slots=True)
class PointError:
    """One prediction and the median of its measurements; ``point`` says what ran, in words.

    The kind is ``decode``, ``prefill``, ``mixed``, ``split decode`` or ``split prefill``.
    """

    kind: str
    point: str
    measured_ms: float
    predicted_ms: float
    from_measured: bool

    @property
    def percent(self) -> float:
        """Relative error; positive if the prediction is too long."""
        return (self.predicted_ms / self.measured_ms - 1) * 100


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Absolute relative errors, in percent, of the points of one ``kind``, or of ``all``."""

    kind: str
    num_points: int
    median_percent: float
    p90_percent: float
    worst: PointError


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Errors on a table's held-back points: each, by kind in the points' order, and overall (None for no points)."""

    points: tuple[PointError, ...]
    kinds: tuple[ErrorSummary, ...]
    overall: ErrorSummary | None


def held_back_errors(table: PerfTable, model: PerformanceModel) -> ErrorReport:
    """Compare predictions with the points that a table held back."""
    errors = tuple(_errors(table, model))
    by_kind: dict[str, list[PointError]] = {}
    for error in errors:
        by_kind.setdefault(error.kind, []).append(error)
    return ErrorReport(
        points=errors,
        kinds=tuple(_summarize(kind, group) for kind, group in by_kind.items()),
        overall=_summarize("all", errors) if errors else None,
    )


def _errors(table: PerfTable, model: PerformanceModel) -> Iterator[PointError]:
    points = table.held_back
    for d in points.decode:
        step = model.decode(d.batch_size, d.batch_size * d.context_tokens, d.sms)
        text = f"{d.batch_size} rows of context {d.context_tokens} on {_sms(d.sms)}"
        yield PointError("decode", text, d.ms, step.ms, step.measured)
    for p in points.prefill:
        forward = model.prefill(p.tokens, attention_pairs(p.tokens, p.cached_tokens), p.sms)
        text = f"{p.tokens} tokens after {p.cached_tokens} on {_sms(p.sms)}"
        yield PointError("prefill", text, p.ms, forward.ms, forward.measured)
    for m in points.mixed:
        kv_tokens = m.batch_size * m.context_tokens
        forward = model.mixed(m.tokens, attention_pairs(m.tokens), m.batch_size, kv_tokens)
        text = f"{m.tokens} tokens with {m.batch_size} rows of context {m.context_tokens}"
        yield PointError("mixed", text, m.ms, forward.ms, forward.measured)
    for s in points.split:
        kv_tokens = s.batch_size * s.context_tokens
        both = model.split(s.decode_sms, s.batch_size, kv_tokens, s.tokens, attention_pairs(s.tokens))
        rows = f"{s.batch_size} rows of context {s.context_tokens} on {s.decode_sms} SMs"
        text = f"{rows} beside {s.tokens} tokens"
        yield PointError("split decode", text, s.decode_ms, both.decode_ms, both.measured)
        yield PointError("split prefill", text, s.prefill_ms, both.prefill_ms, both.measured)


def _summarize(kind: str, errors: Sequence[PointError]) -> ErrorSummary:
    median, p90 = np.percentile([abs(error.percent) for error in errors], (50, 90))
    worst = max(errors, key=lambda error: abs(error.percent))
    return ErrorSummary(kind, len(errors), float(median), float(p90), worst)


def _sms(sms: int | None) -> str:
    return "the whole GPU" if sms is None else f"{sms} SMs"
