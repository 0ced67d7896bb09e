"""Replays against an engine whose every time is known."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.engine.output import CompletionOutput, OutputKind, RequestOutput
from bullet_graph.engine.replay import Replay, TimedRequest, replay, timed_requests
from bullet_graph.errors import ConfigError, EngineDeadError, PromptError
from bullet_graph.perf.metrics import RequestMetrics, ServedRequest
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Workload, WorkloadRequest


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
            raise PromptError("negative token")
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
    requests = [request(0.0), request(0.5), request(0.75), request(5.0)]
    result = replay(engine, requests, max_concurrency=1)
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
    requests = [request(0.0, prompt=(-1,)), request(0.0, max_tokens=98), request(0.0, max_tokens=97)]
    assert [row.error for row in replay(engine, requests, max_concurrency=1).served] == [
        "negative token",
        "prompt and output have 3 + 98 tokens, more than max_model_len=100",
        None,
    ]


def test_nothing_served_takes_no_time() -> None:
    result = replay(FakeEngine(), [request(0.0, prompt=(-1,))])
    assert result.duration_s == 0
    assert result.served[0].error == "negative token"
    assert replay(FakeEngine(), []) == Replay((), 50.0)


def test_targets_reach_engine_and_result() -> None:
    engine = FakeEngine()
    slo = Slo(ttft_ms=100)
    requests = [TimedRequest(0.0, (4,), SamplingParams(max_tokens=7), slo), request(0.0)]
    first, second = replay(engine, requests).served
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
