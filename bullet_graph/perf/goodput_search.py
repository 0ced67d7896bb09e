"""Goodput: the highest request rate at which a share of the requests meets all targets, found by sustained runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from bullet_graph.errors import ConfigError

SHARES = (0.90, 0.99)
"""Shares of requests on time; the runs of one search are for both goodputs, ``goodput_90`` and ``goodput_99``."""

FASTEST_RATE = 1e4
"""Requests per second; in effect all arrive at once."""

LEAST_SECONDS = 120
LEAST_REQUESTS = 300
WARMUP_S = 10.0
"""Requests that arrive before this time of a sustained run are served but not counted: they meet no queue yet."""

CONVERSATIONS_WARMUP_S = 40.0
"""The same where prompts are turns of conversations: there are few later turns until users have thought."""

_WIDEST = 16
"""A rate slower than another by this factor is not tried: hardly anything queues there, and it takes long."""


def requests_for(rate: float) -> int:
    """How many requests a sustained run at a rate, in requests per second, has at least."""
    return max(LEAST_REQUESTS, math.ceil(round(LEAST_SECONDS * rate, 6)))


class RateRun(NamedTuple):
    """The share of requests on time in a run at a rate, in requests per second; unstable: the queue only grew."""

    rate: float
    share: float
    stable: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "RateRun":
        """From a run's fields in JSON."""
        return cls(fields["request_rate"], fields["slo_attainment"], fields["stable"])


class Goodput(NamedTuple):
    """What runs tell of a goodput, in requests per second: at least ``rate``, and less than ``below`` unless equal.

    None: no run served the share (``rate``), or every run did (``below``).
    """

    rate: float | None
    below: float | None

    @classmethod
    def of(cls, runs: Sequence[RateRun], share: float) -> "Goodput":
        """The goodput for a share, interpolated where the next rate was stable: both figures are then that rate."""
        good, bad = bracket(runs, share)
        if good and bad and bad.stable:
            rate = good.rate + (bad.rate - good.rate) * (good.share - share) / (good.share - bad.share)
            return cls(rate, rate)
        return cls(good and good.rate, bad and bad.rate)


def goodput_fields(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the fields of runs tell, for a JSON file: ``goodput_90``, ``goodput_90_below``, …, and ``sustained``.

    Runs of all requests at once, whose ``stable`` is None, tell nothing.
    """
    at_rates = [run for run in runs if run["stable"] is not None]
    fields: dict[str, Any] = {"sustained": bool(at_rates) and all(run["sustained"] for run in at_rates)}
    for share in SHARES:
        name = f"goodput_{100 * share:.0f}"
        fields[name], fields[f"{name}_below"] = Goodput.of([RateRun.of(run) for run in at_rates], share)
    return fields


def bracket(runs: Sequence[RateRun], share: float) -> tuple[RateRun | None, RateRun | None]:
    """The highest rate that serves a share, and the next rate, which does not; shares never rise with the rate.

    A rate at or above an unstable one serves nothing. Shares below it are those of the isotonic regression: where a
    higher rate did better by chance, both count with their mean.
    """
    first_unstable = min((run.rate for run in runs if not run.stable), default=math.inf)
    rates = sorted({run.rate for run in runs})
    means = [fmean(run.share for run in runs if run.rate == rate) for rate in rates if rate < first_unstable]
    # The min-max formula of the regression.
    fitted = [
        min(max(fmean(means[low:high]) for high in range(index + 1, len(means) + 1)) for low in range(index + 1))
        for index in range(len(means))
    ]
    points = [RateRun(*point, True) for point in zip(rates, fitted, strict=False)]
    points += [RateRun(rate, 0.0, False) for rate in rates[len(fitted) :]]
    num_good = sum(point.share >= share for point in points)
    return points[num_good - 1] if num_good else None, points[num_good] if num_good < len(points) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSearch:
    """Plans the rates of a search for the goodputs of some ``shares``.

    The rate rises, or falls, from ``first_rate`` until one rate serves a share and another does not. The first step is
    a factor of ``step``. Each further step is as long as all before it, and at most a factor of two, or of ``step``.
    The gap is then halved until it is within the relative ``tolerance``. The share with the widest gap comes next.

    Rates are in requests per second, and at most ``fastest``. Raises ConfigError for a number out of range.
    """

    first_rate: float = 8.0
    tolerance: float = 0.05
    max_runs: int = 12
    step: float = 1.25
    fastest: float = FASTEST_RATE
    shares: tuple[float, ...] = SHARES

    def __post_init__(self) -> None:
        for name, least in (("first_rate", 0), ("tolerance", 0), ("step", 1), ("max_runs", 0)):
            if not least < getattr(self, name) < FASTEST_RATE:
                raise ConfigError(f"{name} must be above {least} and below 10,000, got {getattr(self, name)}")

    def next_rate(self, runs: Sequence[RateRun]) -> float | None:
        """The next rate to serve at, in requests per second, after these runs; None: the search is over."""
        if not runs:
            return self.first_rate
        plans = [] if len(runs) >= self.max_runs else [self._plan(runs, share) for share in self.shares]
        return max(plans, key=lambda plan: plan[0], default=(0.0, None))[1]

    def _plan(self, runs: Sequence[RateRun], share: float) -> tuple[float, float | None]:
        """How far the goodput for a share is from known, relative, and the rate to run for it; 0, None: it is known."""
        good, bad = bracket(runs, share)
        highest = max(run.rate for run in runs)
        factor = max(self.step, min(2.0, highest / min(run.rate for run in runs)))
        if good and bad:
            gap, rate = bad.rate / good.rate - 1, (good.rate + bad.rate) / 2
            is_new = gap > self.tolerance and good.rate < rate < bad.rate
        elif bad:
            gap, rate = math.inf, bad.rate / factor
            is_new = rate * _WIDEST >= highest
        else:
            gap, rate = math.inf, min(highest * factor, self.fastest)
            is_new = highest < rate < FASTEST_RATE
        return (gap, rate) if is_new else (0.0, None)
