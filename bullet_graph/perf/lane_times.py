"""Times of one lane by the SMs it has: alone, and beside the other lane."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from bullet_graph.perf.surface import Surface, fill_surface, nodes_around

LaneReference = Callable[[float, float, int], float]
"""Milliseconds of (rows, depth, SMs) by arithmetic."""


class LaneTimes:
    """Milliseconds of a lane, alone, by rows, depth (tokens that a row attends to) and SMs.

    Args:
        points: (SMs, rows, depth, milliseconds).
        reference: what carries the measured times on where there are none.
        num_sms: SMs of the whole GPU.
        end: rows up to which it is asked, beyond the measured ones.
    """

    def __init__(
        self,
        points: Iterable[tuple[int, float, float, float]],
        reference: LaneReference,
        *,
        num_sms: int,
        end: float,
    ) -> None:
        by_sms: dict[int, list[tuple[float, float, float]]] = {num_sms: []}
        for sms, *point in points:
            by_sms.setdefault(sms, []).append((point[0], point[1], point[2]))
        self._reference = reference
        self._rows = {sms: sorted({x for x, _, _ in measured}) for sms, measured in by_sms.items()}
        self.whole = fill_surface(
            by_sms.pop(num_sms),
            lambda x, y: reference(x, y, num_sms),
            xs=nodes_around(self._rows[num_sms], end),
        )
        # A part of the GPU is like the whole one, slower: few points place it.
        self._surfaces = {num_sms: self.whole} | {
            sms: fill_surface(
                measured,
                self.whole,
                xs=self.whole.xs,
                ys=self.whole.ys,
                reference_from=self.whole.measured_range[0],
            )
            for sms, measured in by_sms.items()
        }
        self._measured_sizes = sorted(self._surfaces)

    def __call__(self, x: float, y: float, sms: int) -> tuple[float, bool]:
        """Milliseconds of x rows of depth y on so many SMs, and whether they come from measured points alone."""
        surface = self.surface(sms)
        least, greatest = surface.measured_range
        return surface(x, y), least <= x <= greatest

    def measured_rows(self, sms: int) -> list[float]:
        """Numbers of rows measured on so many SMs, rising."""
        return self._rows.get(sms, [])

    def surface(self, sms: int) -> Surface:
        """Times on so many SMs; where none were measured there, what other numbers of SMs tell, kept for later."""
        surface = self._surfaces.get(sms)
        if surface is None:
            surface = self._surfaces[sms] = self._estimate(sms)
        return surface

    def _estimate(self, sms: int) -> Surface:
        xs, ys, sizes = self.whole.xs, self.whole.ys, self._measured_sizes
        index = bisect_left(sizes, sms)
        if index in (0, len(sizes)):
            nearest = sizes[max(index - 1, 0)]
            beside = self._surfaces[nearest]

            def scaled(x: float, y: float) -> float:
                return beside(x, y) * self._reference(x, y, sms) / self._reference(x, y, nearest)

            return fill_surface((), scaled, xs=xs, ys=ys)
        low, high = self._surfaces[sizes[index - 1]], self._surfaces[sizes[index]]
        share = (sms - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        cells = [[1 / ((1 - share) / low(x, y) + share / high(x, y)) for y in ys] for x in xs]
        least = max(low.measured_range[0], high.measured_range[0])
        return Surface(xs, ys, cells, (least, min(low.measured_range[1], high.measured_range[1])))


class Beside:
    """Times of both lanes, each kept busy, for one size of the decode lane.

    A lane's time depends on its own rows and depth, and more weakly on the other lane's work: that is told by one
    number (rows of the chunk beside a decode step, KV tokens of the step beside a chunk), between whose measured
    values the logarithm interpolates.

    Args:
        decode: (rows of the chunk, rows, depth, milliseconds of a decode step).
        prefill: (KV tokens of the step, rows, depth, milliseconds of a forward).
        decode_alone: on the same SMs.
        prefill_alone: on the others.
    """

    def __init__(
        self,
        *,
        decode: Iterable[tuple[float, float, float, float]],
        prefill: Iterable[tuple[float, float, float, float]],
        decode_alone: Surface,
        prefill_alone: Surface,
    ) -> None:
        self._decode = _Layers(_surfaces(decode, decode_alone))
        self._prefill = _Layers(_surfaces(prefill, prefill_alone))

    def __call__(
        self, batch_size: float, context_tokens: float, tokens: float, prefill_depth: float
    ) -> tuple[float, float, bool]:
        """Milliseconds of a decode step and of a forward, and whether both come from measured points alone."""
        decode_ms, decode_measured = self._decode(tokens, batch_size, context_tokens)
        prefill_ms, prefill_measured = self._prefill(batch_size * context_tokens, tokens, prefill_depth)
        return decode_ms, prefill_ms, decode_measured and prefill_measured


class _Layers:
    """Surfaces at several values of a third number, by whose logarithm they are interpolated."""

    __slots__ = ("_greatest", "_logs", "_measured", "_surfaces")

    def __init__(self, surfaces: Mapping[float, Surface]) -> None:
        keys = sorted(surfaces)
        self._logs = [math.log(key) for key in keys]
        self._surfaces = [surfaces[key] for key in keys]
        ranges = [surface.measured_range for surface in self._surfaces]
        self._measured = (min(least for least, _ in ranges), max(greatest for _, greatest in ranges))

    def __call__(self, key: float, x: float, y: float) -> tuple[float, bool]:
        least, greatest = self._measured
        is_measured = least <= x <= greatest
        logs, surfaces = self._logs, self._surfaces
        at = math.log(key) if key > 0 else logs[0]
        if at <= logs[0]:
            return surfaces[0](x, y), is_measured
        if at >= logs[-1]:
            return surfaces[-1](x, y), is_measured
        index = bisect_left(logs, at)
        low_ms = surfaces[index - 1](x, y)
        share = (at - logs[index - 1]) / (logs[index] - logs[index - 1])
        return low_ms + (surfaces[index](x, y) - low_ms) * share, is_measured


def _surfaces(points: Iterable[tuple[float, float, float, float]], alone: Surface) -> dict[float, Surface]:
    by_key: dict[float, list[tuple[float, float, float]]] = {}
    for key, *point in points:
        by_key.setdefault(key, []).append((point[0], point[1], point[2]))
    # The best measured group tells the form; a few points then place the others.
    richest = max(by_key, key=lambda key: len(by_key[key]))
    form = fill_surface(
        by_key.pop(richest), alone, xs=alone.xs, ys=alone.ys, reference_from=alone.measured_range[0]
    )
    return {richest: form} | {
        key: fill_surface(group, form, xs=form.xs, ys=form.ys, reference_from=form.measured_range[0])
        for key, group in by_key.items()
    }
