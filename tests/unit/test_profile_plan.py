"""The points of a profile: deterministic, within the budget, covering what predictions need."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch
from fakes.perf_tables import LLAMA_8B
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.errors import ConfigError
from bullet_graph.hardware import H200 as H200_SPEC
from bullet_graph.perf.performance import OPENED_ROWS, attention_pairs, tile_of
from bullet_graph.perf.profile_plan import MIN_INTERVALS, WARM_S, ProfileLimits, ProfilePlan, plan_profile, seconds_of
from bullet_graph.perf.roofline import Roofline
from bullet_graph.perf.table import KINDS, ProfilePoint
from bullet_graph.runtime.profile import Repeats, _measure

DECODE_SMS = (16, 24, 32, 48, 64, 80, 96)
H200 = ProfileLimits(max_batch_size=512, max_tokens=8192, max_model_len=16384, kv_tokens=800_000)
MODEL = Roofline(H200_SPEC, LLAMA_8B)


def plan(
    *, decode_sms: tuple[int, ...] = DECODE_SMS, limits: ProfileLimits = H200, budget_s: float = 480.0, seed: int = 0
) -> ProfilePlan:
    return plan_profile(model=MODEL, decode_sms=decode_sms, limits=limits, time_budget_s=budget_s, seed=seed)


limits_strategy = st.builds(
    ProfileLimits,
    max_batch_size=st.integers(64, 600),
    max_tokens=st.integers(512, 10_000),
    max_model_len=st.integers(4096, 20_000),
    kv_tokens=st.integers(100_000, 2_000_000),
)
sizes_strategy = st.sets(st.integers(8, 60).map(lambda tpcs: 2 * tpcs), max_size=5).map(
    lambda sizes: tuple(sorted(sizes))
)


def test_without_a_budget_the_plan_is_the_shortest_that_is_allowed() -> None:
    shortest = plan(decode_sms=(), budget_s=0)
    assert plan(decode_sms=(), budget_s=shortest.guessed_s) == shortest
    assert shortest.guessed_s < 60
    with pytest.raises(ConfigError, match=f"needs about {shortest.guessed_s:.0f} s"):
        plan(decode_sms=(), budget_s=shortest.guessed_s - 0.1)


@settings(max_examples=40)
@given(limits_strategy, sizes_strategy, st.integers(0, 2**32), st.floats(400, 3000))
def test_every_plan(limits: ProfileLimits, decode_sms: tuple[int, ...], seed: int, budget_s: float) -> None:
    made = plan(limits=limits, decode_sms=decode_sms, seed=seed, budget_s=budget_s)
    assert made == plan(limits=limits, decode_sms=decode_sms, seed=seed, budget_s=budget_s)
    assert len(set(made.points)) == len(made.points)
    assert not set(made.held_back) & set(made.grid)
    assert all(limits.allows(point) for point in made.points)
    mixed_rows = {p.tokens + p.batch_size for p in made.grid if p.kind == "mixed"}
    assert all(rows == tile_of(rows)[1] or rows == tile_of(rows)[0] + OPENED_ROWS for rows in mixed_rows)
    assert made.num_passes >= 3
    total_s = made.num_passes * sum(seconds_of(point, made.burst_s, MODEL) for point in made.points)
    assert budget_s >= total_s == pytest.approx(made.guessed_s)
    for kind in KINDS:
        grid_sms = {point.sms for point in made.grid if point.kind == kind}
        if kind == "prefill":
            assert grid_sms == {None, *(132 - size for size in decode_sms)}
        elif kind == "split":
            assert grid_sms == set(decode_sms)
        else:
            assert grid_sms >= {None}
        assert {point.sms for point in made.held_back if point.kind == kind} <= grid_sms
    assert {point.sms for point in made.grid if point.kind == "decode"} == {None, *decode_sms}


def test_the_default_budget_buys_every_kind_and_an_eighth_held_back_inside_the_grid() -> None:
    made = plan(seed=3)
    assert 200 < len(made.grid) < 300
    assert 0.1 < len(made.held_back) / len(made.points) < 0.15
    for kind in KINDS:
        held_back = [point for point in made.held_back if point.kind == kind]
        of_kind = [point for point in made.points if point.kind == kind]
        assert len(held_back) >= 2
        assert 0.08 < len(held_back) / len(of_kind) < 0.2
    for point in made.held_back:
        alike = [other for other in made.grid if (other.kind, other.sms) == (point.kind, point.sms)]
        for name in ("batch_size", "context_tokens", "tokens", "cached_tokens"):
            values = [getattr(other, name) for other in alike]
            assert min(values) <= getattr(point, name) <= max(values)


def test_a_shorter_budget_buys_fewer_points_and_a_longer_one_more_passes() -> None:
    needed = {("split", 16, 64, 1000, 2048), ("decode", None, 64, 1000), ("mixed", None, OPENED_ROWS, 1000, 512)}
    assert {ProfilePoint(*fields) for fields in needed} <= set(plan(budget_s=200).grid) < set(plan().grid)
    assert ProfilePoint("mixed", None, OPENED_ROWS, 1000, 1024) in plan().grid
    assert plan(budget_s=1000).grid == plan().grid
    assert plan(budget_s=1000).num_passes > plan().num_passes == 3


def test_the_longest_context_that_fits_stands_in_for_one_that_does_not() -> None:
    contexts = {point.context_tokens for point in plan().grid if (point.kind, point.batch_size) == ("decode", 512)}
    assert contexts == {250, 1000, 1500}
    # A few blocks more or less do not change the plan: an interrupted profile could not go on.
    assert plan(limits=dataclasses.replace(H200, kv_tokens=H200.kv_tokens - 500)) == plan()


def test_passes_come_in_different_orders() -> None:
    made = plan()
    orders = [made.order(number) for number in range(3)]
    assert all(sorted(map(repr, order)) == sorted(map(repr, made.points)) for order in orders)
    assert plan(seed=1).order(0) != plan().order(0) == orders[0] != orders[1] != orders[2]


def test_slow_points_take_longer_than_the_burst() -> None:
    slow, fast = ProfilePoint("prefill", 36, tokens=8192), ProfilePoint("decode", None, 1, 250)
    assert seconds_of(fast, 0.2, MODEL) == pytest.approx(WARM_S + 0.2, abs=0.05)
    assert seconds_of(slow, 0.2, MODEL) > (MIN_INTERVALS + 1) * MODEL.prefill(8192, attention_pairs(8192), 36).ms / 1e3


@pytest.mark.parametrize(
    ("point", "allowed"),
    [
        (ProfilePoint("decode", None, 10, 100), True),
        (ProfilePoint("decode", None, 11, 100), False),
        (ProfilePoint("decode", None, 1, 501), False),
        (ProfilePoint("prefill", None, tokens=201), False),
        (ProfilePoint("prefill", None, tokens=200, cached_tokens=301), False),
        # Ten rows of 100 tokens take 70 blocks; the cache has 100.
        (ProfilePoint("mixed", None, 10, 100, 200), True),
        (ProfilePoint("split", 16, 10, 144, 200), False),
        (ProfilePoint("mixed", None, 10, 145, 1), False),  # 101 blocks, which are not full
        (ProfilePoint("decode", None, 1, 500), True),
    ],
)
def test_limits(point: ProfilePoint, allowed: bool) -> None:
    assert ProfileLimits(max_batch_size=10, max_tokens=200, max_model_len=500, kv_tokens=1600).allows(point) is allowed


@pytest.mark.parametrize(
    ("limits", "budget_s", "message"),
    [
        (H200, 20, r"needs about \d+ s, but --time-budget-s is 20"),
        (ProfileLimits(8, 8192, 16384, 800_000), 480, "a few split points"),
        (ProfileLimits(512, 32, 16384, 800_000), 480, "a few prefill points"),
    ],
)
def test_a_plan_that_cannot_be(limits: ProfileLimits, budget_s: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(limits=limits, budget_s=budget_s)


@pytest.mark.parametrize("done", [0, 1])  # by a profile that was interrupted
def test_a_pass_measures_each_point_that_lacks_it(done: int) -> None:
    chosen, bench = plan(), Mock(device=torch.device("cpu"), num_ranks=1)
    bench.measure.return_value = (1.0,)
    measured: Repeats = {point: [] for point in chosen.points}
    measured[chosen.grid[0]] += [(2.0,)] * done
    passes = list(_measure(bench, chosen, measured, 480.0, progress=False))
    assert {len(repeats) for repeats in measured.values()} == {chosen.num_passes}
    every = len(chosen.points)
    assert [each.num_points for each in passes] == [every - done, *[every] * (chosen.num_passes - 1)]
