"""Times of a request, their summary, and the figures of a replay, against numbers worked by hand."""

import json
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.engine.replay import Replay
from bullet_graph.perf.metrics import QueueGrowth, ReplayResult, RequestMetrics, ServedRequest
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Arrivals

TIGHT = Slo(ttft_ms=500, tpot_ms=15)


def served(
    arrival_s: float, *token_times_s: float, prompt: int = 10, slo: Slo = NO_TARGETS, error: str | None = None
) -> ServedRequest:
    return ServedRequest(prompt, len(token_times_s), RequestMetrics(arrival_s, arrival_s, token_times_s), slo, error)


def summarize(
    *requests: ServedRequest, duration_s: float = 4.0, request_rate: float | None = 2.0, **more: Any
) -> ReplayResult:
    last_s = max((r.metrics.token_times_s[-1] for r in requests if r.metrics.token_times_s), default=0.0)
    replay = Replay(requests, last_s - duration_s)
    started = datetime(2026, 3, 4, 5, 6, 7)
    arrivals = Arrivals(request_rate=request_rate, **more)
    return replay.result(arrivals, started=started, backend="b", model_id="m")


def test_every_figure_by_hand() -> None:
    result = summarize(
        # TTFT 400 ms, gaps 10 and 30 ms: TPOT 20 ms, end to end 440 ms.
        served(1.0, 1.4, 1.41, 1.44, prompt=100),
        # TTFT 200 ms, gap 20 ms: TPOT 20 ms, end to end 220 ms.
        served(2.0, 2.2, 2.22, prompt=50),
        # TTFT 600 ms, one token: no TPOT, no gaps, end to end 600 ms.
        served(3.0, 3.6, prompt=30),
        served(3.5, prompt=900, error="too long"),
        max_concurrency=8,
    )
    fields = result.fields()
    load = ["waiting_tokens_half", "waiting_tokens_end", "prefill_tokens_per_s"]
    rest = {name: fields.pop(name) for name in ("counted", "sustained", "stable", *load)}
    # 180 tokens in 1.2 s of waiting; nothing waits 1 and 2 s after the start.
    assert rest == dict(zip(rest, (4, False, True, 0, 0, pytest.approx(150)), strict=True))
    assert {name: fields[name] for name in list(fields)[:18]} == {
        "date": "20260304-050607",
        "backend": "b",
        "model_id": "m",
        "num_prompts": 4,
        "num_unsent": 0,
        "request_rate": 2.0,
        "burstiness": 1.0,
        "max_concurrency": 8,
        "duration": 4.0,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 180,
        "total_output_tokens": 6,
        "request_throughput": 0.75,
        "request_goodput": None,
        "slo_attainment": None,
        "output_throughput": 1.5,
        "total_token_throughput": 46.5,
    }
    latencies = {
        # std of (400, 200, 600) is √(80000/3); p90 lies 0.8 of the way from 400 to 600, p99 0.98 of it.
        "ttft": (400, 400, (80000 / 3) ** 0.5, 560, 596, 600),
        "tpot": (20, 20, 0, 20, 20, 20),
        # (10, 30, 20): std √(200/3).
        "itl": (20, 20, (200 / 3) ** 0.5, 28, 29.8, 30),
        # (440, 220, 600): mean 420, deviations 20, −200, 180.
        "e2el": (420, 440, ((400 + 40000 + 32400) / 3) ** 0.5, 568, 596.8, 600),
        # 440 / 3, 220 / 2, 600 / 1.
        "normalized_latency": (285.555556, 146.666667, np.std([440 / 3, 110, 600]), 509.333333, 590.933333, 600),
    }
    expected = {
        f"{label}_{name}_ms": value
        for name, values in latencies.items()
        for label, value in zip(("mean", "median", "std", "p90", "p99", "max"), values, strict=True)
    }
    assert {name: fields[name] for name in list(fields)[18:]} == pytest.approx(expected, abs=1e-6)
    json.dumps(fields, allow_nan=False)


def test_details_are_in_seconds_and_in_order() -> None:
    result = summarize(
        served(1.0, 1.4, 1.41, 1.44, prompt=100), served(2.0, prompt=7, error="no"), served(3.0, 3.5, prompt=9)
    )
    assert "ttfts" not in result.fields()
    fields = result.fields(detailed=True)
    assert fields["input_lens"] == (100, 7, 9)
    assert fields["output_lens"] == (3, 0, 1)
    assert fields["ttfts"] == pytest.approx((0.4, 0.0, 0.5))
    assert fields["itls"][0] == pytest.approx((0.01, 0.03))
    assert fields["itls"][1:] == ((), ())
    assert fields["start_times"] == (1.0, 2.0, 3.0)
    assert fields["errors"] == ("", "no", "")


def test_goodput_counts_requests_that_meet_all_targets() -> None:
    result = summarize(
        served(0.0, 0.4, 0.41, slo=TIGHT),  # meets both
        served(0.0, 0.6, 0.61, slo=TIGHT),  # TTFT 600 ms
        served(0.0, 0.4, 0.42, slo=TIGHT),  # TPOT 20 ms
        served(0.0, 0.4, slo=TIGHT),  # one token: there is no TPOT to miss
        served(0.0, 0.4),  # targets may differ between requests
        served(0.0, slo=TIGHT, error="refused"),
    )
    assert result.request_goodput == 3 / 4.0
    assert result.slo_attainment == 3 / 6
    assert (result.completed, result.failed) == (5, 1)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=500), True),
        (Slo(ttft_ms=499.9), False),
        (Slo(tpot_ms=125), True),
        (Slo(tpot_ms=124.9), False),
        # 10 prompt tokens.
        (Slo(ttft_ms_per_token=50), True),
        (Slo(ttft_ms_per_token=49.9), False),
        (Slo(ttft_ms=300, ttft_ms_per_token=20), True),
        (NO_TARGETS, True),
    ],
)
def test_a_target_is_met_up_to_its_limit(slo: Slo, good: bool) -> None:
    # Times that floats hold exactly.
    assert served(1.0, 1.5, 1.625, slo=slo).meets_slo is good


