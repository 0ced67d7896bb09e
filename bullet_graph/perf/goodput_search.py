"""Searches for a goodput, one run at a time: several searches can take turns, and resume after an interruption."""

import math
from dataclasses import dataclass, field

from bullet_graph.errors import ConfigError

SLOWEST_RATE = 0.01
"""Requests per second; at this rate nearly all are served alone, so slower arrivals change nothing."""

FASTEST_RATE = 1e4
"""Requests per second; in effect all arrive at once."""

_LONGEST_STEP = 2.0


@dataclass(kw_only=True, eq=False)
class GoodputSearch:
    """Finds the highest rate at which enough requests meet their targets.

    The rate rises, or falls, from ``first_rate`` until one rate that serves enough and one that does not are known. The
    first step is a factor of ``step``; each further step is the square of the one before, up to a factor of two (a
    ``step`` of two or more stays as it is). The gap is then halved. The next rate depends only on the runs recorded.

    Args:
        first_rate: in requests per second; later rates stay from ``SLOWEST_RATE`` to ``FASTEST_RATE``.
        attainment: the share of requests that must meet all targets, in (0, 1].
        tolerance: stop when the two rates are this close, relative to the lower one.

    Raises ConfigError for a number out of range.
    """

    first_rate: float
    attainment: float = 0.9
    tolerance: float = 0.02
    max_runs: int = 20
    step: float = 2.0
    _serves_enough: dict[float, bool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        limits = (
            ("first_rate", self.first_rate, 0),
            ("tolerance", self.tolerance, 0),
            ("step", self.step, 1),
        )
        for name, value, least in limits:
            if not (math.isfinite(value) and value > least):
                raise ConfigError(f"{name} must be a finite number above {least}, got {value}")
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"attainment must be a share above 0 and at most 1, got {self.attainment}")
        if self.max_runs < 1:
            raise ConfigError(f"max_runs must be at least 1, got {self.max_runs}")

    def record(self, rate: float, attainment: float) -> None:
        """Add a run at any rate, asked for or not; a later run at the same rate replaces it."""
        self._serves_enough[rate] = attainment >= self.attainment

    def next_rate(self) -> float | None:
        """The next rate to serve at, in requests per second; None: the search is over."""
        if not self._serves_enough:
            return self.first_rate
        if len(self._serves_enough) >= self.max_runs:
            return None
        good, bad = self.goodput, self.ceiling
        if good is not None and bad is not None:
            middle = (good + bad) / 2
            return middle if bad - good > self.tolerance * good and good < middle < bad else None
        # Something was recorded, so one of the two is known.
        rate = good * self._factor() if good is not None else (bad or 0.0) / self._factor()
        return rate if SLOWEST_RATE <= rate <= FASTEST_RATE else None

    @property
    def goodput(self) -> float | None:
        """The highest rate recorded at which enough requests met their targets; None: at none."""
        return max((rate for rate, enough in self._serves_enough.items() if enough), default=None)

    @property
    def ceiling(self) -> float | None:
        """The lowest rate above the goodput that served too few; None: none was recorded."""
        good = self.goodput or 0.0
        too_fast = [rate for rate, enough in self._serves_enough.items() if not enough and rate > good]
        return min(too_fast, default=None)

    def _factor(self) -> float:
        longest = max(self.step, _LONGEST_STEP)
        squarings = len(self._serves_enough) - 1
        return float(self.step ** min(2**squarings, math.log(longest, self.step)))
