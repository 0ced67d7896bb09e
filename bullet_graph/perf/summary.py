"""A sample of times, told in a few numbers."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PercentileSummary:
    """Mean, spread and percentiles of a sample, in the sample's own unit (milliseconds throughout).

    Attributes:
        mean: arithmetic mean.
        std: population standard deviation.
        p50: median; percentiles between two values are interpolated linearly.
        p90: 90th percentile.
        p99: 99th percentile.
    """

    mean: float
    std: float
    p50: float
    p90: float
    p99: float


def summarize_ms(values: Iterable[float]) -> PercentileSummary | None:
    """Summarize times in milliseconds; None where there are none (a figure of nothing is not 0)."""
    sample = np.fromiter(values, dtype=np.float64)
    if sample.size == 0:
        return None
    p50, p90, p99 = (float(p) for p in np.percentile(sample, (50, 90, 99)))
    return PercentileSummary(float(sample.mean()), float(sample.std()), p50, p90, p99)
