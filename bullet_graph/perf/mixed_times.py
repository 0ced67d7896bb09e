"""Times of forwards that hold prompt rows and decode rows together."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.surface import NOTHING_MEASURED, Surface, clamp_cells
from bullet_graph.perf.table import MixedPoint

_USUAL_DEPTH = 8192.0

_LEAST_SHARE = 0.25
"""Attention is never taken for more than the rest of a forward's time."""


class MixedTimes:
    """Milliseconds of a mixed forward on the whole GPU.

    A forward is taken apart: the attention of its prompt rows (a slope by their depth, from prefill alone), that of its
    decode rows (a slope by KV tokens, from the mixed points, else from decode alone) and the rest, a surface over
    prompt rows and decode rows. Without any mixed point the rest is a prefill of all the rows together.

    Args:
        points: measured.
        decode: decode alone on the whole GPU.
        prefill: prefill alone on the whole GPU.
    """

    def __init__(self, points: Iterable[MixedPoint], decode: Surface, prefill: Surface) -> None:
        points = tuple(points)
        measured_xs = sorted({float(p.tokens) for p in points})
        measured_ys = sorted({float(p.batch_size) for p in points})
        xs = sorted({*prefill.xs, *measured_xs})
        ys = sorted({0.0, *decode.xs, *measured_ys})
        depth_ms = _rising([_slope(prefill, x) for x in xs])
        kv_ms = [_kv_slope(y, points, decode) for y in ys]
        rest: dict[tuple[float, float], list[float]] = {}
        for p in points:
            prompt_ms = depth_ms[xs.index(p.tokens)] * attention_pairs(p.tokens) / p.tokens
            kv_part_ms = kv_ms[ys.index(p.batch_size)] * p.batch_size * p.context_tokens
            part_ms = max(p.ms - prompt_ms - kv_part_ms, _LEAST_SHARE * p.ms)
            rest.setdefault((p.tokens, p.batch_size), []).append(part_ms)
        measured = {place: sum(parts) / len(parts) for place, parts in rest.items()}
        scales = {(x, y): ms / prefill(x + y, 0.0) for (x, y), ms in measured.items()}
        filled = [[_scale(x, y, scales) * prefill(x + y, 0.0) for y in ys] for x in xs]
        cells = clamp_cells(filled, [[measured.get((x, y)) for y in ys] for x in xs])
        self._rest = Surface(xs, ys, cells, (measured_xs[0], measured_xs[-1]) if points else NOTHING_MEASURED)
        self._batch_range = (measured_ys[0], measured_ys[-1]) if points else NOTHING_MEASURED
        self._xs, self._ys = xs, ys
        self._depth_ms, self._kv_ms = depth_ms, kv_ms

    def __call__(self, tokens: int, pairs: float, batch_size: int, kv_tokens: float) -> tuple[float, bool]:
        """Milliseconds, and whether rows and batch lie within the measured range."""
        ms = (
            self._rest(tokens, batch_size)
            + _interpolate(self._xs, self._depth_ms, tokens) * pairs / tokens
            + _interpolate(self._ys, self._kv_ms, batch_size) * kv_tokens
        )
        least, greatest = self._batch_range
        return ms, least <= batch_size <= greatest and self._rest.is_measured(tokens)


def _slope(surface: Surface, x: float) -> float:
    """Milliseconds that one more token of depth costs x rows, over the usual depths."""
    return (surface(x, _USUAL_DEPTH) - surface(x, 0.0)) / _USUAL_DEPTH


def _kv_slope(batch_size: float, points: Sequence[MixedPoint], decode: Surface) -> float:
    """Milliseconds that one more KV token costs, at the measured batch size nearest to this one."""
    slopes: dict[int, list[float]] = {}
    by_place: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for p in points:
        by_place.setdefault((p.tokens, p.batch_size), []).append((p.context_tokens, p.ms))
    for (_, rows), pairs in by_place.items():
        (short, short_ms), (long, long_ms) = min(pairs), max(pairs)
        if long > short:
            slopes.setdefault(rows, []).append(max(long_ms - short_ms, 0.0) / (rows * (long - short)))
    if slopes:
        nearest = min(slopes, key=lambda rows: abs(rows - batch_size))
        return sum(slopes[nearest]) / len(slopes[nearest])
    at_least_one = max(batch_size, 1.0)
    return _slope(decode, at_least_one) / at_least_one


def _scale(x: float, y: float, scales: dict[tuple[float, float], float]) -> float:
    """Between measured places, their scales weighted by nearness (the inverse square of the logarithms' distance)."""
    if (x, y) in scales:
        return scales[x, y]
    if not scales:
        return 1.0
    weights = [
        1 / (math.log(x / near_x) ** 2 + math.log((y + 1) / (near_y + 1)) ** 2) for near_x, near_y in scales
    ]
    return sum(w * scale for w, scale in zip(weights, scales.values(), strict=True)) / sum(weights)


def _rising(values: Iterable[float]) -> list[float]:
    greatest = 0.0
    return [greatest := max(greatest, value) for value in values]


def _interpolate(xs: Sequence[float], values: Sequence[float], x: float) -> float:
    i = bisect_right(xs, x, 1, len(xs) - 1)
    low = values[i - 1]
    return low + (values[i] - low) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
