"""Times of one request, and the summary of many."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)  # not frozen: one is made per token, like CompletionOutput
class RequestMetrics:
    """Times of one request, on one monotonic clock, in seconds; derived figures are in milliseconds.

    Attributes:
        arrival_s: when the request was added.
        first_scheduled_s: when its first prefill chunk was launched, or None while it waits.
        times_s: times of tokens; may keep growing, since a copy per token would cost as much as all other work on it.
        num_tokens: how many of ``times_s`` count; None: all of them.
    """

    arrival_s: float
    first_scheduled_s: float | None
    times_s: Sequence[float]
    num_tokens: int | None = None

    @property
    def token_times_s(self) -> tuple[float, ...]:
        """When each output token (of the first sample) reached the host."""
        return self.token_times_from(0)

    def token_times_from(self, index: int) -> tuple[float, ...]:
        """The same, from token ``index`` on."""
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
        """Time per output token after the first: (e2e − TTFT) / (n_out − 1); None for fewer than two."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None

    @property
    def e2e_ms(self) -> float | None:
        """From arrival to the last token so far."""
        times = self.token_times_s
        return (times[-1] - self.arrival_s) * 1e3 if times else None

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between one token and the next."""
        return tuple((b - a) * 1e3 for a, b in itertools.pairwise(self.token_times_s))


@dataclass(frozen=True, slots=True)
class PercentileSummary:
    """Summary of a sample in milliseconds; ``std`` is of the population, percentiles are interpolated linearly."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float


def summarize_ms(values: Iterable[float | None]) -> PercentileSummary | None:
    """Summarize the times, in milliseconds, that are not None; None where there are none."""
    sample = np.array([value for value in values if value is not None], dtype=np.float64)
    if sample.size == 0:
        return None
    p50, p90, p99 = (float(p) for p in np.percentile(sample, (50, 90, 99)))
    return PercentileSummary(float(sample.mean()), float(sample.std()), p50, p90, p99)
