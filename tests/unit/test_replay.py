"""Replays against an engine whose every time is known."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.engine.output import CompletionOutput, OutputKind, RequestOutput
from bullet_graph.engine.replay import Replay, TimedRequest, replay, timed_requests
from bullet_graph.errors import ConfigError, EngineDeadError, LateError, PromptError
from bullet_graph.perf.metrics import QueueGrowth, ReplayResult, RequestMetrics, ServedRequest
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest


class FakeEngine:
    """Serves any number at once; each takes ``service_s`` from being added, and all its tokens come at the end.

    A step that is busy blocks for ``busy_s``, as a loop does that launches work.
    """

    max_model_len = 100

    def __init__(self, service_s: float = 1.0, *, start_s: float = 50.0, busy_s: float = 0.0) -> None:
        self.time_s = start_s
        self.added: list[tuple[str, float, float, Slo]] = []
        self.prompts: list[list[int]] = []
        self.num_steps = 0
        self.most_under_way = 0
        self._service_s = service_s
        self._busy_s = busy_s
        self._ends: dict[str, tuple[float, float, int]] = {}

    def now(self) -> float:
        return self.time_s

    def sleep_until(self, time_s: float) -> None:
        assert not self._ends, "sleeps with work to do"
        assert time_s > self.time_s
        self.time_s = time_s

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        output_kind: OutputKind,
        arrival_s: float,
        slo: Slo,
    ) -> None:
        assert output_kind is OutputKind.FINAL_ONLY
        assert arrival_s <= self.time_s, "told of a request before it came"
        if prompt[0] < 0:
            raise PromptError("negative token") if prompt[0] == -1 else LateError("late", 1.0)
        self.added.append((request_id, arrival_s, self.time_s, slo))
        self.prompts.append(list(prompt))
        self._ends[request_id] = (self.time_s + self._service_s, arrival_s, sampling_params.max_tokens)
        self.most_under_way = max(self.most_under_way, len(self._ends))

    def has_unfinished_requests(self) -> bool:
        return bool(self._ends)

    def step(self, until_s: float | None) -> list[RequestOutput]:
        assert self._ends
        self.num_steps += 1
        self.time_s += self._busy_s
        next_s = min(end_s for end_s, _, _ in self._ends.values())
        if until_s is not None and until_s < next_s:
            self.time_s = max(self.time_s, until_s)
            return []
        self.time_s = max(self.time_s, next_s)
        done = [request_id for request_id, (end_s, _, _) in self._ends.items() if end_s <= self.time_s]
        return [self._output(request_id) for request_id in done]

    def _output(self, request_id: str) -> RequestOutput:
        end_s, arrival_s, count = self._ends.pop(request_id)
        completion = CompletionOutput(0, "", (0,) * count, None, "length")
        metrics = RequestMetrics(arrival_s, arrival_s, (end_s,) * count)
        return RequestOutput(request_id, (0,), (completion,), True, metrics)


def request(arrival_s: float, *, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 2) -> TimedRequest:
    return TimedRequest(arrival_s, prompt, SamplingParams(max_tokens=max_tokens))


def arrivals_s(engine: FakeEngine) -> list[float]:
    return [arrival_s - 50 for _, arrival_s, _, _ in engine.added]


def test_requests_are_sent_when_their_time_has_come() -> None:
    engine = FakeEngine()
    times_s = [0.125, 0.25, 0.25, 3.5]
    result = replay(engine, [request(time_s) for time_s in times_s])
    assert arrivals_s(engine) == times_s
    assert [added_s - 50 for _, _, added_s, _ in engine.added] == times_s
    assert [r.metrics.ttft_ms for r in result.served] == pytest.approx([1000] * 4)
    assert (result.start_s, result.duration_s) == (50, 4.5)


def test_latency_counts_from_arrival_though_the_loop_was_busy() -> None:
    engine = FakeEngine(busy_s=0.5)
    result = replay(engine, [request(0.0), request(0.2)])
    assert arrivals_s(engine) == pytest.approx([0, 0.2])
    assert engine.added[1][2] == pytest.approx(50.5)
    assert result.served[1].metrics.ttft_ms == pytest.approx(1300)


def test_concurrency_is_limited_and_waiting_for_a_place_is_not_latency() -> None:
    engine = FakeEngine()
    result = replay(engine, [request(0.0), request(0.5), request(0.75), request(5.0)], max_concurrency=1)
    assert engine.most_under_way == 1
    assert arrivals_s(engine) == [0, 1, 2, 5]
    assert [r.metrics.ttft_ms for r in result.served] == pytest.approx([1000] * 4)
    assert result.duration_s == 6


def test_outputs_are_in_the_order_of_the_requests() -> None:
    engine = FakeEngine()
    seen: list[ServedRequest] = []
    requests = [request(0.0, max_tokens=3), request(0.0, prompt=(-1,)), request(0.5, max_tokens=5)]
    result = replay(engine, requests, on_done=seen.append, id_prefix="warmup-")
    assert [added[0] for added in engine.added] == ["warmup-0", "warmup-2"]
    assert [result.served.index(one) for one in seen] == [1, 0, 2]
    assert [one.output_tokens for one in result.served] == [3, 0, 5]


def test_a_refused_request_fails_alone() -> None:
    engine = FakeEngine()
    refused = [request(0.0, prompt=(-2,)), request(0.0, prompt=(-1,)), request(0.0, max_tokens=98)]
    too_long = "prompt and output have 3 + 98 tokens, more than max_model_len=100"
    errors = [row.error for row in replay(engine, [*refused, request(0.0, max_tokens=97)], max_concurrency=1).served]
    assert errors == ["late", "negative token", too_long, None]


def test_nothing_served_takes_no_time() -> None:
    result = replay(FakeEngine(), [request(0.0, prompt=(-1,))])
    assert result.duration_s == 0
    assert result.served[0].error == "negative token"
    assert replay(FakeEngine(), []) == Replay((), 50.0)


def test_targets_reach_engine_and_result() -> None:
    engine = FakeEngine()
    slo = Slo(ttft_ms=100)
    first, second = replay(engine, [TimedRequest(0.0, (4,), SamplingParams(max_tokens=7), slo), request(0.0)]).served
    assert [added[3] for added in engine.added] == [slo, NO_TARGETS]
    assert (first.input_tokens, first.output_tokens, first.slo, first.meets_slo) == (1, 7, slo, False)
    assert (second.input_tokens, second.output_tokens, second.slo, second.meets_slo) == (3, 2, NO_TARGETS, True)


@pytest.mark.parametrize(
    ("arrivals", "limit", "message"), [((0, 1), 0, "max_concurrency must be at least 1"), ((1, 0), None, "in order")]
)
def test_a_replay_that_cannot_end_well_is_refused(arrivals: tuple[float, ...], limit: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(FakeEngine(), [request(arrival_s) for arrival_s in arrivals], max_concurrency=limit)


def test_a_dead_engine_ends_the_replay() -> None:
    class Dying(FakeEngine):
        def step(self, until_s: float | None) -> list[RequestOutput]:
            raise EngineDeadError(f"the device is gone, asked until {until_s}")

    with pytest.raises(EngineDeadError, match="the device is gone"):
        replay(Dying(), [request(0.0)])


# ---- requests ----


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(2, 500),
    st.integers(0, 5),
)
def test_requests_have_the_workloads_lengths(lengths: list[tuple[int, int]], vocab_size: int, seed: int) -> None:
    targets = Slo(ttft_ms=500, tpot_ms=15)
    workload = Workload("w", tuple(WorkloadRequest(p, o, None) for p, o in lengths))
    arrivals = np.arange(len(lengths)) * 0.5
    requests = timed_requests(workload, arrivals, vocab_size=vocab_size, slo=targets, seed=seed)
    assert [(len(r.prompt_token_ids), r.params.max_tokens) for r in requests] == lengths
    assert [r.arrival_s for r in requests] == arrivals.tolist()
    assert all(0 <= token < vocab_size for r in requests for token in r.prompt_token_ids)
    assert all(r.params.ignore_eos and r.params.temperature == 0 and r.slo == targets for r in requests)
    assert requests == timed_requests(workload, arrivals, vocab_size=vocab_size, slo=targets, seed=seed)


# ---- times of a request, their summary, and the figures of a replay, against numbers worked by hand ----


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
    return replay.result(Arrivals(request_rate=request_rate, **more), started=started, backend="b", model_id="m")


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
    assert {name: fields[name] for name in list(fields)[:18]} == json.loads("""{
        "date": "20260304-050607", "backend": "b", "model_id": "m", "num_prompts": 4, "num_unsent": 0,
        "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": 8, "duration": 4.0, "completed": 3, "failed": 1,
        "total_input_tokens": 180, "total_output_tokens": 6, "request_throughput": 0.75, "request_goodput": null,
        "slo_attainment": null, "output_throughput": 1.5, "total_token_throughput": 46.5
    }""")
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
    requests = served(1.0, 1.4, 1.41, 1.44, prompt=100), served(2.0, prompt=7, error="no"), served(3.0, 3.5, prompt=9)
    result = summarize(*requests)
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
    assert [result.request_throughput, result.request_goodput] == pytest.approx([5 / 12.1, 2 / 12.1])


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
    assert RequestMetrics(1.0, 1.0, times, 2, last_token_s=3.0).e2e_ms == 2000, "of all samples"
    assert RequestMetrics(1.0, 1.0, times, 0).ttft_ms is None
    assert metrics.itl_ms == (250,)
