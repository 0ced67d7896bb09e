"""The search for a goodput, one run at a time: what it finds, when it ends, and that it can be gone on with."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.errors import ConfigError
from bullet_graph.perf.goodput_search import FASTEST_RATE, SLOWEST_RATE, GoodputSearch

STEPS = st.sampled_from([1.1, 1.25, 2.0, 3.0])
RATES = st.floats(0.05, 2000)


def run_all(search: GoodputSearch, attainment_at: Callable[[float], float]) -> list[float]:
    """Serve whatever is asked for; the rates."""
    rates = []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.record(rate, attainment_at(rate))
        assert len(rates) <= 1000
    return rates


@given(
    threshold=RATES,
    first_rate=RATES,
    step=STEPS,
    tolerance=st.sampled_from([0.01, 0.02, 0.1]),
    steepness=st.floats(0.5, 50),
    attainment=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_the_goodput_of_a_falling_curve_is_within_tolerance(
    threshold: float, first_rate: float, step: float, tolerance: float, steepness: float, attainment: float
) -> None:
    def attainment_at(rate: float) -> float:
        # Falls through the attainment asked for at the threshold, where rounding would leave it flat.
        if rate <= threshold:
            return attainment
        return min(attainment * (threshold / rate) ** steepness, math.nextafter(attainment, 0))

    search = GoodputSearch(
        first_rate=first_rate, step=step, tolerance=tolerance, attainment=attainment, max_runs=100
    )
    rates = run_all(search, attainment_at)
    assert search.goodput is not None
    assert search.goodput <= threshold <= search.goodput * (1 + tolerance) * (1 + 1e-9)
    assert len(set(rates)) == len(rates)


@given(
    outcomes=st.lists(st.booleans(), min_size=1, max_size=40),
    first_rate=RATES,
    step=STEPS,
    max_runs=st.integers(1, 30),
)
def test_noise_never_loops(outcomes: list[bool], first_rate: float, step: float, max_runs: int) -> None:
    remaining = iter(outcomes * max_runs)
    served: dict[float, bool] = {}

    def attainment_at(rate: float) -> float:
        served[rate] = next(remaining)
        return float(served[rate])

    search = GoodputSearch(first_rate=first_rate, step=step, max_runs=max_runs)
    rates = run_all(search, attainment_at)
    assert 1 <= len(rates) <= max_runs
    assert len(set(rates)) == len(rates)
    assert all(SLOWEST_RATE <= rate <= FASTEST_RATE for rate in rates)
    assert search.goodput == max((rate for rate, enough in served.items() if enough), default=None)


@given(
    outcomes=st.lists(st.floats(0, 1), min_size=20, max_size=20),
    first_rate=RATES,
    step=STEPS,
    data=st.data(),
)
def test_any_prefix_goes_on_as_if_there_had_been_no_interruption(
    outcomes: list[float], first_rate: float, step: float, data: st.DataObject
) -> None:
    def new() -> GoodputSearch:
        return GoodputSearch(first_rate=first_rate, step=step, attainment=0.5)

    values = iter(outcomes)
    whole: dict[float, float] = {}

    def attainment_at(rate: float) -> float:
        return whole.setdefault(rate, next(values))

    search = new()
    rates = run_all(search, attainment_at)
    num_before = data.draw(st.integers(0, len(rates)))
    # The order in which the runs are told does not matter.
    before = data.draw(st.permutations(rates[:num_before]))
    resumed = new()
    for rate in before:
        resumed.record(rate, whole[rate])
    assert run_all(resumed, whole.__getitem__) == rates[num_before:]
    assert resumed.goodput == search.goodput


@given(told=st.lists(st.tuples(RATES, st.booleans()), max_size=30), first_rate=RATES)
def test_rates_that_were_not_asked_for_count(told: list[tuple[float, bool]], first_rate: float) -> None:
    search = GoodputSearch(first_rate=first_rate, max_runs=1000)
    for rate, enough in told:
        search.record(rate, float(enough))
    asked = run_all(search, lambda rate: float(rate <= 10))
    assert not set(asked) & {rate for rate, _ in told}
    good = [rate for rate, enough in dict(told).items() if enough] + [rate for rate in asked if rate <= 10]
    assert search.goodput == max(good, default=None)


def test_short_steps_near_the_answer_and_longer_ones_far_from_it() -> None:
    search = GoodputSearch(first_rate=10, step=1.25)
    rates = run_all(search, lambda rate: float(rate <= 11))
    assert rates[:3] == pytest.approx([10, 12.5, 11.25])
    assert len(rates) == 6
    far = GoodputSearch(first_rate=10, step=1.25, max_runs=5)
    assert run_all(far, lambda _: 1.0) == pytest.approx([10, 12.5, 12.5 * 1.25**2, 39.0625, 78.125])
    down = GoodputSearch(first_rate=10, step=4.0, max_runs=3)
    assert run_all(down, lambda _: 0.0) == pytest.approx([10, 2.5, 0.625])


def test_exactly_the_share_is_enough() -> None:
    search = GoodputSearch(first_rate=1, attainment=0.9)
    search.record(1, 0.9)
    assert search.goodput == 1
    search.record(2, 0.899)
    assert search.goodput == 1
    assert search.next_rate() == 1.5
    search.record(1, 0.0)  # replaces the first figure
    assert search.goodput is None
    assert search.next_rate() == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_rate": 0.0}, "first_rate must be a finite number above 0, got 0.0"),
        ({"first_rate": float("inf")}, "first_rate"),
        ({"attainment": 0.0}, "attainment must be a share above 0 and at most 1"),
        ({"attainment": 1.01}, "got 1.01"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"step": 1.0}, "step must be a finite number above 1"),
        ({"max_runs": 0}, "max_runs must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GoodputSearch(**{"first_rate": 1.0, **changes})  # type: ignore[arg-type]
