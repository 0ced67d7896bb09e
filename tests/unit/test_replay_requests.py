"""Requests and arrivals of a replay, and settings of one engine for several policies."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.cli.engine_run import config_for
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.replay import timed_requests
from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest

TARGETS = Slo(ttft_ms=500, tpot_ms=15)
LENGTHS = ((30, 5), (7, 12), (100, 1))
WORKLOAD = Workload("w", tuple(WorkloadRequest(p, o, float(i)) for i, (p, o) in enumerate(LENGTHS)))


# ---- requests ----


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(2, 500),
    st.integers(0, 5),
)
def test_requests_have_the_workloads_lengths(
    lengths: list[tuple[int, int]], vocab_size: int, seed: int
) -> None:
    workload = Workload("w", tuple(WorkloadRequest(p, o, None) for p, o in lengths))
    arrivals = np.arange(len(lengths)) * 0.5
    requests = timed_requests(workload, arrivals, vocab_size=vocab_size, slo=TARGETS, seed=seed)
    assert [(len(r.prompt_token_ids), r.params.max_tokens) for r in requests] == lengths
    assert [r.arrival_s for r in requests] == arrivals.tolist()
    assert all(0 <= token < vocab_size for r in requests for token in r.prompt_token_ids)
    assert all(r.params.ignore_eos and r.params.temperature == 0 and r.slo == TARGETS for r in requests)
    assert requests == timed_requests(workload, arrivals, vocab_size=vocab_size, slo=TARGETS, seed=seed)


def test_recorded_prompts_are_kept() -> None:
    workload = Workload("w", (WorkloadRequest(3, 1, None, "abc", (5, 6, 7)),))
    (request,) = timed_requests(workload, [0.0], vocab_size=100, slo=Slo(), seed=0)
    assert list(request.prompt_token_ids) == [5, 6, 7]


def test_every_request_needs_an_arrival() -> None:
    with pytest.raises(ConfigError, match="has 3 requests, but 2 arrivals are given"):
        timed_requests(WORKLOAD, [0.0, 1.0], vocab_size=10, slo=Slo(), seed=0)


# ---- arrivals ----


def test_arrivals_at_a_rate_recorded_or_all_at_once() -> None:
    times = Arrivals(request_rate=2.0, seed=1).times(WORKLOAD)
    assert times[-1] == pytest.approx(3 / 2)
    assert times.tolist() != Arrivals(request_rate=2.0, seed=2).times(WORKLOAD).tolist()
    even = Arrivals(request_rate=2.0, burstiness=math.inf).times(WORKLOAD)
    assert even.tolist() == pytest.approx([0.5, 1.0, 1.5])
    assert Arrivals(request_rate=None, time_scale=0.5).times(WORKLOAD).tolist() == [0, 0.5, 1]
    assert Arrivals(request_rate=math.inf).times(WORKLOAD).tolist() == [0, 0, 0]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(ConfigError, match="request_rate must be a number above 0"):
        Arrivals(request_rate=rate).times(WORKLOAD)


def test_recorded_times_that_are_not_there() -> None:
    with pytest.raises(WorkloadError, match="has no arrival times"):
        Arrivals(request_rate=None).times(Workload("w", (WorkloadRequest(1, 1, None),)))


# ---- one engine for several policies ----


@pytest.mark.parametrize(
    ("policies", "engine_policy", "decode_sms"),
    [
        ("mixed:64", "mixed:64", ()),
        ("split:48", "split:48", (48,)),
        ("serial mixed", "mixed", ()),
        ("serial mixed:64", "serial", ()),
        ("mixed:64 mixed:2048", "mixed:2048", ()),
        ("mixed auto", "auto", ()),
        ("mixed split:48 split:64", "auto", (48, 64)),
        # Preparing the one named would leave auto and split no other to choose.
        ("auto split:48", "auto", ()),
        ("split split:48", "auto", ()),
    ],
)
def test_the_engine_can_serve_as_each_policy(
    policies: str, engine_policy: str, decode_sms: tuple[int, ...]
) -> None:
    parsed = tuple(Policy.parse(policy) for policy in policies.split())
    config = config_for(EngineConfig(model="tiny", seed=3), parsed, TARGETS)
    assert (str(config.policy), config.decode_sms, config.slo, config.seed) == (
        engine_policy,
        decode_sms,
        TARGETS,
        3,
    )
    own = config_for(EngineConfig(model="tiny", decode_sms=(48, 32)), parsed, TARGETS)
    assert own.decode_sms[:2] == (48, 32)
    assert len(set(own.decode_sms)) == len(own.decode_sms)
