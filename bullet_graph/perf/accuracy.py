"""Prediction errors on points that the model has not seen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.perf.table import PerfTable, median_ms


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
    kinds = dict.fromkeys(error.kind for error in errors)
    return ErrorReport(
        points=errors,
        kinds=tuple(_summarize(kind, [error for error in errors if error.kind == kind]) for kind in kinds),
        overall=_summarize("all", errors) if errors else None,
    )


def _errors(table: PerfTable, model: PerformanceModel) -> Iterator[PointError]:
    for point, repeats in table.held_back.items():
        predicted_ms, from_measured = point.predicted(model)
        kinds = ("split decode", "split prefill") if point.kind == "split" else (point.kind,)
        for kind, measured, predicted in zip(kinds, median_ms(repeats), predicted_ms, strict=True):
            yield PointError(kind, str(point), measured, predicted, from_measured)


def _summarize(kind: str, errors: Sequence[PointError]) -> ErrorSummary:
    median, p90 = np.percentile([abs(error.percent) for error in errors], (50, 90))
    worst = max(errors, key=lambda error: abs(error.percent))
    return ErrorSummary(kind, len(errors), float(median), float(p90), worst)
