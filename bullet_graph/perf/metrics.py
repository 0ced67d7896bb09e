"""What a request experienced: times to and between its tokens."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, on one monotonic clock, in seconds; derived figures in milliseconds.

    Attributes:
        arrival_s: when the request was added.
        first_scheduled_s: when its first prefill chunk was launched, or None while it waits.
        token_times_s: when each output token (of the first sample) reached the host.
    """

    arrival_s: float
    first_scheduled_s: float | None
    token_times_s: tuple[float, ...]

    @property
    def queue_ms(self) -> float | None:
        """Time from arrival to the first launch, or None while the request waits."""
        return None if self.first_scheduled_s is None else (self.first_scheduled_s - self.arrival_s) * 1e3

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: from arrival until it reached the host."""
        return (self.token_times_s[0] - self.arrival_s) * 1e3 if self.token_times_s else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (e2e − TTFT) / (n_out − 1); None for fewer than two."""
        count = len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1) * 1e3 if count > 1 else None

    @property
    def e2e_ms(self) -> float | None:
        """From arrival to the last token so far."""
        return (self.token_times_s[-1] - self.arrival_s) * 1e3 if self.token_times_s else None

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between one token and the next."""
        times = self.token_times_s
        return tuple((b - a) * 1e3 for a, b in itertools.pairwise(times))
