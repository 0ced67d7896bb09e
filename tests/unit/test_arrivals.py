"""Arrival times: their rate, their spread, and what is refused."""

import math

import numpy as np
import pytest

from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest, load_workload
from bullet_graph.workloads.workload import Times


def arrival_times(num_requests: int, **settings: float) -> Times:
    workload = Workload("w", (WorkloadRequest(1, 1, None),) * num_requests)
    return Arrivals(**settings).times(workload)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_the_mean_rate_is_exact_for_every_seed(burstiness: float, seed: int) -> None:
    times = arrival_times(400, request_rate=20, burstiness=burstiness, seed=seed)
    assert times.shape == (400,)
    assert times.dtype == np.float64
    assert times[-1] == pytest.approx(400 / 20)
    assert times[0] > 0
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_spread_as_a_gamma_distribution(burstiness: float) -> None:
    gaps = np.diff(arrival_times(200_000, request_rate=3, burstiness=burstiness, seed=7), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 3)
    # A gamma distribution of shape k has a coefficient of variation of 1/√k and a skewness of 2/√k.
    deviation = gaps.std()
    assert deviation / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.02)
    skewness = ((gaps - gaps.mean()) ** 3).mean() / deviation**3
    assert skewness == pytest.approx(2 * burstiness**-0.5, rel=0.1)


def test_limits_of_the_distribution() -> None:
    assert arrival_times(1, request_rate=4).tolist() == [0.25], "one request comes after one mean gap"
    steady = arrival_times(5, request_rate=2, burstiness=math.inf)
    assert steady == pytest.approx([0.5, 1, 1.5, 2, 2.5])
    assert arrival_times(3, request_rate=math.inf).tolist() == [0, 0, 0]


def test_the_pattern_follows_from_the_seed_and_scales_with_the_rate() -> None:
    once = arrival_times(50, request_rate=10, seed=3)
    assert arrival_times(50, request_rate=10, seed=3).tolist() == once.tolist()
    assert arrival_times(50, request_rate=5, seed=3) == pytest.approx(2 * once)
    assert arrival_times(50, request_rate=10, seed=4) != pytest.approx(once)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": -1.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"burstiness": 0.0}, "burstiness"),
        ({"burstiness": math.nan}, "burstiness"),
        ({"burstiness": 1e-9}, "raise the burstiness"),
        ({"seed": -1}, "seed"),
        *(({"request_rate": None, "time_scale": x}, "scale") for x in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrival_times(2, **{"request_rate": 1.0} | settings)


def test_a_traces_own_times() -> None:
    workload = load_workload("azure:conv", num_requests=20)
    times = Arrivals(request_rate=None).times(workload)
    assert times[0] == 0
    assert times.tolist() == [request.arrival_s for request in workload.requests]
    assert Arrivals(request_rate=None, time_scale=0.5).times(workload) == pytest.approx(times / 2)


def test_a_workload_without_times_has_none_to_replay() -> None:
    workload = Workload("chat", (WorkloadRequest(3, 4, 0.0), WorkloadRequest(3, 4, None)))
    with pytest.raises(WorkloadError, match=r"chat has no arrival times.*request rate"):
        Arrivals(request_rate=None).times(workload)
