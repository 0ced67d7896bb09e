"""A request's times against numbers worked by hand."""

import pytest

from bullet_graph.perf.metrics import RequestMetrics


def test_metrics_by_hand() -> None:
    # Arrives at 10 s, launched 50 ms later; tokens at 10.2, 10.25, 10.35 and 10.5 s.
    metrics = RequestMetrics(10.0, 10.05, (10.2, 10.25, 10.35, 10.5))
    assert metrics.queue_ms == pytest.approx(50)
    assert metrics.ttft_ms == pytest.approx(200)
    assert metrics.e2e_ms == pytest.approx(500)
    # (500 − 200) / (4 − 1)
    assert metrics.tpot_ms == pytest.approx(100)
    assert metrics.itl_ms == pytest.approx((50, 100, 150))


def test_one_token_has_no_time_per_further_token() -> None:
    metrics = RequestMetrics(1.0, 1.0, (1.5,))
    assert metrics.ttft_ms == metrics.e2e_ms == pytest.approx(500)
    assert metrics.queue_ms == 0
    assert metrics.tpot_ms is None
    assert metrics.itl_ms == ()


def test_a_waiting_request_has_no_times_yet() -> None:
    metrics = RequestMetrics(1.0, None, ())
    assert metrics.queue_ms is metrics.ttft_ms is metrics.tpot_ms is metrics.e2e_ms is None
    assert metrics.itl_ms == ()


def test_a_prompt_under_way_has_a_queue_time_only() -> None:
    metrics = RequestMetrics(2.0, 2.25, ())
    assert metrics.queue_ms == 250
    assert metrics.ttft_ms is None


def test_times_that_come_later_do_not_count() -> None:
    times = [1.25, 1.5]
    metrics = RequestMetrics(1.0, 1.0, times, len(times))
    times.append(9.0)
    assert metrics.token_times_s == (1.25, 1.5)
    assert metrics.token_times_from(1) == (1.5,)
    assert (metrics.ttft_ms, metrics.tpot_ms, metrics.e2e_ms) == (250, 250, 500)
    assert metrics.itl_ms == (250,)
