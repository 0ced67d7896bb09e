"""A serving benchmark's figures against numbers worked by hand."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from bullet_graph.perf.metrics import RequestMetrics
from bullet_graph.perf.serving import ServedRequest, ServingResult, find_goodput, summarize_serving
from bullet_graph.slo import NO_TARGETS, Slo

TIGHT = Slo(ttft_ms=500, tpot_ms=15)


def served(
    arrival_s: float, *token_times_s: float, prompt: int = 10, slo: Slo = NO_TARGETS, error: str | None = None
) -> ServedRequest:
    return ServedRequest(
        prompt, len(token_times_s), RequestMetrics(arrival_s, arrival_s, token_times_s), slo, error
    )


def summarize(*requests: ServedRequest, **changes: Any) -> ServingResult:
    settings: dict[str, Any] = {
        "duration_s": 4.0,
        "started": datetime(2026, 3, 4, 5, 6, 7),
        "backend": "b",
        "model_id": "m",
        "request_rate": 2.0,
        "burstiness": 1.0,
    }
    return summarize_serving(requests, **(settings | changes))


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
    assert {name: fields[name] for name in list(fields)[:17]} == {
        "date": "20260304-050607",
        "backend": "b",
        "model_id": "m",
        "num_prompts": 4,
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
        "ttft": (400, 400, (80000 / 3) ** 0.5, 560, 596),
        "tpot": (20, 20, 0, 20, 20),
        # (10, 30, 20): std √(200/3).
        "itl": (20, 20, (200 / 3) ** 0.5, 28, 29.8),
        # (440, 220, 600): mean 420, deviations 20, −200, 180.
        "e2el": (420, 440, ((400 + 40000 + 32400) / 3) ** 0.5, 568, 596.8),
    }
    expected = {
        f"{label}_{name}_ms": value
        for name, values in latencies.items()
        for label, value in zip(("mean", "median", "std", "p90", "p99"), values, strict=True)
    }
    assert {name: fields[name] for name in list(fields)[17:]} == pytest.approx(expected, abs=1e-6)
    json.dumps(fields, allow_nan=False)


def test_details_are_in_seconds_and_in_order() -> None:
    result = summarize(
        served(1.0, 1.4, 1.41, 1.44, prompt=100),
        served(2.0, prompt=7, error="no"),
        served(3.0, 3.5, prompt=9),
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
        served(0.0, slo=TIGHT, error="refused"),
    )
    assert result.request_goodput == 2 / 4.0
    assert result.slo_attainment == 2 / 5
    assert (result.completed, result.failed) == (4, 1)


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


def test_a_request_without_a_token_meets_nothing() -> None:
    assert not served(1.0).meets_slo


def test_targets_may_differ_between_requests() -> None:
    result = summarize(served(0.0, 0.4, slo=Slo(ttft_ms=100)), served(0.0, 0.4), duration_s=2.0)
    assert (result.request_goodput, result.slo_attainment) == (0.5, 0.5)


def test_figures_of_nothing_are_none() -> None:
    result = summarize(served(0.0, error="no"), served(1.0, error="no"), duration_s=0.0)
    assert result.completed == result.request_throughput == result.output_throughput == 0
    assert result.mean_ttft_ms is result.median_tpot_ms is result.p99_itl_ms is result.std_e2el_ms is None
    json.dumps(result.fields(detailed=True), allow_nan=False)


def test_what_json_has_no_number_for_is_text() -> None:
    at_once = summarize(served(0.0, 0.1), request_rate=float("inf"), burstiness=float("inf"))
    assert (at_once.request_rate, at_once.burstiness) == ("inf", "inf")
    recorded = summarize(served(0.0, 0.1), request_rate=None, burstiness=None)
    assert (recorded.request_rate, recorded.burstiness) == ("trace", None)


def served_up_to(limit: float, rates: list[float]) -> Callable[[float], ServingResult]:
    """A server that meets the targets of all requests up to a rate, and of none beyond."""

    def run(rate: float) -> ServingResult:
        rates.append(rate)
        ttft_s = 0.4 if rate <= limit else 0.6
        return summarize(served(0.0, ttft_s, slo=TIGHT), request_rate=rate)

    return run


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.7, 23.0])
@pytest.mark.parametrize("first_rate", [1.0, 10.0])
def test_the_search_finds_the_highest_good_rate(limit: float, first_rate: float) -> None:
    rates: list[float] = []
    search = find_goodput(served_up_to(limit, rates), first_rate=first_rate)
    assert search.goodput is not None
    assert search.goodput <= limit <= search.goodput * 1.021
    assert [result.request_rate for result in search.results] == sorted(rates)
    assert len(set(rates)) == len(rates) <= 20


def test_the_search_ends_where_there_is_nothing_to_find() -> None:
    rates: list[float] = []
    assert find_goodput(served_up_to(0.0, rates), first_rate=8.0, max_runs=5).goodput is None
    assert rates == [8, 4, 2, 1, 0.5]
    rates.clear()
    assert find_goodput(served_up_to(1e9, rates), first_rate=8.0, max_runs=3).goodput == 32
    assert rates == [8, 16, 32]
    rates.clear()
    assert find_goodput(served_up_to(0.0, rates), first_rate=0.05).goodput is None
    assert rates == [0.05, 0.025, 0.0125]
    rates.clear()
    assert find_goodput(served_up_to(1e9, rates), first_rate=3e3).goodput == 6e3
    assert rates == [3e3, 6e3]


def test_attainment_decides() -> None:
    def run(rate: float) -> ServingResult:
        # Of 10 requests, as many as the rate miss their target.
        late = [served(0.0, 0.6, slo=TIGHT)] * min(round(rate), 10)
        return summarize(*late, *[served(0.0, 0.1, slo=TIGHT)] * (10 - len(late)), request_rate=rate)

    assert find_goodput(run, first_rate=1.0).goodput == pytest.approx(1.5, rel=0.03)
    assert find_goodput(run, first_rate=1.0, attainment=0.5).goodput == pytest.approx(5.5, rel=0.03)
