"""The points that ``bullet-graph profile`` measures, their order and duration, and prediction errors. Deterministic."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.errors import ConfigError
from bullet_graph.perf.performance import OPENED_ROWS, PerformanceModel
from bullet_graph.perf.table import KINDS, PerfTable, ProfilePoint, median_ms

WARM_S = 0.06
"""Unmeasured start of a burst, in seconds: power and caches then no longer depend on the burst before."""
MIN_INTERVALS = 3
"""Fewest steps that a burst measures."""

_WAVE_TOKENS_PER_SM = 16  # rows with which a matrix product of 128×256 tiles fills its waves
_BURSTS_S = (0.4, 0.3, 0.25, 0.2, 0.15)
_MIN_PASSES, _MAX_PASSES = 3, 6
_HELD_BACK_SHARE = 0.12
_BURST_OVERHEAD_S = 0.015
_CONTEXT_STEP = 250
_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """The most that the measured engine can hold: ``max_tokens`` rows of a chunk, ``kv_tokens`` in its KV cache."""

    max_batch_size: int
    max_tokens: int
    max_model_len: int
    kv_tokens: int

    def allows(self, point: ProfilePoint) -> bool:
        """Whether the point can be measured."""
        prompt = point.cached_tokens + point.tokens
        held = point.batch_size * _in_blocks(point.context_tokens) + _in_blocks(prompt)
        return (
            point.batch_size <= self.max_batch_size
            and point.tokens <= self.max_tokens
            and max(prompt, point.context_tokens) <= self.max_model_len
            and held <= self.kv_tokens
        )


def _in_blocks(tokens: int) -> int:
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """Points to predict from (``grid``) and points off the grid to test predictions (``held_back``).

    Each is measured ``num_passes`` times, spread over the run, for ``burst_s``; ``guessed_s`` is for all of it.
    """

    grid: tuple[ProfilePoint, ...]
    held_back: tuple[ProfilePoint, ...]
    num_passes: int
    burst_s: float
    guessed_s: float
    seed: int

    @property
    def points(self) -> tuple[ProfilePoint, ...]:
        return self.grid + self.held_back

    def order(self, number: int) -> list[ProfilePoint]:
        """The points in the order of pass ``number``, shuffled so that every point meets the same clocks."""
        order = list(self.points)
        random.Random(f"{self.seed}/{number}").shuffle(order)
        return order


def plan_profile(
    *, model: PerformanceModel, decode_sms: Sequence[int], limits: ProfileLimits, time_budget_s: float, seed: int
) -> ProfilePlan:
    """Choose the points and the length of their bursts for a time budget, which is for the measurements alone.

    ``model`` estimates times; bursts that take longer shorten later ones. A budget of 0 takes the shortest plan.
    Raises ConfigError where not even the fewest useful points fit the budget, or the limits allow none of a kind.
    """
    coarse, fine = (
        [point for point in _at_level(level, model.num_sms, decode_sms, limits) if limits.allows(point)]
        for level in (0, 1)
    )
    candidates = []
    for grid in (tuple(dict.fromkeys(coarse + fine)), tuple(dict.fromkeys(coarse))):
        for kind in KINDS:
            if not any(point.kind == kind for point in grid) and (kind != "split" or decode_sms):
                raise ConfigError(
                    f"profiling needs room for a few {kind} points, but none fits {limits}: raise --max-num-seqs or "
                    "--max-num-batched-tokens, or free memory on the device"
                )
        held_back = _draw(grid, limits, seed)
        for burst_s in _BURSTS_S:
            pass_s = sum(seconds_of(point, burst_s, model) for point in grid + held_back)
            passes = min(_MAX_PASSES, max(_MIN_PASSES, int(time_budget_s / pass_s)))
            plan = ProfilePlan(grid, held_back, passes, burst_s, passes * pass_s, seed)
            if plan.guessed_s <= time_budget_s:
                return plan
            candidates.append(plan)
    shortest = min(candidates, key=lambda plan: plan.guessed_s)
    if time_budget_s == 0:
        return shortest
    raise ConfigError(
        f"a profile of {len(decode_sms)} partitions needs about {shortest.guessed_s:.0f} s, but --time-budget-s is "
        f"{time_budget_s:g}: raise it, or name fewer sizes in --decode-sms"
    )


def seconds_of(point: ProfilePoint, burst_s: float, model: PerformanceModel) -> float:
    """Estimated time of a burst, start and end included."""
    times_ms, _ = point.predicted(model)
    return max(WARM_S + burst_s, (MIN_INTERVALS + 1) * max(times_ms) / 1e3) + _BURST_OVERHEAD_S


def _at_level(level: int, num_sms: int, decode_sms: Sequence[int], limits: ProfileLimits) -> Iterable[ProfilePoint]:
    """Points that every table needs (level 0), and those that refine it (level 1)."""
    for batch_size in ((1, 16, 64, 128, 256, limits.max_batch_size), (8, 32, 96, 192, 384))[level]:
        # In coarse steps: a few blocks more or less, as between two starts, must not change the plan.
        fits = limits.kv_tokens // batch_size // _CONTEXT_STEP * _CONTEXT_STEP
        for context, next_smaller in ((250, 0), (1000, 250), (3000, 1000)):
            # If the cache cannot hold the context: the longest that it can, if that is a new point.
            if min(context, fits) > 1.25 * next_smaller:
                yield ProfilePoint("decode", None, batch_size, min(context, fits))
    for sms in decode_sms:
        for batch_size in ((16, 64, 256), (1, 128))[level]:
            for context in (500, 2000):
                yield ProfilePoint("decode", sms, batch_size, context)
    for tokens in ((128, 256, 512, 1024, 2048, 4096, 8192), (64, 768, 1536, 3072))[level]:
        yield ProfilePoint("prefill", tokens=tokens)
    # Short chunks, too: their attention leaves SMs idle, or takes another kernel, so its cost is not in their ratio.
    cached_whole = ([(128, 4096), (256, 4096), (512, 2048), (2048, 6144)], [(512, 6144), (2048, 2048)])
    for tokens, cached in cached_whole[level]:
        yield ProfilePoint("prefill", tokens=tokens, cached_tokens=cached)
    for sms in (num_sms - size for size in decode_sms):
        for tokens in ((512, _WAVE_TOKENS_PER_SM * sms, 2048, 4096), (256, 1024))[level]:
            yield ProfilePoint("prefill", sms, tokens=tokens)
        if level == 0:
            yield ProfilePoint("prefill", sms, tokens=2048, cached_tokens=4096)
    for sizes, batch_sizes, context in _MIXED[level]:
        for rows, batch_size in itertools.product(sizes, batch_sizes):
            if rows > batch_size:
                yield ProfilePoint("mixed", None, batch_size, context, rows - batch_size)
    # Prompt rows fill their tiles; those that decode open the next.
    for tokens in ((128, 256, 512), (64, 1024))[level]:
        yield ProfilePoint("mixed", None, OPENED_ROWS, 1000, tokens)
    for sms in decode_sms:
        for batch_size, context, tokens in _SPLIT[level]:
            yield ProfilePoint("split", sms, batch_size, context, tokens)


# By level: rows of mixed forwards, which fill their tiles, decode rows among them, and their context.
_MIXED = (
    (((64, 128, 256, 384, 512, 1024, 2048), (16, 64, 256), 1000), ((512, 2048), (64, 256), 3000)),
    (
        ((256, 384, 512, 640, 1024, 2048), (128,), 1000),
        ((640, 768), (16, 64, 256), 1000),
        ((4096, 8192), (16, 256), 1000),
        ((640, 2048), (1, 512), 1000),
    ),
)
# By level: batch size, context and chunk rows of splits.
_SPLIT = (
    ((64, 1000, 2048), (256, 1000, 2048), (16, 1000, 2048), (64, 1000, 512)),
    ((128, 1000, 2048), (64, 1000, 8192), (128, 3000, 2048), (16, 3000, 512)),
)


def _draw(grid: Sequence[ProfilePoint], limits: ProfileLimits, seed: int) -> tuple[ProfilePoint, ...]:
    """Random points within the grid but not on it."""
    rng = random.Random(seed)
    known = set(grid)
    drawn: list[ProfilePoint] = []
    for kind in KINDS:
        of_kind = [point for point in grid if point.kind == kind]
        # Of all points, those held back included.
        wanted = math.ceil(len(of_kind) * _HELD_BACK_SHARE / (1 - _HELD_BACK_SHARE))
        near = (_near(rng.choice(of_kind), of_kind, rng) for _ in range(_MAX_DRAWS))
        fresh = (point for point in near if point not in known and limits.allows(point))
        for point in itertools.islice(fresh, wanted):
            known.add(point)
            drawn.append(point)
    return tuple(drawn)


def _near(anchor: ProfilePoint, of_kind: Sequence[ProfilePoint], rng: random.Random) -> ProfilePoint:
    """A random point within the bounds of the grid's points on the same SMs."""
    same_sms = [point for point in of_kind if point.sms == anchor.sms]
    alike = [point for point in same_sms if bool(point.cached_tokens) == bool(anchor.cached_tokens)]

    def between(low: int, high: int) -> int:
        return round(low * (high / low) ** rng.random()) if high > low else low

    def ranged(name: str) -> int:
        values = [getattr(point, name) for point in alike]
        return between(min(values), max(values))

    cached = 0
    tokens = ranged("tokens")
    if anchor.cached_tokens:
        # Between no cached tokens and the most.
        cached = between(KV_BLOCK_TOKENS * 16, max(point.cached_tokens for point in alike))
        tokens = between(min(point.tokens for point in same_sms), max(point.tokens for point in alike))
    return ProfilePoint(anchor.kind, anchor.sms, ranged("batch_size"), ranged("context_tokens"), tokens, cached)


# ---- prediction errors on the points held back, which the model has not seen ----


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
