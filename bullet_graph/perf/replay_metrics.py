"""What a replay reports, with the field names of vLLM's serving benchmark, and how each figure is defined."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bullet_graph.perf.metrics import PercentileSummary, RequestMetrics, summarize_ms
from bullet_graph.slo import NO_TARGETS, Slo

LATENCIES = ("ttft", "tpot", "itl", "e2el")
_LABELS = {"mean": "mean", "median": "p50", "std": "std", "p90": "p90", "p99": "p99"}


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
        """Whether it met every target it has; an output of one token has no TPOT to miss."""
        ttft_ms, tpot_ms = self.metrics.ttft_ms, self.metrics.tpot_ms
        if self.error is not None or ttft_ms is None:
            return False
        tpot_limit_ms = math.inf if self.slo.tpot_ms is None else self.slo.tpot_ms
        return ttft_ms <= self.slo.ttft_limit_ms(self.input_tokens) and (tpot_ms or 0.0) <= tpot_limit_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDetails:
    """Figures of each request, in the order of the workload; times in seconds. A failed request has 0 and an error.

    ``itls`` are the gaps between one token and the next, ``start_times`` arrivals on the client's clock.
    """

    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    ttfts: tuple[float, ...]
    itls: tuple[tuple[float, ...], ...]
    start_times: tuple[float, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Figures of a replay. Latencies are over completed requests; a figure of nothing is None, where vLLM writes 0.

    Attributes:
        date: when the run began, as ``YYYYMMDD-HHMMSS``.
        backend: what served.
        num_prompts: requests sent.
        request_rate: mean arrivals per second; ``inf`` where all came at once, ``trace`` for recorded times.
        burstiness: shape of the gaps between arrivals, ``inf`` where they are equal; None for recorded times.
        max_concurrency: most requests under way at once; None is no limit.
        duration: seconds from the start of the run to the last token; ``throughput`` is per second of it.
        completed: requests served to their end; the total tokens are theirs.
        request_goodput: completed requests that met all their targets, per second; None where no request has a target.
        slo_attainment: those requests as a share of all requests sent, failed ones included; None likewise.
        total_token_throughput: prompt and output tokens per second.
        ttft: time to first token, from arrival, or from when ``max_concurrency`` let the request in.
        tpot: time per output token after the first, by request: (e2e − TTFT) / (tokens − 1).
        itl: inter-token latency: all gaps between tokens, of all requests together.
        e2el: end-to-end latency: from arrival to the last token.
    """

    date: str
    backend: str
    model_id: str
    num_prompts: int
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
    output_throughput: float
    total_token_throughput: float
    ttft: PercentileSummary | None
    tpot: PercentileSummary | None
    itl: PercentileSummary | None
    e2el: PercentileSummary | None
    details: RequestDetails

    def fields(self, *, detailed: bool = False) -> dict[str, Any]:
        """The figures for a JSON file, flat: latencies are ``mean_ttft_ms`` and so on; ``detailed``: each request's."""
        flat = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del flat["details"]
        for name in LATENCIES:
            summary = flat.pop(name)
            for label, field in _LABELS.items():
                flat[f"{label}_{name}_ms"] = None if summary is None else getattr(summary, field)
        return flat | dataclasses.asdict(self.details) if detailed else flat


def summarize_replay(
    requests: Sequence[ServedRequest],
    *,
    duration_s: float,
    started: datetime,
    backend: str,
    model_id: str,
    request_rate: float | None,
    burstiness: float | None,
    max_concurrency: int | None = None,
) -> ReplayResult:
    """Compute the figures; see :class:`ReplayResult` for their definitions.

    Args:
        requests: at least one, in the order of the workload.
        duration_s: from the start of the run to the last token, above 0 if a request completed.
        request_rate: infinite for all at once, None for recorded times.
        burstiness: None for recorded times.
    """
    done = [request for request in requests if request.error is None]
    metrics = [request.metrics for request in done]
    num_input = sum(request.input_tokens for request in done)
    num_output = sum(request.output_tokens for request in done)
    has_targets = any(request.slo != NO_TARGETS for request in requests)
    num_good = sum(request.meets_slo for request in requests)

    def per_second(count: int) -> float:
        return count / duration_s if count else 0.0

    return ReplayResult(
        date=started.strftime("%Y%m%d-%H%M%S"),
        backend=backend,
        model_id=model_id,
        num_prompts=len(requests),
        request_rate="trace" if request_rate is None else _finite(request_rate),
        burstiness=None if burstiness is None else _finite(burstiness),
        max_concurrency=max_concurrency,
        duration=duration_s,
        completed=len(done),
        failed=len(requests) - len(done),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=per_second(len(done)),
        request_goodput=per_second(num_good) if has_targets else None,
        slo_attainment=num_good / len(requests) if has_targets else None,
        output_throughput=per_second(num_output),
        total_token_throughput=per_second(num_input + num_output),
        ttft=summarize_ms(m.ttft_ms for m in metrics),
        tpot=summarize_ms(m.tpot_ms for m in metrics),
        itl=summarize_ms(gap for m in metrics for gap in m.itl_ms),
        e2el=summarize_ms(m.e2e_ms for m in metrics),
        details=RequestDetails(
            input_lens=tuple(r.input_tokens for r in requests),
            output_lens=tuple(r.output_tokens for r in requests),
            ttfts=tuple((r.metrics.ttft_ms or 0.0) / 1e3 for r in requests),
            itls=tuple(tuple(gap / 1e3 for gap in r.metrics.itl_ms) for r in requests),
            start_times=tuple(r.metrics.arrival_s for r in requests),
            errors=tuple(r.error or "" for r in requests),
        ),
    )


def _finite(value: float) -> float | str:
    """The number, or text where JSON has no number for it."""
    return value if math.isfinite(value) else "inf"