def test_figures_of_nothing_are_none() -> None:
    result = summarize(served(0.0, error="no"), served(1.0, error="no"))
    assert result.completed == result.request_throughput == result.output_throughput == 0
    assert result.ttft is result.tpot is result.itl is result.e2el is None
    assert not served(1.0).meets_slo
    assert result.fields()["p99_itl_ms"] is None
    json.dumps(result.fields(detailed=True), allow_nan=False)


def test_what_json_has_no_number_for_is_text() -> None:
    at_once = summarize(served(0.0, 0.1), request_rate=float("inf"), burstiness=float("inf"))
    assert (at_once.request_rate, at_once.burstiness) == ("inf", "inf")
    recorded = summarize(served(0.0, 0.1), request_rate=None)
    assert (recorded.request_rate, recorded.burstiness) == ("trace", None)
    assert (recorded.sustained, recorded.queue_growth, recorded.fields()["stable"]) == (None, None, None)


def test_the_first_arrivals_are_served_but_not_counted() -> None:
    late = [served(10.0 + index, 10.6 + index, slo=TIGHT) for index in range(2)]
    requests = served(0.0, 9.0, slo=TIGHT), served(9.9, 10.0, slo=TIGHT), *late
    result = summarize(*requests, served(12.0, 12.1, slo=TIGHT), duration_s=12.1, uncounted_s=10.0)
    assert (result.completed, result.counted, result.slo_attainment) == (5, 3, 1 / 3)
    assert result.ttft is not None
    assert (result.ttft.p50, result.ttft.max) == (pytest.approx(600), pytest.approx(600))
    assert result.request_throughput == pytest.approx(5 / 12.1)


# ---- whether prefill keeps up ----


def queue(load: float, *, num_requests: int = 1200, rate: float = 10.0, seed: int = 0) -> list[ServedRequest]:
    """A run of Poisson arrivals at one server of prompts, first come first served; prompts have 2 to 2,000 tokens."""
    random = np.random.default_rng(seed)
    arrivals_s = np.sort(random.uniform(0, num_requests / rate, num_requests))
    prompts = random.integers(2, 2001, num_requests)
    free_s, requests = 0.0, []
    for arrival_s, prompt in zip(arrivals_s.tolist(), prompts.tolist(), strict=True):
        free_s = max(free_s, arrival_s) + load / rate * prompt / 1001
        requests.append(served(arrival_s, free_s, prompt=prompt))
    return requests


@given(seed=st.integers(0, 2**32), share=st.floats(0.05, 0.6))
@settings(max_examples=15)
def test_a_queue_with_capacity_to_spare_is_stable(seed: int, share: float) -> None:
    queue_growth = QueueGrowth.of(queue(share, seed=seed), 0.0, 120.0)
    assert queue_growth.stable
    assert queue_growth.prefill_tokens_per_s == pytest.approx(1001 * 10 / share, rel=1e-6)


@given(seed=st.integers(0, 2**32), load=st.floats(1.2, 3))
@settings(max_examples=15)
def test_a_queue_that_grows_is_unstable(seed: int, load: float) -> None:
    assert not QueueGrowth.of(queue(load, seed=seed), 0.0, 120.0).stable


@pytest.mark.parametrize(("tokens", "stable"), [(300, True), (301, False)])
def test_two_seconds_of_prefill_may_wait_more_at_the_end(tokens: int, stable: bool) -> None:
    at_half, at_end = served(0.0, 6.0, prompt=100), served(9.0, 12.0, prompt=tokens)
    last, refused = served(10.0, 10.5, prompt=800 - tokens), served(9.5, prompt=10**6, error="refused")
    queue_growth = QueueGrowth.of((at_half, at_end, last, refused), 0.0, 10.0)
    # 900 tokens in the 9 s in which a prompt waited.
    assert queue_growth == QueueGrowth(100, tokens, 100.0)
    assert queue_growth.stable is stable


def test_figures_that_a_request_has_not_yet() -> None:
    one = RequestMetrics(1.0, 1.0, (1.5,))
    assert one.ttft_ms == one.e2e_ms == pytest.approx(500)
    assert (one.queue_ms, one.tpot_ms, one.itl_ms) == (0, None, ())
    waiting = RequestMetrics(1.0, None, ())
    assert waiting.queue_ms is waiting.ttft_ms is waiting.tpot_ms is waiting.e2e_ms is None
    assert waiting.itl_ms == ()
    in_prefill = RequestMetrics(2.0, 2.25, ())
    assert (in_prefill.queue_ms, in_prefill.ttft_ms) == (250, None)


def test_times_that_come_later_do_not_count() -> None:
    times = [1.25, 1.5]
    metrics = RequestMetrics(1.0, 1.0, times, len(times))
    times.append(9.0)
    assert metrics.token_times_s == (1.25, 1.5)
    assert metrics.token_times_from(1) == (1.5,)
    assert (metrics.ttft_ms, metrics.tpot_ms, metrics.e2e_ms) == (250, 250, 500)
    assert metrics.itl_ms == (250,)
