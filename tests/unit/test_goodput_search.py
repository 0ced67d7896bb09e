"""Goodputs: what runs tell of them, and the search that plans the runs, one by one."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.errors import ConfigError
from bullet_graph.perf.goodput_search import (
    FASTEST_RATE,
    SHARES,
    Goodput,
    GoodputSearch,
    RateRun,
    goodput_fields,
    requests_for,
)

STEPS = st.sampled_from([1.1, 1.25, 2.0, 3.0])
RATES = st.floats(0.05, 2000)


def test_a_sustained_run_has_two_minutes_and_three_hundred_requests() -> None:
    assert [requests_for(rate) for rate in (0.1, 2.5, 2.51, 20)] == [300, 300, 302, 2400]
    assert all(requests_for(rate) / rate >= 120 for rate in (2.6, 7.3, 22.7))
    # The fastest rate of a trace needs just its requests.
    assert all(requests_for(number / 120) == number for number in range(300, 20_000))


# ---- what runs tell ----


@given(lowest=st.floats(1, 10), gaps=st.lists(st.floats(0.1, 5), min_size=1, max_size=8), slope=st.floats(0.01, 0.05))
def test_of_shares_that_fall_linearly_it_is_the_crossing(lowest: float, gaps: list[float], slope: float) -> None:
    rates = [lowest + sum(gaps[:count]) for count in range(len(gaps) + 1)]
    runs = [RateRun(rate, 1 - slope * (rate - lowest), stable=True) for rate in rates]
    for share in SHARES:
        crossing = lowest + (1 - share) / slope
        found = Goodput.of(runs, share)
        if runs[-1].share >= share:
            assert found == (rates[-1], None)
        else:
            assert found == (pytest.approx(crossing), pytest.approx(crossing))


@given(st.lists(st.builds(RateRun, st.floats(1, 100), st.floats(0, 1), st.booleans()), max_size=12))
def test_a_goodput_lies_between_its_bounds_whatever_the_noise(runs: list[RateRun]) -> None:
    good, strict = (Goodput.of(runs, share) for share in SHARES)
    rates = [run.rate for run in runs]
    unstable = min((run.rate for run in runs if not run.stable), default=math.inf)
    for share, found in zip(SHARES, (good, strict), strict=True):
        assert (found == (None, None)) == (not runs)
        if found.rate is not None:
            assert min(rates) <= found.rate <= max(rates)
            assert found.rate < unstable
            assert max(run.share for run in runs if run.stable) >= share
        if found.rate is not None and found.below is not None:
            assert found.rate <= found.below * (1 + 1e-9)
    # More on time is never a higher rate.
    assert (strict.rate or 0) <= (good.rate or 0)
    assert Goodput.of(runs[::-1], SHARES[0]) == good


def test_a_higher_rate_that_did_better_counts_with_its_neighbour() -> None:
    runs = [RateRun(1, 1.0, True), RateRun(2, 0.98, True), RateRun(3, 1.0, True), RateRun(4, 0.79, True)]
    # 2 and 3 have 0.99 both.
    assert Goodput.of(runs, 0.99) == (3, 3)
    assert Goodput.of(runs, 0.90).rate == pytest.approx(3.45)
    assert Goodput.of([*runs, RateRun(2, 0.92, True)], 0.99).rate == pytest.approx(1 + 0.01 / 0.025)


def test_an_unstable_rate_serves_nothing() -> None:
    runs = [RateRun(10, 1.0, True), RateRun(14, 1.0, False), RateRun(20, 1.0, True)]
    assert [Goodput.of(runs, share) for share in SHARES] == [(10, 14), (10, 14)]
    assert Goodput.of(runs[1:], 0.90) == (None, 14)
    assert Goodput.of([RateRun(5, 0.95, True)], 0.99) == (None, 5)


def test_goodputs_in_json() -> None:
    at_rate = {"request_rate": 5, "slo_attainment": 0.95, "stable": True, "sustained": True}
    too_fast = {"request_rate": 6, "slo_attainment": 0.95, "stable": False, "sustained": False}
    at_once = dict.fromkeys(at_rate)
    fields = {"goodput_90": 5, "goodput_90_below": 6, "goodput_99": None, "goodput_99_below": 5, "sustained": False}
    assert goodput_fields([at_rate, too_fast, at_once]) == fields
    assert set(goodput_fields([at_once]).values()) == {None, False}


# ---- the search ----


def run_all(search: GoodputSearch, run_at: Callable[[float], RateRun]) -> list[RateRun]:
    """Serve whatever is asked for."""
    runs: list[RateRun] = []
    while (rate := search.next_rate(runs)) is not None:
        runs.append(run_at(rate))
        assert len(runs) <= search.max_runs
    return runs


@given(
    threshold=st.floats(2, 2000),
    first_rate=st.floats(0.5, 4),
    step=STEPS,
    tolerance=st.sampled_from([0.01, 0.05, 0.1]),
    steepness=st.floats(0.5, 50),
    knee=st.floats(0.8, 1.5),
)
def test_both_goodputs_of_a_falling_curve_are_found(
    threshold: float, first_rate: float, step: float, tolerance: float, steepness: float, knee: float
) -> None:
    """All on time up to the threshold, then fewer; from the knee on the queue grows."""

    def run_at(rate: float) -> RateRun:
        share = 1.0 if rate <= threshold else (threshold / rate) ** steepness
        return RateRun(rate, share, stable=rate <= knee * threshold)

    runs = run_all(GoodputSearch(first_rate=first_rate, step=step, tolerance=tolerance, max_runs=100), run_at)
    assert len({run.rate for run in runs}) == len(runs)
    for share in SHARES:
        true = min(knee, share ** (-1 / steepness)) * threshold
        found = Goodput.of(runs, share)
        assert found.rate is not None
        assert found.below is not None
        assert found.rate <= true * (1 + tolerance)
        assert found.below >= true / (1 + tolerance)


@given(
    shares=st.lists(st.floats(0, 1), min_size=30, max_size=30), first_rate=RATES, step=STEPS, most=st.integers(1, 30)
)
def test_noise_never_loops(shares: list[float], first_rate: float, step: float, most: int) -> None:
    remaining = iter(shares)
    search = GoodputSearch(first_rate=first_rate, step=step, max_runs=most)
    runs = run_all(search, lambda rate: RateRun(rate, share := next(remaining), share > 0.3))
    rates = [run.rate for run in runs]
    assert len(set(rates)) == len(rates)
    assert first_rate / 16 <= min(rates)
    assert max(rates) <= FASTEST_RATE


def test_short_steps_near_the_answer_and_longer_ones_far_from_it() -> None:
    def rates(search: GoodputSearch, limit: float) -> list[float]:
        return [run.rate for run in run_all(search, lambda rate: RateRun(rate, float(rate <= limit), True))]

    assert rates(GoodputSearch(first_rate=10), 11) == pytest.approx([10, 12.5, 11.25, 10.625, 10.9375])
    far = GoodputSearch(first_rate=10, max_runs=5)
    assert rates(far, 1e9) == pytest.approx([10, 12.5, 15.625, 24.4140625, 48.828125])
    assert rates(GoodputSearch(first_rate=10, step=4.0), 0) == pytest.approx([10, 2.5, 0.625])
    assert rates(GoodputSearch(first_rate=10, fastest=15), 1e9) == pytest.approx([10, 12.5, 15])


def test_the_share_that_is_known_least_comes_next() -> None:
    search = GoodputSearch(first_rate=10)
    runs = [RateRun(10, 0.95, True)]
    assert search.next_rate(runs) == 12.5
    runs.append(RateRun(12.5, 0.8, True))
    assert search.next_rate(runs) == 8
    runs.append(RateRun(8, 1.0, True))
    assert search.next_rate(runs) == 11.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_rate": 0.0}, "first_rate must be above 0 and below 10,000, got 0.0"),
        ({"first_rate": float("inf")}, "first_rate"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"step": 1.0}, "step must be above 1"),
        ({"max_runs": 0}, "max_runs must be above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GoodputSearch(**{"first_rate": 1.0, **changes})  # type: ignore[arg-type]
