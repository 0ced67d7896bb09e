"""A monotone surface through measured times: bilinear between nodes, filled where nothing was measured."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Reference = Callable[[float, float], float]
"""Milliseconds at (x, y) by another model, which gives the surface its form where nothing was measured."""

NOTHING_MEASURED = (math.inf, -math.inf)
"""Measured range of a surface without measured points."""

_FAR_YS = (1 << 14, 1 << 16, 1 << 18, 1 << 22)
"""Nodes beyond the measured depths; the last is beyond any context."""

_LEAST_SHARE = 0.25
"""Extrapolation downwards stops at this share of the row's smallest time."""


class Surface:
    """Milliseconds over rows x (batch size, or tokens of a chunk) and depth y (tokens that a row attends to).

    Times never fall as x or y rises. ``cells[i][j]`` is the time at the nodes ``xs[i]``, ``ys[j]``, which rise and are
    at least two each. ``measured_range`` is the least and greatest x near measured points.
    """

    __slots__ = ("_cells", "_last_x", "_last_y", "measured_range", "xs", "ys")

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], cells: Sequence[Sequence[float]], measured: tuple[float, float]
    ) -> None:
        self.xs = list(xs)
        self.ys = list(ys)
        self.measured_range = measured
        self._cells: list[list[float]] = _never_falling(cells).tolist()
        self._last_x = len(self.xs) - 1
        self._last_y = len(self.ys) - 1

    def __call__(self, x: float, y: float) -> float:
        """Milliseconds at (x, y); the last slope continues beyond the nodes."""
        xs, ys = self.xs, self.ys
        i = bisect_right(xs, x, 1, self._last_x)
        j = bisect_right(ys, y, 1, self._last_y)
        x0, y0 = xs[i - 1], ys[j - 1]
        v = (y - y0) / (ys[j] - y0)
        low, high = self._cells[i - 1], self._cells[i]
        a = low[j - 1]
        a += (low[j] - a) * v
        b = high[j - 1]
        b += (high[j] - b) * v
        return a + (b - a) * (x - x0) / (xs[i] - x0)

    def is_measured(self, x: float) -> bool:
        least, greatest = self.measured_range
        return least <= x <= greatest


def fill_surface(
    points: Iterable[tuple[float, float, float]],
    reference: Reference,
    *,
    xs: Iterable[float],
    ys: Iterable[float] = (),
    reference_from: float = math.inf,
) -> Surface:
    """Make a surface from scattered points.

    A row measured at several depths continues along its own slopes. A row measured at one depth takes the slope of
    the nearest row that has one (attention costs rows × depth), else the reference's. Other rows follow the reference,
    scaled to agree with the measured rows beside them.

    Args:
        points: (x, y, milliseconds); several at the same place are averaged.
        reference: positive everywhere.
        xs, ys: nodes in addition to those of the points.
        reference_from: least x where the reference itself is measured: from there up to the points' largest x, times
            count as measured. Infinite for arithmetic.
    """
    repeats: dict[float, dict[float, list[float]]] = {}
    for x, y, ms in points:
        repeats.setdefault(float(x), {}).setdefault(float(y), []).append(ms)
    rows = {x: {y: sum(times) / len(times) for y, times in row.items()} for x, row in repeats.items()}
    all_xs = sorted({*map(float, xs), *rows})
    near_ys = {0.0, *map(float, ys), *(y for row in rows.values() for y in row)}
    all_ys = sorted({*near_ys, *(float(y) for y in _FAR_YS if y > max(near_ys))})
    lines = {x: _row_line(x, rows, reference) for x in rows}
    nodes = sorted(rows)
    filled = [[_fill(x, y, lines, nodes, reference) for y in all_ys] for x in all_xs]
    measured = [[rows.get(x, {}).get(y) for y in all_ys] for x in all_xs]
    measured_range = (min(nodes[0], reference_from), nodes[-1]) if nodes else NOTHING_MEASURED
    return Surface(all_xs, all_ys, clamp_cells(filled, measured), measured_range)


def fill_like(points: Iterable[tuple[float, float, float]], form: Surface) -> Surface:
    """A surface through these points on the nodes of another, which gives it its form."""
    return fill_surface(points, form, xs=form.xs, ys=form.ys, reference_from=form.measured_range[0])


def nodes_around(measured: Sequence[float], end: float) -> list[float]:
    """Nodes beside the measured ones: powers of two below, doubles of the largest past ``end``, three in each gap."""
    below = [float(1 << power) for power in range(math.ceil(math.log2(min(measured, default=end))))]
    between = [round(a * (b / a) ** (i / 4)) for a, b in pairwise(measured) if b > a + 3 for i in (1, 2, 3)]
    above = [2 * max(measured, default=end)]
    while above[-1] < end:
        above.append(2 * above[-1])
    return [*below, *map(float, between), *above]


def _row_line(x: float, rows: Mapping[float, Mapping[float, float]], reference: Reference) -> Callable[[float], float]:
    row = rows[x]
    least_ms = _LEAST_SHARE * min(row.values())
    if len(row) > 1:
        ys = sorted(row)
        line = _line(ys, [row[y] for y in ys])
        return lambda y: max(line(y), least_ms)
    ((y0, ms),) = row.items()
    sloped = [other for other, values in rows.items() if len(values) > 1]
    if not sloped:
        scale = ms / reference(x, y0)
        return lambda y: scale * reference(x, y)
    nearest = min(sloped, key=lambda other: abs(math.log(other / x)))
    ys = sorted(rows[nearest])
    line = _line(ys, [rows[nearest][y] for y in ys])
    return lambda y: max(ms + (line(y) - line(y0)) * x / nearest, least_ms)


def _line(ys: Sequence[float], values: Sequence[float]) -> Callable[[float], float]:
    """Through all points, continued along the outer slopes; a falling slope is noise and taken as flat."""

    def value(y: float) -> float:
        j = min(max(bisect_left(ys, y), 1), len(ys) - 1)
        slope = (values[j] - values[j - 1]) / (ys[j] - ys[j - 1])
        if ys[0] <= y <= ys[-1]:
            return values[j - 1] + slope * (y - ys[j - 1])
        end = 0 if y < ys[0] else -1
        return values[end] + max(slope, 0.0) * (y - ys[end])

    return value


def _fill(
    x: float, y: float, lines: Mapping[float, Callable[[float], float]], nodes: Sequence[float], reference: Reference
) -> float:
    if x in lines:
        return lines[x](y)
    if not nodes:
        return reference(x, y)
    i = bisect_left(nodes, x)
    low, high = nodes[max(i - 1, 0)], nodes[min(i, len(nodes) - 1)]
    scale = lines[low](y) / reference(low, y)
    if low != high:
        # Outside the measured rows, the nearest row's scale applies.
        share = min(max(math.log(x / low) / math.log(high / low), 0.0), 1.0)
        scale += (lines[high](y) / reference(high, y) - scale) * share
    return scale * reference(x, y)


def clamp_cells(filled: Sequence[Sequence[float]], measured: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Measured cells, and filled ones limited to the range between the measured cells below and above them."""
    times = np.array(measured, dtype=np.float64)
    known = ~np.isnan(times)
    lowest = _never_falling(np.where(known, times, 0.0))
    highest = -np.flip(_never_falling(-np.flip(np.where(known, times, np.inf))))
    cells: list[list[float]] = np.where(known, times, np.clip(filled, lowest, highest)).tolist()
    return cells


def _never_falling(cells: ArrayLike) -> NDArray[np.float64]:
    """The running maximum along both axes."""
    return np.maximum.accumulate(np.maximum.accumulate(cells, axis=0), axis=1)
