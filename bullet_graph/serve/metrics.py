"""What the server counts: vLLM's metrics under their names, and the lanes', policies', targets' and energy's."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.engine.output import RequestOutput
from bullet_graph.serve.energy import EnergyMeter
from bullet_graph.serve.histogram import (
    FIRST_TOKEN_BUCKETS_S,
    INTER_TOKEN_BUCKETS_S,
    REQUEST_BUCKETS_S,
    Histogram,
)
from bullet_graph.slo import NO_TARGETS

PREFIX = "bullet_graph:"
"""Of every name; vLLM's is ``vllm:``, and the names after it are the same."""

_RECENT = 4096

EndReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that was served to its end.

    Attributes:
        time_s: when it ended, on ``time.monotonic``'s clock.
        ttft_ms: its time to first token.
        tpot_ms: its time per output token; None for a single token.
        met: whether it met all its targets; None where it had none.
    """

    time_s: float
    ttft_ms: float
    tpot_ms: float | None
    met: bool | None


class RequestMeter:
    """Follows one request.

    Args:
        metrics: told of what it sees.
        prompt_tokens: length of the prompt.
    """

    __slots__ = ("_ended", "_metrics", "_prompt_tokens", "_seen")

    def __init__(self, metrics: "ServerMetrics", prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._seen = 0
        self._ended = False

    def observe(self, output: RequestOutput) -> None:
        """Count an output: what is new since the last, or all at the end."""
        metrics, last = self._metrics, max(self._seen - 1, 0)
        times = output.metrics.token_times_from(last)
        if times and not self._seen:
            metrics.prompt_tokens += self._prompt_tokens
            metrics.first_token.observe(times[0] - output.metrics.arrival_s)
        for before, after in itertools.pairwise(times):
            metrics.inter_token.observe(after - before)
        self._seen = last + len(times)
        metrics.generation_tokens += sum([len(completion.token_ids) for completion in output.outputs])
        if output.finished:
            self._finish(output)

    def _finish(self, output: RequestOutput) -> None:
        self.end("stop" if output.outputs[0].finish_reason == "stop" else "length")
        times = output.metrics
        if times.ttft_ms is None or times.e2e_ms is None:
            return
        self._metrics.whole_request.observe(times.e2e_ms / 1e3)
        met = None if output.slo == NO_TARGETS else not output.missed_targets
        self._metrics.finished(Finished(time.monotonic(), times.ttft_ms, times.tpot_ms, met))

    def refuse(self) -> None:
        """Count nothing: the request was wrong."""
        self._ended = True

    def end(self, reason: EndReason) -> None:
        """Count the end; only the first counts."""
        if not self._ended:
            self._ended = True
            self._metrics.ends[reason] += 1


class ServerMetrics(Collector):
    """Counters since the server started.

    Args:
        model_name: label of every metric.
        engine: tells the rest.
        num_waiting: sequences that wait for KV blocks.
        energy: what the GPU has used since the start.
    """

    def __init__(
        self,
        model_name: str,
        engine: AsyncEngine,
        *,
        num_waiting: Callable[[], int],
        energy: EnergyMeter,
    ) -> None:
        self._model_name = model_name
        self._engine = engine
        self._num_waiting = num_waiting
        self.energy = energy
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ends: dict[EndReason, int] = dict.fromkeys(get_args(EndReason), 0)
        self.num_with_targets = 0
        self.num_met = 0
        self.recent: deque[Finished] = deque(maxlen=_RECENT)
        self.first_token = Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_BUCKETS_S,
        )
        self.inter_token = Histogram(
            f"{PREFIX}inter_token_latency_seconds", "From one token to the next.", INTER_TOKEN_BUCKETS_S
        )
        self.whole_request = Histogram(
            f"{PREFIX}e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            REQUEST_BUCKETS_S,
        )

    def request(self, prompt_tokens: int) -> RequestMeter:
        """Follow a new request, whose prompt has so many tokens."""
        return RequestMeter(self, prompt_tokens)

    def finished(self, request: Finished) -> None:
        """Note a request that was served to its end."""
        self.recent.append(request)
        if request.met is not None:
            self.num_with_targets += 1
            self.num_met += request.met

    @property
    def slo_attainment(self) -> float | None:
        """Share of the requests with targets that met them all; None before there was one."""
        return self.num_met / self.num_with_targets if self.num_with_targets else None

    def collect(self) -> Iterable[Metric]:
        """All metrics; see prometheus_client."""
        stats = self._engine.stats
        yield self._gauge("num_requests_running", "Sequences that hold KV blocks.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for KV blocks.", self._num_waiting())
        usage = stats.kv_blocks_used / stats.kv_blocks_total
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        yield self._counter("num_preemptions", "Sequences that lost their KV blocks.", stats.num_preemptions)
        yield self._counter("prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield self._counters("request_success", "Requests that ended.", "finished_reason", self.ends)
        for histogram in (self.first_token, self.inter_token, self.whole_request):
            yield histogram.family(self._model_name)
        yield self._counter("num_steps", "Forwards of the model.", stats.num_steps)
        yield self._gauges("lane_sms", "SMs that each lane uses now.", "lane", stats.lane_sms)
        yield self._counters(
            "lane_sm_seconds", "Device time of each lane times its SMs.", "lane", stats.lane_sm_seconds
        )
        yield self._counters("lane_seconds", "Device time of each lane.", "lane", stats.lane_seconds)
        yield self._counters(
            "policy_seconds", "Device time under each policy.", "policy", stats.policy_seconds
        )
        yield self._gauges(
            "policy_time_share", "Share of device time by policy.", "policy", stats.policy_shares
        )
        yield self._counter("slo_requests", "Requests with targets that ended.", self.num_with_targets)
        yield self._counter("slo_requests_met", "Those that met all their targets.", self.num_met)
        if self.slo_attainment is not None:
            yield self._gauge("slo_attainment", "Share of them.", self.slo_attainment)
        if self.energy.joules is not None:
            yield self._counter("energy_joules", "Energy of the GPU's board.", self.energy.joules)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _gauges(self, name: str, documentation: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, documentation, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counters(self, name: str, documentation: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, documentation, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family
