"""Which rates a system is served at."""

from collections.abc import Sequence
from typing import Protocol


class Rates(Protocol):
    """Which rates a cell is served at: :class:`FixedRates`, or the project's ``GoodputSearch``."""

    @property
    def goodput(self) -> float | None:
        """The highest rate recorded that served enough."""

    @property
    def ceiling(self) -> float | None:
        """The lowest rate above the goodput that served too few; None: none was recorded."""

    def next_rate(self) -> float | None:
        """The next rate, in requests a second; None: no more."""

    def record(self, rate: float, attainment: float) -> None:
        """Tell what share of the requests met all targets at a rate."""


class FixedRates:
    """Given rates, one after the other, and all of them again so many times.

    Args:
        rates: in requests a second.
        repeats: at least 1.
        attainment: the share that counts as enough.
    """

    def __init__(self, rates: Sequence[float], repeats: int, attainment: float) -> None:
        self._left = [rate for _ in range(repeats) for rate in rates]
        self._attainment = attainment
        self._worst: dict[float, float] = {}

    @property
    def goodput(self) -> float | None:
        """The highest rate at which every run served enough; None: at none."""
        return max((rate for rate, share in self._worst.items() if share >= self._attainment), default=None)

    @property
    def ceiling(self) -> float | None:
        """The lowest rate above the goodput at which a run served too few; None: at none."""
        bad = (rate for rate, share in self._worst.items() if share < self._attainment)
        return min((rate for rate in bad if rate > (self.goodput or 0.0)), default=None)

    def next_rate(self) -> float | None:
        """The next rate; None: all are done."""
        return self._left[0] if self._left else None

    def record(self, rate: float, attainment: float) -> None:
        """Tick a run off."""
        self._worst[rate] = min(attainment, self._worst.get(rate, 1.0))
        if rate in self._left:
            self._left.remove(rate)
