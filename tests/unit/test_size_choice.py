"""The dynamic program that chooses sizes, against trying all of them."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.graphs.size_choice import Choice, Demand, best_choices, lost_ms

LOSS = st.floats(0, 100)


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Demand]]:
    candidates = tuple(sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=7))))
    demands = []
    for size in draw(st.sets(st.integers(1, 35), max_size=8)):
        losses = {candidate: draw(LOSS) for candidate in candidates}
        demands.append(Demand(size, 1, losses.__getitem__, draw(LOSS | st.just(math.inf))))
    return candidates, demands


@given(problems(), st.integers(0, 8))
def test_no_other_choice_loses_less(problem: tuple[tuple[int, ...], list[Demand]], most: int) -> None:
    candidates, demands = problem
    choices = best_choices(candidates, demands, most=most)
    assert len(choices) == most + 1
    for count, choice in enumerate(choices):
        assert len(choice.sizes) <= count
        assert set(choice.sizes) <= set(candidates)
        assert choice.lost_ms == pytest.approx(lost_ms(demands, choice.sizes))
        tried = (lost_ms(demands, sizes) for k in range(count + 1) for sizes in combinations(candidates, k))
        assert choice.lost_ms == pytest.approx(min(tried))


def padded(size: int, count: int = 1, unserved_ms: float = math.inf) -> Demand:
    """Each row of padding costs each step 1 ms."""
    return Demand(size, count, lambda to: count * float(to - size), unserved_ms)


def test_a_choice_by_hand() -> None:
    demands = [padded(3, 10), padded(5), padded(8, 2)]
    none, one, two, three, four = best_choices((3, 5, 8), demands, most=4)
    assert none == Choice((), math.inf)
    assert one == Choice((8,), 53)
    assert two == Choice((3, 8), 3)
    assert three == Choice((3, 5, 8), 0)
    assert four == three, "no graph is captured for nothing"


def test_steps_may_be_left_unserved_where_that_is_cheaper() -> None:
    demands = [padded(4, 5), padded(30, 1, unserved_ms=2)]
    assert best_choices((4, 30), demands, most=1)[1] == Choice((4,), 2)
    assert best_choices((4, 30), demands, most=2)[2] == Choice((4, 30), 0)


def test_without_demand_nothing_is_captured() -> None:
    assert best_choices((1, 2), [], most=2)[2] == Choice((), 0)
