"""Times of one request, and what a replay of many reports, under the field names of vLLM's serving benchmark."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bullet_graph.slo import NO_TARGETS, Slo

_LATENCIES = ("ttft", "tpot", "itl", "e2el", "normalized_latency")
_OF_EACH_REQUEST = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
_LABELS = {"mean": "mean", "median": "p50", "std": "std", "p90": "p90", "p99": "p99", "max": "max"}


@dataclass(slots=True)  # not frozen: one is made per token, like CompletionOutput
class RequestMetrics:
    """Times of one request, on one monotonic clock, in seconds; derived figures are in milliseconds.

    Attributes:
        first_scheduled_s: when its first prefill chunk was launched, or None while it waits.
        times_s: times of tokens; may keep growing, since a copy per token would cost as much as all other work on it.
        num_tokens: how many of ``times_s`` count; None: all of them.
        last_token_s: time of the last token of any sample; None: of the last that counts.
    """

    arrival_s: float
    first_scheduled_s: float | None
    times_s: Sequence[float]
    num_tokens: int | None = None
    last_token_s: float | None = None

    @property
    def token_times_s(self) -> tuple[float, ...]:
        """When each output token (of the first sample) reached the host."""
        return self.token_times_from(0)

    def token_times_from(self, index: int) -> tuple[float, ...]:
        """The same, from one of the tokens on."""
        return tuple(self.times_s[index : self.num_tokens])

    @property
    def queue_ms(self) -> float | None:
        """Time from arrival to the first launch, or None while the request waits."""
        return None if self.first_scheduled_s is None else (self.first_scheduled_s - self.arrival_s) * 1e3

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: from arrival until it reached the host."""
        times = self.token_times_s
        return (times[0] - self.arrival_s) * 1e3 if times else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first (of the first sample); None for fewer than two."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None

    @property
    def e2e_ms(self) -> float | None:
        """From arrival to the last token so far, of all samples."""
        times = self.token_times_s
        last_s = self.last_token_s or (times[-1] if times else None)
        return None if last_s is None else (last_s - self.arrival_s) * 1e3

    def missed_targets(self, slo: Slo, prompt_tokens: int) -> tuple[Literal["ttft", "tpot"], ...]:
        """The targets missed so far; an output of one token has no TPOT to miss."""
        ttft_ms, tpot_ms = self.ttft_ms, self.tpot_ms
        missed: list[Literal["ttft", "tpot"]] = []
        if ttft_ms is not None and ttft_ms > slo.ttft_limit_ms(prompt_tokens):
            missed.append("ttft")
        if tpot_ms is not None and slo.tpot_ms is not None and tpot_ms > slo.tpot_ms:
            missed.append("tpot")
        return tuple(missed)

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between one token and the next."""
        return tuple((b - a) * 1e3 for a, b in itertools.pairwise(self.token_times_s))


@dataclass(frozen=True, slots=True)
class PercentileSummary:
    """Mean, population standard deviation, percentiles (linearly interpolated) and maximum, in milliseconds."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float


