"""A workload: the lengths of its requests, when they arrive, and their prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bullet_graph.errors import ConfigError, WorkloadError

Times = npt.NDArray[np.float64]
Tokenize = Callable[[str], Sequence[int]]
"""Turns a text into token ids."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload.

    Attributes:
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: length of the output, at least 1; a benchmark forces it.
        arrival_s: seconds after the workload's first request, or None where the source has no times.
        prompt_token_ids: the prompt, where the source has it.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """At least one request, in order of arrival; reports call the workload by its ``name``."""

    name: str
    requests: tuple[WorkloadRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How the requests of a workload arrive.

    Random gaps, the first one included, follow a gamma distribution of shape ``burstiness``, as in vLLM's serving
    benchmark: 1 is a Poisson process, less is burstier, more is steadier, infinite has equal gaps. One factor then
    scales them so that the last request arrives at exactly ``num_requests / request_rate``. Every seed thus has the
    same mean rate, and one seed has the same pattern at every rate.

    Attributes:
        request_rate: requests per second; infinite lets all arrive at 0, None takes the recorded times.
        time_scale: factor on recorded times: 0.5 replays at twice the recorded rate.
        max_concurrency: most requests under way at once; None is no limit.
        seed: of random gaps and random prompts, at least 0.
    """

    request_rate: float | None
    burstiness: float = 1.0
    time_scale: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def times(self, workload: Workload) -> Times:
        """Arrival times: float64 [number of requests], seconds after the start, not decreasing.

        Raises:
            ConfigError: a number is out of range, or the burstiness is so small that every gap vanishes.
            WorkloadError: recorded times are asked for, but the workload (synthetic, ShareGPT) has none.
        """
        rate = self.request_rate
        return self._recorded(workload) if rate is None else self._drawn(workload, rate)

    def _recorded(self, workload: Workload) -> Times:
        if not (math.isfinite(self.time_scale) and self.time_scale > 0):
            raise ConfigError(
                f"the scale of a trace's times must be a finite number above 0, got {self.time_scale}"
            )
        times = [request.arrival_s for request in workload.requests]
        if None in times:
            raise WorkloadError(
                f"{workload.name} has no arrival times: give a request rate instead, or a trace that has them "
                "(Azure CSV, Mooncake JSONL)"
            )
        return np.array(times, dtype=np.float64) * self.time_scale

    def _drawn(self, workload: Workload, request_rate: float) -> Times:
        num_requests = len(workload.requests)
        if self.seed < 0:
            raise ConfigError(f"arrivals need a seed of at least 0, got {self.seed}")
        for name, value in (("request_rate", request_rate), ("burstiness", self.burstiness)):
            if math.isnan(value) or value <= 0:
                raise ConfigError(f"{name} must be a number above 0, or inf, got {value}")
        if math.isinf(request_rate):
            return np.zeros(num_requests)
        if math.isinf(self.burstiness):
            gaps = np.ones(num_requests)
        else:
            # PCG64 by name: numpy may change its default generator.
            gaps = np.random.Generator(np.random.PCG64(self.seed)).gamma(self.burstiness, size=num_requests)
        times = np.cumsum(gaps)
        if times[-1] == 0:
            raise ConfigError(
                f"burstiness={self.burstiness} leaves no gap between {num_requests} requests: raise the burstiness"
            )
        scaled: Times = times / times[-1] * (num_requests / request_rate)
        return scaled


def make_prompt_token_ids(
    request: WorkloadRequest, index: int, vocab_size: int, seed: int
) -> npt.NDArray[np.int32]:
    """A request's own token ids, or random ones in [0, vocab_size): int32 [request.prompt_tokens].

    Random ids depend on (seed, index) alone, so no two prompts of a workload share a prefix.
    """
    if request.prompt_token_ids is not None:
        return np.asarray(request.prompt_token_ids, dtype=np.int32)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,))))
    return generator.integers(0, vocab_size, size=request.prompt_tokens, dtype=np.int32)
