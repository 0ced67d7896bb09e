"""The server's metrics: for Prometheus under vLLM's names, and for the live page."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, get_args

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.engine.output import FinishReason, RequestOutput
from bullet_graph.perf.energy import NvmlProbe
from bullet_graph.perf.metrics import summarize_ms
from bullet_graph.serve.limits import Gate
from bullet_graph.slo import NO_TARGETS

PREFIX = "bullet_graph:"
"""vLLM's is ``vllm:``, and the names after it are the same."""

LIVE_WINDOW_S = 60.0
"""The live page shows percentiles of the requests that ended in this time."""

# Upper bounds of histogram buckets: vLLM's, with finer ones below for single tokens.
_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS_S = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0,
)  # fmt: skip


class RequestMeter:
    """Measures one request for the server's metrics."""

    __slots__ = ("_ended", "_metrics", "_seen")

    def __init__(self, metrics: "ServerMetrics") -> None:
        self._metrics = metrics
        self._seen = 0
        self._ended = False

    def observe(self, output: RequestOutput) -> None:
        """Count what is new in an output."""
        metrics, last = self._metrics, max(self._seen - 1, 0)
        times = output.metrics.token_times_from(last)
        if times and not self._seen:
            metrics.first_token.observe(times[0] - output.metrics.arrival_s)
        for before, after in itertools.pairwise(times):
            metrics.inter_token.observe(after - before)
        self._seen = last + len(times)
        if output.error is not None:
            self.end("error")
        elif output.finished:
            self.end("stop" if output.outputs[0].finish_reason == "stop" else "length")
            metrics.finished(output)

    def end(self, reason: FinishReason | None) -> None:
        """Count the request's end, except that of an invalid one (None); only the first call counts."""
        if not self._ended and reason is not None:
            self._metrics.ends[reason] += 1
        self._ended = True