def summarize_ms(values: Iterable[float | None]) -> PercentileSummary | None:
    """Summarize the times, in milliseconds, that are not None; None where there are none."""
    sample = np.array([value for value in values if value is not None], dtype=np.float64)
    if sample.size == 0:
        return None
    p50, p90, p99 = (float(p) for p in np.percentile(sample, (50, 90, 99)))
    return PercentileSummary(float(sample.mean()), float(sample.std()), p50, p90, p99, float(sample.max()))


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The outcome of one replayed request; ``error`` says why it failed, and it then has 0 output tokens."""

    input_tokens: int
    output_tokens: int
    metrics: RequestMetrics
    slo: Slo = NO_TARGETS
    error: str | None = None

    @property
    def meets_slo(self) -> bool:
        """Whether it has a first token and met every target it has."""
        has_token = self.error is None and self.metrics.ttft_ms is not None
        return has_token and not self.metrics.missed_targets(self.slo, self.input_tokens)


@dataclass(frozen=True, slots=True)
class QueueGrowth:
    """The prompt tokens that wait for a first token, as the client sees them: at half time and at the end of arrivals.

    ``prefill_tokens_per_s`` is all prompt tokens over the time in which at least one prompt waited.
    """

    waiting_tokens_half: int
    waiting_tokens_end: int
    prefill_tokens_per_s: float

    @classmethod
    def of(cls, served: Iterable[ServedRequest], start_s: float, end_s: float) -> "QueueGrowth":
        """From all requests of a run whose arrivals were planned between two times; failed ones wait for nothing."""
        done = [r for r in served if r.error is None]
        waits = sorted((r.metrics.arrival_s, r.metrics.times_s[0], r.input_tokens) for r in done)

        def waiting(time_s: float) -> int:
            return sum(tokens for arrival_s, first_s, tokens in waits if arrival_s < time_s < first_s)

        waited_s, until_s = 0.0, start_s
        for arrival_s, first_s, _ in waits:
            waited_s += max(0.0, first_s - max(arrival_s, until_s))
            until_s = max(until_s, first_s)
        total = sum(tokens for *_, tokens in waits)
        return cls(waiting((start_s + end_s) / 2), waiting(end_s), total / waited_s if waited_s else 0.0)

    @property
    def stable(self) -> bool:
        """Whether prefill kept up: in the second half, no more was left waiting than prefill serves in 2 s."""
        return self.waiting_tokens_end - self.waiting_tokens_half <= 2.0 * self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Figures of a replay. Latencies are over completed requests; a figure of nothing is None, where vLLM writes 0.

    Requests that arrive before ``Arrivals.uncounted_s`` are in totals and rates, but in no latency and no share.

    Attributes:
        date: when the run began, as ``YYYYMMDD-HHMMSS``.
        num_unsent: later turns of conversations that were left out, since the run ended before they would arrive.
        request_rate: mean arrivals per second; ``inf`` where all came at once, ``trace`` for recorded times.
        burstiness: shape of the gaps between arrivals, ``inf`` where they are equal; None for recorded times.
        max_concurrency: most requests under way at once; None is no limit.
        duration: seconds from the start of the run to the last token. All rates are per second of it.
        total_input_tokens, total_output_tokens: of completed requests.
        request_goodput: completed requests that met all their targets; None where no request has a target.
        slo_attainment: those requests as a share of all requests counted, failed ones included; None likewise.
        counted: how many requests are in latencies and shares.
        sustained: whether a run at a rate was long enough to tell its goodput; None: there was no rate.
        queue_growth: of a run at a rate, else None.
        ttft: from arrival, or from when ``max_concurrency`` let the request in.
        itl: all gaps between tokens, of all requests together.
        normalized_latency: end-to-end latency over output tokens (Yu et al., "Orca", OSDI 2022).
        errors: why a request failed, which then has no output and a TTFT of 0; empty for the others.
    """

    date: str
    backend: str
    model_id: str
    num_prompts: int
    num_unsent: int
    request_rate: float | str
    burstiness: float | str | None
    max_concurrency: int | None
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    slo_attainment: float | None
    counted: int
    sustained: bool | None
    queue_growth: QueueGrowth | None
    output_throughput: float
    total_token_throughput: float
    ttft: PercentileSummary | None
    tpot: PercentileSummary | None
    itl: PercentileSummary | None
    e2el: PercentileSummary | None
    normalized_latency: PercentileSummary | None
    # Of each request, in the order of the workload; times in seconds on the client's clock.
    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    ttfts: tuple[float, ...]
    itls: tuple[tuple[float, ...], ...]
    start_times: tuple[float, ...]
    errors: tuple[str, ...]

    def fields(self, *, detailed: bool = False) -> dict[str, Any]:
        """The figures for a JSON file, flat: ``mean_ttft_ms`` and so on; ``detailed`` adds those of each request."""
        flat = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        details = {name: flat.pop(name) for name in _OF_EACH_REQUEST}
        queue_growth = flat.pop("queue_growth")
        flat["stable"] = None if queue_growth is None else queue_growth.stable
        flat |= {field.name: getattr(queue_growth, field.name, None) for field in dataclasses.fields(QueueGrowth)}
        for name in _LATENCIES:
            summary = flat.pop(name)
            for label, field in _LABELS.items():
                flat[f"{label}_{name}_ms"] = None if summary is None else getattr(summary, field)
        return flat | details if detailed else flat
