"""The performance model of a measured table: interpolation, and a roofline where nothing was measured."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from bullet_graph.errors import PerfTableError
from bullet_graph.hardware import gpu_spec
from bullet_graph.perf import table as tables
from bullet_graph.perf.performance import OPENED_ROWS, Prediction, SplitPrediction, attention_pairs, tile_of
from bullet_graph.perf.roofline import CHUNK_STEP_TOKENS, DTYPE_BYTES, DecoderShape, Roofline
from bullet_graph.perf.surface import NOTHING_MEASURED, Surface, clamp_cells, fill_like, fill_surface, nodes_around

_MAX_BATCH_SIZE = 4096
_MAX_CHUNK_TOKENS = 1 << 16
"""The roofline extends the measured times to this number of rows and beyond."""

_ENOUGH_SIZES = 3
"""With this many measured chunk sizes on a number of SMs, their rates decide; with fewer, arithmetic does."""


class TableModel:
    """Predicts times from a table; implements :class:`~bullet_graph.perf.performance.PerformanceModel`.

    Between measured rows, times follow a roofline scaled to both: each row more touches fewer new experts. They are
    linear in the tokens that a row attends to; rates are linear in SMs. Beyond the measured range the prediction has
    ``measured=False``. Predictions never fall as rows or depth rise, except for a split of a size that was not
    measured. Rows are at least 1; a mixed forward may have no decode rows. Decode steps are not padded.

    Raises PerfTableError where the table is of an interrupted profile, or of another model.
    """

    def __init__(self, table: tables.PerfTable, shape: DecoderShape) -> None:
        _check(table, shape)
        key = table.key
        num_sms = key.num_sms
        roofline = Roofline(gpu_spec(key.gpu, num_sms), shape, dtype_bytes=DTYPE_BYTES[key.dtype])
        self.num_layers = key.shape["num_layers"]
        self.num_sms = num_sms
        self._roofline = roofline
        self._decode = LaneTimes(
            [(p.sms or num_sms, p.batch_size, p.context_tokens, ms) for p, (ms,) in _of(table, "decode")],
            lambda rows, depth, sms: roofline.decode(rows, rows * depth, sms).ms,
            num_sms=num_sms,
            end=_MAX_BATCH_SIZE,
        )
        self._prefill = LaneTimes(
            [
                (p.sms or num_sms, p.tokens, attention_pairs(p.tokens, p.cached_tokens) / p.tokens, ms)
                for p, (ms,) in _of(table, "prefill")
            ],
            lambda rows, depth, sms: roofline.prefill(rows, rows * depth, sms).ms,
            num_sms=num_sms,
            end=_MAX_CHUNK_TOKENS,
        )
        mixed = [(p.tokens, p.batch_size, p.context_tokens, ms) for p, (ms,) in _of(table, "mixed")]
        self._mixed = MixedTimes(mixed, self._decode.whole, self._prefill.whole)
        split = _of(table, "split")
        self.decode_sms = tuple(sorted({p.sms or num_sms for p, _ in split}))
        self._beside = {sms: self._measured_beside(sms, split) for sms in self.decode_sms}

    def decode(self, batch_size: int, kv_tokens: int, sms: int | None = None) -> Prediction:
        return Prediction(*self._decode(batch_size, kv_tokens / batch_size, sms or self.num_sms))

    def prefill(self, tokens: int, pairs: float, sms: int | None = None) -> Prediction:
        return Prediction(*self._prefill(tokens, pairs / tokens, sms or self.num_sms))

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        return Prediction(*self._mixed(tokens, pairs, batch_size, kv_tokens))

    def split(self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float) -> SplitPrediction:
        """Both lanes at once; a size that was not measured takes the slowdown of the nearest measured size."""
        work = batch_size, kv_tokens / batch_size, tokens, pairs / tokens
        if decode_sms in self._beside:
            return self._split_measured(decode_sms, *work)
        decode_ms, prefill_ms = self._alone_ms(decode_sms, *work)
        if not self.decode_sms:
            slowdown = self._roofline.sharing_slowdown
            return SplitPrediction(slowdown * decode_ms, slowdown * prefill_ms, measured=False)
        nearest = min(self.decode_sms, key=lambda sms: abs(sms - decode_sms))
        beside = self._split_measured(nearest, *work)
        alone_decode_ms, alone_prefill_ms = self._alone_ms(nearest, *work)
        return SplitPrediction(
            decode_ms * beside.decode_ms / alone_decode_ms,
            prefill_ms * beside.prefill_ms / alone_prefill_ms,
            measured=False,
        )

    def _split_measured(
        self, decode_sms: int, batch_size: int, depth: float, tokens: int, prefill_depth: float
    ) -> SplitPrediction:
        decode, prefill = self._beside[decode_sms]
        decode_ms, decode_measured = decode(tokens, batch_size, depth)
        prefill_ms, prefill_measured = prefill(batch_size * depth, tokens, prefill_depth)
        return SplitPrediction(decode_ms, prefill_ms, decode_measured and prefill_measured)

    def _alone_ms(
        self, decode_sms: int, batch_size: int, depth: float, tokens: int, prefill_depth: float
    ) -> tuple[float, float]:
        decode_ms, _ = self._decode(batch_size, depth, decode_sms)
        prefill_ms, _ = self._prefill(tokens, prefill_depth, self.num_sms - decode_sms)
        return decode_ms, prefill_ms

    def wave_chunk_tokens(self, max_tokens: int, sms: int | None = None) -> int:
        """The chunk of at most ``max_tokens`` rows with the highest prefill rate.

        Measured sizes and ``max_tokens`` are compared at one depth. With fewer than three sizes, full waves decide.
        """
        if max_tokens < CHUNK_STEP_TOKENS:
            return max_tokens
        sms = sms or self.num_sms
        max_tokens -= max_tokens % CHUNK_STEP_TOKENS
        sizes = [int(tokens) for tokens in self._prefill.rows.get(sms, ()) if tokens <= max_tokens]
        if len(sizes) < _ENOUGH_SIZES:
            return self._roofline.wave_chunk_tokens(max_tokens, sms)
        if self._prefill.surface(sms).is_measured(max_tokens):
            sizes.append(max_tokens)
        return max(sizes, key=lambda tokens: (tokens / self._prefill(tokens, max_tokens / 2, sms)[0], tokens))

    def _measured_beside(self, decode_sms: int, split: "Timed") -> tuple["BesideTimes", "BesideTimes"]:
        """Times of the decode lane and of the prefill lane."""
        points = [(p, times) for p, times in split if (p.sms or self.num_sms) == decode_sms]
        return (
            BesideTimes(
                [(p.tokens, p.batch_size, p.context_tokens, ms) for p, (ms, _) in points],
                self._decode.surface(decode_sms),
            ),
            BesideTimes(
                [(p.batch_size * p.context_tokens, p.tokens, (p.tokens + 1) / 2, ms) for p, (_, ms) in points],
                self._prefill.surface(self.num_sms - decode_sms),
            ),
        )


Timed = list[tuple[tables.ProfilePoint, tuple[float, ...]]]
"""Points, and the times of each in ms."""


def _of(table: tables.PerfTable, kind: tables.PointKind) -> Timed:
    return [(point, tables.median_ms(repeats)) for point, repeats in table.points.items() if point.kind == kind]


def _check(table: tables.PerfTable, shape: DecoderShape) -> None:
    if not table.complete:
        raise PerfTableError(
            "a complete performance table is required, this one is of an interrupted profile: "
            "run `bullet-graph profile` again to resume it"
        )
    required = tables.shape_numbers(shape)
    if ranks := tables.rank_differences(required, table.key.shape):
        raise PerfTableError(
            f"the performance table is of {table.key.model} on other ranks: {'; '.join(ranks)}. Take the table "
            f"{tables.table_file_name(table.key.gpu, table.key.model, tables.format_name(table.key.dtype, required))}, "
            "or run `bullet-graph profile` with this tensor_parallel_size"
        )
    if dict(table.key.shape) != required:
        raise PerfTableError(
            f"the performance table is of {table.key.model}, another model or number format than the one to predict: "
            "run `bullet-graph profile` for this one"
        )


# ---- one lane ----


class LaneTimes:
    """Milliseconds of one lane alone, by rows, depth (tokens that a row attends to) and SMs.

    ``points`` are (SMs, rows, depth, milliseconds). ``reference`` gives milliseconds at (rows, depth, SMs) by
    arithmetic, and extends the measured times to ``end`` rows.
    """

    def __init__(
        self,
        points: Iterable[tuple[int, float, float, float]],
        reference: Callable[[float, float, int], float],
        *,
        num_sms: int,
        end: float,
    ) -> None:
        by_sms: dict[int, list[tuple[float, float, float]]] = {num_sms: []}
        for sms, x, y, ms in points:
            by_sms.setdefault(sms, []).append((x, y, ms))
        self._reference = reference
        # Numbers of rows measured, rising, by SMs.
        self.rows = {sms: sorted({x for x, _, _ in measured}) for sms, measured in by_sms.items()}
        self.whole = whole = fill_surface(
            by_sms.pop(num_sms), lambda x, y: reference(x, y, num_sms), xs=nodes_around(self.rows[num_sms], end)
        )
        # A part of the GPU behaves like the whole, but slower: a few points suffice to place it.
        self._surfaces = {num_sms: whole} | {sms: fill_like(measured, whole) for sms, measured in by_sms.items()}
        self._measured_sizes = sorted(self._surfaces)

    def __call__(self, x: float, y: float, sms: int) -> tuple[float, bool]:
        """Milliseconds of x rows of depth y on ``sms`` SMs, and whether they rest on measured points alone."""
        surface = self.surface(sms)
        return surface(x, y), surface.is_measured(x)

    def surface(self, sms: int) -> Surface:
        """Times on ``sms`` SMs; estimated from other numbers of SMs if none were measured."""
        if sms not in self._surfaces:
            self._surfaces[sms] = self._estimate(sms)
        return self._surfaces[sms]

    def _estimate(self, sms: int) -> Surface:
        xs, ys, sizes = self.whole.xs, self.whole.ys, self._measured_sizes
        index = bisect_left(sizes, sms)
        if index in (0, len(sizes)):
            nearest = sizes[max(index - 1, 0)]
            beside, reference = self._surfaces[nearest], self._reference
            return fill_surface(
                (), lambda x, y: beside(x, y) * reference(x, y, sms) / reference(x, y, nearest), xs=xs, ys=ys
            )
        low, high = self._surfaces[sizes[index - 1]], self._surfaces[sizes[index]]
        share = (sms - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        cells = [[1 / ((1 - share) / low(x, y) + share / high(x, y)) for y in ys] for x in xs]
        least = max(low.measured_range[0], high.measured_range[0])
        return Surface(xs, ys, cells, (least, min(low.measured_range[1], high.measured_range[1])))


class BesideTimes:
    """Milliseconds of a lane beside the other lane, both kept busy, for one size of the decode lane.

    They depend on the lane's own rows and depth, and more weakly on the other lane's work. One number stands for that
    work: rows of the chunk beside a decode step, or KV tokens of the step beside a chunk. Times are interpolated in its
    logarithm. ``points`` are (the other lane's work, rows, depth, milliseconds).
    """

    def __init__(self, points: Iterable[tuple[float, float, float, float]], alone: Surface) -> None:
        by_work: dict[float, list[tuple[float, float, float]]] = {}
        for work, x, y, ms in points:
            by_work.setdefault(work, []).append((x, y, ms))
        # The group with the most points gives the form; a few points then place the others.
        richest = max(by_work, key=lambda work: len(by_work[work]))
        form = fill_like(by_work.pop(richest), alone)
        surfaces = {richest: form} | {work: fill_like(group, form) for work, group in by_work.items()}
        self._logs = [math.log(work) for work in sorted(surfaces)]
        self._surfaces = [surfaces[work] for work in sorted(surfaces)]
        ranges = [surface.measured_range for surface in self._surfaces]
        self._measured = (min(least for least, _ in ranges), max(greatest for _, greatest in ranges))

    def __call__(self, work: float, x: float, y: float) -> tuple[float, bool]:
        """Milliseconds of x rows of depth y, and whether they rest on measured points alone."""
        least, greatest = self._measured
        is_measured = least <= x <= greatest
        logs, surfaces = self._logs, self._surfaces
        at = math.log(work) if work > 0 else logs[0]
        if at <= logs[0]:
            return surfaces[0](x, y), is_measured
        if at >= logs[-1]:
            return surfaces[-1](x, y), is_measured
        index = bisect_left(logs, at)
        low_ms = surfaces[index - 1](x, y)
        share = (at - logs[index - 1]) / (logs[index] - logs[index - 1])
        return low_ms + (surfaces[index](x, y) - low_ms) * share, is_measured


# ---- prompt rows and decode rows in one forward ----

_USUAL_DEPTH = 8192.0

_LEAST_REST_SHARE = 0.25
"""Least share of a mixed forward's time that is not attention."""


class MixedTimes:
    """Milliseconds of a mixed forward on the whole GPU.

    A forward has three parts: the attention of its prompt rows (a slope in their depth, from prefill alone), that of
    its decode rows (a slope in KV tokens, from the mixed points, else from decode alone), and the rest, a surface over
    prompt rows and decode rows. Without mixed points the rest is a prefill of all rows together. ``points`` are (prompt
    rows, decode rows, context, milliseconds); ``decode`` and ``prefill`` are alone on the whole GPU.

    Points may all fill their tiles, but for some that just open one. Then the first row of a tile costs a share of the
    tile's time. Points that open one tell the share; without them it is all. The other rows of the tile cost the rest.
    """

    def __init__(self, points: Sequence[tuple[int, int, int, float]], decode: Surface, prefill: Surface) -> None:
        tiles = [(point, point[0] + point[1], tile_of(point[0] + point[1])) for point in points]
        full = [point for point, rows, (_, end) in tiles if rows == end]
        opened = [point for point, rows, (begin, _) in tiles if rows == begin + OPENED_ROWS]
        has_tiles = bool(full) and len(full) + len(opened) == len(points)
        if has_tiles:
            points = full
        measured_xs = sorted({float(tokens) for tokens, _, _, _ in points})
        measured_ys = sorted({float(batch_size) for _, batch_size, _, _ in points})
        xs = sorted({*prefill.xs, *measured_xs})
        ys = sorted({0.0, *decode.xs, *measured_ys})
        self._xs, self._ys = xs, ys
        self._depth_ms = list(accumulate((_slope(prefill, x) for x in xs), max))
        self._kv_ms = [_kv_slope(y, points, decode) for y in ys]
        rest: dict[tuple[float, float], list[float]] = {}
        for tokens, batch_size, context, ms in points:
            rest_ms = ms - self._attention_ms(tokens, attention_pairs(tokens), batch_size, batch_size * context)
            rest.setdefault((tokens, batch_size), []).append(max(rest_ms, _LEAST_REST_SHARE * ms))
        measured = {place: sum(parts) / len(parts) for place, parts in rest.items()}
        scales = {(x, y): ms / prefill(x + y, 0.0) for (x, y), ms in measured.items()}
        filled = [[_scale(x, y, scales) * prefill(x + y, 0.0) for y in ys] for x in xs]
        cells = clamp_cells(filled, [[measured.get((x, y)) for y in ys] for x in xs])
        self._rest = Surface(xs, ys, cells, (measured_xs[0], measured_xs[-1]) if points else NOTHING_MEASURED)
        self._batch_range = (measured_ys[0], measured_ys[-1]) if points else NOTHING_MEASURED
        self._first_rows = self._shares(opened) if has_tiles else None

    def __call__(self, tokens: int, pairs: float, batch_size: int, kv_tokens: float) -> tuple[float, bool]:
        """Milliseconds, and whether rows and batch lie within the measured range."""
        ms = self._rest(tokens, batch_size)
        if self._first_rows is not None:
            begin, end = tile_of(tokens + batch_size)
            ms += (self._rest(end - batch_size, batch_size) - ms) * _interpolate(*self._first_rows, begin)
        ms += self._attention_ms(tokens, pairs, batch_size, kv_tokens)
        least, greatest = self._batch_range
        return ms, least <= batch_size <= greatest and self._rest.is_measured(tokens)

    def _attention_ms(self, tokens: int, pairs: float, batch_size: int, kv_tokens: float) -> float:
        prompt_ms = _interpolate(self._xs, self._depth_ms, tokens) * pairs / tokens
        return prompt_ms + _interpolate(self._ys, self._kv_ms, batch_size) * kv_tokens

    def _shares(self, opened: Sequence[tuple[int, int, int, float]]) -> tuple[list[float], list[float]]:
        """Rows before a tile, rising, and the share of the tile's time that its first row costs."""
        shares = {}
        for tokens, batch_size, context, ms in sorted(opened):
            begin, end = tile_of(tokens + batch_size)
            linear_ms, whole_ms = self._rest(tokens, batch_size), self._rest(end - batch_size, batch_size)
            rest_ms = ms - self._attention_ms(tokens, attention_pairs(tokens), batch_size, batch_size * context)
            share = (rest_ms - linear_ms) / (whole_ms - linear_ms) if whole_ms > linear_ms else 1.0
            shares[float(begin)] = min(max(share, 0.0), 1.0)
        values = list(shares.values()) or [1.0]
        return [-1.0, *shares, _MAX_CHUNK_TOKENS], [values[0], *values, values[-1]]


def _slope(surface: Surface, x: float) -> float:
    """Milliseconds that one more token of depth costs x rows, over usual depths."""
    return (surface(x, _USUAL_DEPTH) - surface(x, 0.0)) / _USUAL_DEPTH


def _kv_slope(batch_size: float, points: Sequence[tuple[int, int, int, float]], decode: Surface) -> float:
    """Milliseconds that one more KV token costs, at the measured batch size nearest to this one."""
    slopes: dict[int, list[float]] = {}
    by_place: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for tokens, rows, context, ms in points:
        by_place.setdefault((tokens, rows), []).append((context, ms))
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
    """Measured scales, weighted by the inverse square of the distance in logarithms."""
    if not scales or (x, y) in scales:
        return scales.get((x, y), 1.0)
    weights = [1 / (math.log(x / a) ** 2 + math.log((y + 1) / (b + 1)) ** 2) for a, b in scales]
    return sum(w * scale for w, scale in zip(weights, scales.values(), strict=True)) / sum(weights)


def _interpolate(xs: Sequence[float], values: Sequence[float], x: float) -> float:
    i = bisect_right(xs, x, 1, len(xs) - 1)
    low = values[i - 1]
    return low + (values[i] - low) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