class ServerMetrics(Collector):
    """Counters since the server started; ``model_name`` labels every metric.

    ``energy_joules`` is the energy of the GPU's board at the last :meth:`read_energy`; None without a probe.
    """

    def __init__(self, model_name: str, engine: AsyncEngine, gate: Gate, probe: NvmlProbe | None) -> None:
        self._model_name = model_name
        self._engine = engine
        self._gate = gate
        self._probe = probe
        self._start_mj = None if probe is None else probe.total_energy_mj()
        self.energy_joules: float | None = None if self._start_mj is None else 0.0
        # Tokens of the warm-up, which nobody asked for, are not counted.
        self._before = engine.stats
        self.ends: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._num_with_targets = 0
        self._num_met = 0
        # Of requests that ended: when (time.monotonic), TTFT and TPOT in ms.
        self._recent: deque[tuple[float, float, float | None]] = deque(maxlen=4096)
        self._histograms = [
            Histogram(PREFIX + name, text, ["model_name"], buckets=bounds_s, registry=None)
            for name, text, bounds_s in (
                ("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS_S),
                ("inter_token_latency_seconds", "From one token to the next.", _INTER_TOKEN_BUCKETS_S),
                ("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS_S),
            )
        ]
        self.first_token, self.inter_token, self.whole_request = (
            histogram.labels(model_name) for histogram in self._histograms
        )

    def finished(self, output: RequestOutput) -> None:
        """Count a request that was served to its end."""
        times = output.metrics
        if times.ttft_ms is None or times.e2e_ms is None:
            return
        self.whole_request.observe(times.e2e_ms / 1e3)
        self._recent.append((time.monotonic(), times.ttft_ms, times.tpot_ms))
        if output.slo != NO_TARGETS:
            self._num_with_targets += 1
            self._num_met += not output.missed_targets

    async def read_energy(self) -> None:
        """Read the board's counter in a thread, as it may take milliseconds."""
        if self._probe is not None and self._start_mj is not None:
            now_mj = await asyncio.to_thread(self._probe.total_energy_mj)
            if now_mj is not None:
                self.energy_joules = (now_mj - self._start_mj) / 1e3

    @property
    def _slo_attainment(self) -> float | None:
        return self._num_met / self._num_with_targets if self._num_with_targets else None

    def live(self) -> dict[str, Any]:
        """The figures of the live page: counters, of which it takes differences, and recent percentiles."""
        engine, stats = self._engine, self._engine.stats
        now_s = time.monotonic()
        recent = [times for times in self._recent if now_s - times[0] <= LIVE_WINDOW_S]
        return {
            "model": self._model_name,
            "time_s": now_s,
            "num_sms": engine.engine.num_sms,
            "running": stats.num_running,
            "waiting": self._gate.num_waiting,
            "predicted_ttft_ms": stats.predicted_ttft_ms,
            "kv_cache_usage": stats.kv_blocks_used / stats.kv_blocks_total,
            "lane_seconds": dict(stats.lane_seconds),
            "lane_sm_seconds": dict(stats.lane_sm_seconds),
            "policy_seconds": dict(stats.policy_seconds),
            "num_steps": stats.num_steps,
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queries": stats.prefix_cache_queries - self._before.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits - self._before.prefix_cache_hits,
            "generation_tokens": stats.num_output_tokens - self._before.num_output_tokens,
            "window_s": LIVE_WINDOW_S,
            "requests": len(recent),
            "ttft_ms": summarize_ms(ttft_ms for _, ttft_ms, _ in recent),
            "tpot_ms": summarize_ms(tpot_ms for *_, tpot_ms in recent),
            "slo_attainment": self._slo_attainment,
            "energy_joules": self.energy_joules,
            "failure": None if engine.failure is None else str(engine.failure),
        }

    def collect(self) -> Iterable[Metric]:
        """All metrics, for prometheus_client."""
        stats, waiting = self._engine.stats, self._gate.num_waiting
        usage = stats.kv_blocks_used / stats.kv_blocks_total
        one, total = partial(self._family, GaugeMetricFamily), partial(self._family, CounterMetricFamily)
        yield one("num_requests_running", "Sequences that hold KV blocks.", stats.num_running)
        yield one("num_requests_waiting", "Sequences that wait for KV blocks.", waiting)
        yield one("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        predicted = "Predicted for a request of one token that comes now, in seconds."
        yield one("predicted_time_to_first_token_seconds", predicted, stats.predicted_ttft_ms / 1e3)
        yield total("num_preemptions", "Sequences that lost their KV blocks.", stats.num_preemptions)
        for name, documentation, field in (
            ("prompt_tokens", "Tokens of prompts.", "num_prompt_tokens"),
            ("generation_tokens", "Tokens generated.", "num_output_tokens"),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"),
        ):
            yield total(name, documentation, getattr(stats, field) - getattr(self._before, field))
        yield total("request_success", "Requests that ended.", self.ends, "finished_reason")
        for histogram in self._histograms:
            yield from histogram.collect()
        yield total("num_steps", "Forwards of the model.", stats.num_steps)
        yield one("lane_sms", "SMs that each lane uses now.", stats.lane_sms, "lane")
        yield total("lane_sm_seconds", "Device time of each lane times its SMs.", stats.lane_sm_seconds, "lane")
        yield total("lane_seconds", "Device time of each lane.", stats.lane_seconds, "lane")
        yield total("policy_seconds", "Device time under each policy.", stats.policy_seconds, "policy")
        yield one("policy_time_share", "Share of device time by policy.", stats.policy_shares, "policy")
        yield total("slo_requests", "Requests with targets that ended.", self._num_with_targets)
        yield total("slo_requests_met", "Those that met all their targets.", self._num_met)
        if self._slo_attainment is not None:
            yield one("slo_attainment", "Share of them.", self._slo_attainment)
        if self.energy_joules is not None:
            yield total("energy_joules", "Energy of the GPU's board.", self.energy_joules)

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        documentation: str,
        values: float | Mapping[Any, float],
        label: str | None = None,
    ) -> Metric:
        family = kind(PREFIX + name, documentation, labels=["model_name"] if label is None else ["model_name", label])
        if isinstance(values, Mapping):
            for key, value in values.items():
                family.add_metric([self._model_name, key], value)
        else:
            family.add_metric([self._model_name], values)
        return family
