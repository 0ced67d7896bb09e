"""A histogram for Prometheus that is cheap to observe: it is asked for every token of every stream."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS_S = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0,
)  # fmt: skip
"""Upper bounds as vLLM has them, finer below for single tokens."""


class Histogram:
    """Counts of observations by bucket, and their sum.

    Args:
        name: of the metric.
        documentation: what it measures.
        bounds_s: upper bounds of the buckets, rising; one without a bound follows them.
    """

    def __init__(self, name: str, documentation: str, bounds_s: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def family(self, model_name: str) -> HistogramMetricFamily:
        """The metric as it stands."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model_name"])
        total, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds_s), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([model_name], buckets, self._sum_s)
        return family
