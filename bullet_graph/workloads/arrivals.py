"""When the requests of a replayed workload arrive."""

import math

import numpy as np
import numpy.typing as npt

from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.workloads.request import Workload

Times = npt.NDArray[np.float64]


def arrival_times(num_requests: int, *, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> Times:
    """Random arrivals at a mean rate, defined as vLLM's serving benchmark does.

    The gaps, that before the first request included, follow a gamma distribution of shape ``burstiness``. They are
    then scaled by one factor so that the last request arrives at exactly ``num_requests / request_rate``: every
    seed has the same mean rate, and one seed at two rates has the same pattern.

    Args:
        num_requests: at least 1.
        request_rate: requests a second; infinite lets all arrive at 0.
        burstiness: 1 is a Poisson process, less is burstier, more is steadier, infinite has equal gaps.
        seed: at least 0.

    Returns:
        float64 [num_requests], seconds after the start, not decreasing.

    Raises:
        ConfigError: a number is out of range, or the burstiness is so small that every gap vanishes.
    """
    if num_requests < 1 or seed < 0:
        raise ConfigError(
            f"arrivals need at least 1 request and a seed of at least 0, got {num_requests} requests and seed {seed}"
        )
    for name, value in (("request_rate", request_rate), ("burstiness", burstiness)):
        if math.isnan(value) or value <= 0:
            raise ConfigError(f"{name} must be a number above 0, or inf, got {value}")
    if math.isinf(request_rate):
        return np.zeros(num_requests)
    if math.isinf(burstiness):
        gaps = np.ones(num_requests)
    else:
        # PCG64 by name: numpy may change what its default generator is.
        gaps = np.random.Generator(np.random.PCG64(seed)).gamma(burstiness, size=num_requests)
    times = np.cumsum(gaps)
    if times[-1] == 0:
        raise ConfigError(
            f"burstiness={burstiness} leaves no gap between {num_requests} requests: take more of it"
        )
    scaled: Times = times / times[-1] * (num_requests / request_rate)
    return scaled


def trace_times(workload: Workload, *, scale: float = 1.0) -> Times:
    """The arrivals that the workload recorded.

    Args:
        workload: a trace with times.
        scale: factor on the times: 0.5 replays at twice the recorded rate.

    Returns:
        float64 [number of requests], seconds after the first request, not decreasing.

    Raises:
        ConfigError: the scale is not a finite number above 0.
        WorkloadError: a request has no time, as in synthetic workloads and ShareGPT files.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"the scale of a trace's times must be a finite number above 0, got {scale}")
    times = [request.arrival_s for request in workload.requests]
    if None in times:
        raise WorkloadError(
            f"{workload.name} has no arrival times: give a request rate instead, or a trace that has them "
            "(Azure CSV, Mooncake JSONL)"
        )
    return np.array(times, dtype=np.float64) * scale
