"""The bound of bench/frontier.py against schedules of a server that is not preempted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.frontier import best_shares

WAITS_S = np.array([0.5, 1.0, 5.0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 0.8), st.booleans()), min_size=1, max_size=7),
    st.permutations(range(7)),
)
def test_no_schedule_has_more_on_time_than_the_bound(
    prompts: list[tuple[float, float, bool]], turns: tuple[int, ...]
) -> None:
    start_s, work_s, counted = np.array(sorted(prompts)).T
    now_s, waited_s = 0.0, np.zeros(len(prompts))
    for i in filter(lambda turn: turn < len(prompts), turns):
        now_s = max(now_s, start_s[i]) + work_s[i]
        waited_s[i] = now_s - start_s[i]
    if (waited_s > WAITS_S[2]).any() or counted @ (waited_s > WAITS_S[1]) > np.ceil(0.01 * (counted.sum() - 1)):
        return
    shares = best_shares(start_s, work_s, counted, WAITS_S)
    assert shares is not None
    assert shares[0] @ counted >= counted @ (waited_s <= WAITS_S[0]) - 1e-6
    assert shares.sum(axis=0) == pytest.approx(1)


def test_an_overloaded_server_has_a_share_on_time_or_no_order_at_all() -> None:
    start_s, counted = np.zeros(10), np.ones(10)
    shares = best_shares(start_s, np.full(10, 0.2), counted, np.array([0.5, 2.0, 5.0]))
    assert shares is not None
    assert shares[0].sum() == pytest.approx(0.6 / 0.2)  # the slot in which 0.5 s end counts
    assert best_shares(start_s, np.full(10, 0.8), counted, WAITS_S) is None
