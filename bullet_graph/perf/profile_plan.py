"""Which points ``bullet-graph profile`` measures, in what order, and for how long: pure and deterministic."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.errors import ConfigError
from bullet_graph.perf.profile_point import KINDS, ProfileLimits, ProfilePoint

WARM_S = 0.06
"""Length of the unmeasured start of a burst, after which power and caches are those of its own kind."""
MIN_INTERVALS = 3
"""Fewest steps that a burst measures, however slow they are."""
WAVE_TOKENS_PER_SM = 16
"""Rows for each SM with which a matrix product of 128×256 tiles fills its waves."""

_BURSTS_S = (0.4, 0.3, 0.25, 0.2, 0.15)
_MIN_PASSES, _MAX_PASSES = 3, 6
_HELD_BACK_SHARE = 0.12
_BURST_OVERHEAD_S = 0.015
_CONTEXT_STEP = 250
_MAX_DRAWS = 1000
# Guesses for one SM, to share out the time; what a burst really takes shortens those that follow.
_FLOPS_PER_SM = 4.5e12
_BYTES_PER_SM = 24e9


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step of the model costs, for a guess of its time.

    Attributes:
        flops_per_token: of the matrix products.
        weight_bytes: read by every step.
        kv_bytes_per_token: read for every token attended to.
    """

    flops_per_token: float
    weight_bytes: float
    kv_bytes_per_token: float

    def guess_s(self, point: ProfilePoint, num_sms: int) -> float:
        """Rough time of one step; for a split, of one prefill forward."""
        sms = num_sms if point.sms is None else point.sms
        if point.kind == "split":
            sms = num_sms - sms
        rows = point.tokens if point.kind == "split" else point.tokens + point.batch_size
        attended = 0 if point.kind == "split" else point.batch_size * point.context_tokens
        # Half of the SMs nearly saturate the memory.
        bandwidth = _BYTES_PER_SM * min(num_sms, 2 * sms)
        moved = self.weight_bytes + attended * self.kv_bytes_per_token
        computed = rows * self.flops_per_token
        return (
            max(self.weight_bytes / bandwidth, computed / (_FLOPS_PER_SM * sms))
            + (moved - self.weight_bytes) / bandwidth
        )


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What to measure.

    Attributes:
        grid: points to predict from.
        held_back: points off the grid, to test predictions on.
        num_passes: how often each is measured, spread over the run.
        burst_s: length of the measured part of a burst.
        guessed_s: what all of it may take.
        seed: of the order and of the points held back.
    """

    grid: tuple[ProfilePoint, ...]
    held_back: tuple[ProfilePoint, ...]
    num_passes: int
    burst_s: float
    guessed_s: float
    seed: int

    @property
    def points(self) -> tuple[ProfilePoint, ...]:
        """All points."""
        return self.grid + self.held_back

    def order(self, number: int) -> list[ProfilePoint]:
        """The points in the order of pass ``number``, shuffled so that every point meets the same clocks."""
        order = list(self.points)
        random.Random(f"{self.seed}/{number}").shuffle(order)
        return order


def plan_profile(
    *,
    num_sms: int,
    decode_sms: Sequence[int],
    limits: ProfileLimits,
    costs: StepCosts,
    time_budget_s: float,
    seed: int,
) -> ProfilePlan:
    """Choose the points, and how long each is measured, for a time budget.

    Args:
        num_sms: SMs of the GPU.
        decode_sms: sizes of the decode lane.
        limits: points beyond them are left out.
        costs: of the model.
        time_budget_s: for the measurements, without what loading and capturing take.
        seed: of the order and of the points held back.

    Raises:
        ConfigError: not even the fewest useful points fit the budget, or the limits allow none of a kind.
    """
    by_level = [
        [point for point in _at_level(level, num_sms, decode_sms, limits) if limits.allows(point)]
        for level in (0, 1)
    ]
    candidates = []
    for grid in (by_level[0] + by_level[1], by_level[0]):
        grid = list(dict.fromkeys(grid))
        for kind in KINDS:
            if not any(point.kind == kind for point in grid) and (kind != "split" or decode_sms):
                raise ConfigError(
                    f"profiling needs room for a few {kind} points, but none fits {limits}: raise --max-num-seqs or "
                    "--max-num-batched-tokens, or free memory on the device"
                )
        held_back = _draw(grid, limits, seed)
        for burst_s in _BURSTS_S:
            plan = ProfilePlan(tuple(grid), held_back, _MIN_PASSES, burst_s, 0.0, seed)
            pass_s = _pass_s(plan, costs, num_sms)
            if pass_s * _MIN_PASSES <= time_budget_s:
                passes = min(_MAX_PASSES, int(time_budget_s / pass_s))
                return replace(plan, num_passes=passes, guessed_s=passes * pass_s)
            candidates.append(pass_s * _MIN_PASSES)
    raise ConfigError(
        f"a profile of {len(decode_sms)} partitions needs about {min(candidates):.0f} s, but --time-budget-s is "
        f"{time_budget_s:g}: raise it, or name fewer sizes in --decode-sms"
    )


def burst_seconds(point: ProfilePoint, burst_s: float, costs: StepCosts, num_sms: int) -> float:
    """Guess of the time that a burst takes, start and end included."""
    least = (MIN_INTERVALS + 1) * costs.guess_s(point, num_sms)
    return max(WARM_S + burst_s, least) + _BURST_OVERHEAD_S


def _pass_s(plan: ProfilePlan, costs: StepCosts, num_sms: int) -> float:
    return sum(burst_seconds(point, plan.burst_s, costs, num_sms) for point in plan.points)


def _at_level(
    level: int, num_sms: int, decode_sms: Sequence[int], limits: ProfileLimits
) -> Iterable[ProfilePoint]:
    """Points that no table should lack (level 0), and those that make it finer (level 1)."""
    yield from _decode_alone(level, decode_sms, limits)
    yield from _prefill_alone(level, num_sms, decode_sms)
    for tokens, batch_size, context in _mixed(level):
        yield ProfilePoint("mixed", None, batch_size, context, tokens)
    for sms in decode_sms:
        shapes = [(64, 1000, 2048), (256, 1000, 2048), (16, 1000, 2048), (64, 1000, 512)]
        if level == 1:
            shapes = [(128, 1000, 2048), (64, 1000, 8192), (128, 3000, 2048), (16, 3000, 512)]
        for batch_size, context, tokens in shapes:
            yield ProfilePoint("split", sms, batch_size, context, tokens)


def _decode_alone(level: int, decode_sms: Sequence[int], limits: ProfileLimits) -> Iterable[ProfilePoint]:
    batch_sizes = ((1, 16, 64, 128, 256, limits.max_batch_size), (8, 32, 96, 192, 384))[level]
    for batch_size in batch_sizes:
        # In coarse steps: a few blocks more or less, as between two starts, must not change the plan.
        fits = limits.kv_tokens // batch_size // _CONTEXT_STEP * _CONTEXT_STEP
        for context, next_smaller in ((250, 0), (1000, 250), (3000, 1000)):
            # Where the cache cannot hold the context, the longest that it can, if that tells anything new.
            if min(context, fits) > 1.25 * next_smaller:
                yield ProfilePoint("decode", None, batch_size, min(context, fits))
    for sms in decode_sms:
        for batch_size in ((16, 64, 256), (1, 128))[level]:
            for context in (500, 2000):
                yield ProfilePoint("decode", sms, batch_size, context)


def _prefill_alone(level: int, num_sms: int, decode_sms: Sequence[int]) -> Iterable[ProfilePoint]:
    whole = ((128, 256, 512, 1024, 2048, 4096, 8192), (64, 768, 1536, 3072))[level]
    for tokens in whole:
        yield ProfilePoint("prefill", tokens=tokens)
    # Short chunks, too: their attention leaves SMs idle, or takes another kernel, so its cost is not in their ratio.
    cached_whole = ([(128, 4096), (256, 4096), (512, 2048), (2048, 6144)], [(512, 6144), (2048, 2048)])[level]
    for tokens, cached in cached_whole:
        yield ProfilePoint("prefill", tokens=tokens, cached_tokens=cached)
    for sms in (num_sms - size for size in decode_sms):
        for tokens in ((512, WAVE_TOKENS_PER_SM * sms, 2048, 4096), (256, 1024))[level]:
            yield ProfilePoint("prefill", sms, tokens=tokens)
        if level == 0:
            yield ProfilePoint("prefill", sms, tokens=2048, cached_tokens=4096)


def _mixed(level: int) -> Iterable[tuple[int, int, int]]:
    """(tokens, batch size, context)."""
    if level == 0:
        yield from (
            (tokens, batch, 1000) for tokens in (64, 128, 256, 512, 1024, 2048) for batch in (16, 64, 256)
        )
        yield from ((tokens, batch, 3000) for tokens in (256, 2048) for batch in (64, 256))
        return
    yield from ((tokens, 128, 1000) for tokens in (64, 128, 256, 384, 512, 1024, 2048))
    yield from ((384, batch, 1000) for batch in (16, 64, 256))
    yield from ((tokens, batch, 1000) for tokens in (4096, 8192) for batch in (16, 256))
    yield from ((tokens, batch, 1000) for tokens in (512, 2048) for batch in (1, 512))


def _draw(grid: Sequence[ProfilePoint], limits: ProfileLimits, seed: int) -> tuple[ProfilePoint, ...]:
    """Random points off the grid but inside it: no table should be judged by what lies outside."""
    rng = random.Random(seed)
    known = set(grid)
    drawn: list[ProfilePoint] = []
    for kind in KINDS:
        of_kind = [point for point in grid if point.kind == kind]
        # Of all points, those held back included.
        wanted = math.ceil(len(of_kind) * _HELD_BACK_SHARE / (1 - _HELD_BACK_SHARE))
        found = 0
        for _ in range(_MAX_DRAWS):
            if found == wanted:
                break
            point = _near(rng.choice(of_kind), of_kind, rng)
            if point not in known and limits.allows(point):
                known.add(point)
                drawn.append(point)
                found += 1
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
    return ProfilePoint(
        anchor.kind, anchor.sms, ranged("batch_size"), ranged("context_tokens"), tokens, cached
    )
