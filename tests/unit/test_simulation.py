"""The engine's own loop, scheduler and planner in virtual time."""

import math
from typing import Any

import numpy as np
import pytest
from examples import few
from fakes.perf_tables import LLAMA_8B
from hypothesis import given
from hypothesis import strategies as st
from simulated_engines import changed

from bullet_graph.config import EngineConfig, Policy, PromptOrder
from bullet_graph.engine.simulation import SimulatedEngine, Simulation, SimulationSettings, simulate
from bullet_graph.errors import ConfigError
from bullet_graph.hardware import H200
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.roofline import Roofline
from bullet_graph.perf.table import load_table
from bullet_graph.planner.tuning import TUNING
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest, load_workload

POLICIES = ("serial", "serial:512", "mixed", "mixed:256", "split", "split:32", "auto")
MODEL = Roofline(H200, LLAMA_8B)
CONFIG = EngineConfig(model="tiny", policy=Policy("auto"), max_num_seqs=64)
SETTINGS = SimulationSettings(config=CONFIG, kv_cache_tokens=100_000, max_model_len=8192, host_overhead_ms=0.0)
TIGHT = Slo(ttft_ms=500, tpot_ms=15)


def workload(*lengths: tuple[int, int]) -> Workload:
    return Workload("test", tuple(WorkloadRequest(prompt, output, None) for prompt, output in lengths))


def run(
    lengths: list[tuple[int, int]], arrivals_s: list[float], *, slo: Slo = NO_TARGETS, **changes: Any
) -> Simulation:
    return simulate(MODEL, workload(*lengths), np.array(arrivals_s), changed(SETTINGS, **changes), slo=slo)


def output_lens(simulation: Simulation) -> list[int]:
    return [row.output_tokens for row in simulation.replay.served]


@pytest.mark.parametrize("policy", ["serial", "mixed", "auto"])
def test_a_request_alone_takes_the_predicted_times(policy: str) -> None:
    simulation = run([(1000, 3)], [2.0], policy=Policy.parse(policy))
    (output,) = simulation.replay.served
    prefill_ms = MODEL.prefill(1000, attention_pairs(1000)).ms
    first_ms, second_ms = MODEL.decode(1, 1001).ms, MODEL.decode(1, 1002).ms
    assert output.metrics.arrival_s == 2.0
    assert output.metrics.ttft_ms == pytest.approx(prefill_ms)
    assert output.metrics.itl_ms == pytest.approx((first_ms, second_ms))
    assert simulation.replay.duration_s == pytest.approx(2 + (prefill_ms + first_ms + second_ms) / 1e3)
    assert simulation.stats.num_steps == 3


def test_the_hosts_time_is_told_apart_from_the_devices() -> None:
    free, costly = (run([(1000, 50)], [0.0], host_overhead_ms=ms).replay for ms in (0.0, 1.0))
    ttft_ms, free_ttft_ms = (r.served[0].metrics.ttft_ms or 0.0 for r in (costly, free))
    # A launch before the prefill; later ones hide behind the device's work.
    assert ttft_ms == pytest.approx(free_ttft_ms + 1)
    assert costly.duration_s == pytest.approx(free.duration_s + 0.001)


def test_a_last_token_does_not_wait_until_the_host_has_launched_a_long_prompt() -> None:
    simulation = run([(1000, 20), (8000, 1)], [0.0, 0.1], slo=TIGHT, host_overhead_ms=0.2)
    first, _ = simulation.replay.served
    assert first.metrics.itl_ms[-1] < 15 < MODEL.num_layers * 0.5


def test_prompts_wait_until_decode_has_room_for_them() -> None:
    # Some 40 sequences hold this target, and 60 do not: 9 of them, if all run at once.
    tpot_ms = MODEL.decode(16, 16 * 1000).ms / TUNING.room_share
    assert MODEL.decode(60, 60 * 600).ms > 1.05 * tpot_ms
    arrivals_s = [0.05 * index for index in range(60)]
    slo = Slo(ttft_ms=500, tpot_ms=tpot_ms)
    served = run([(16, 1200)] * 60, arrivals_s, slo=slo, kv_cache_tokens=300_000).replay.served
    assert sum((row.metrics.tpot_ms or 0.0) <= tpot_ms for row in served) > 45


def test_without_targets_auto_is_as_quick_as_any_policy() -> None:
    model = TableModel(load_table("h200", model="llama-3.1-8b"), LLAMA_8B)
    load = load_workload("azure:conv", num_requests=150)

    def duration_s(policy: str) -> float:
        settings = changed(SETTINGS, policy=Policy.parse(policy), kv_cache_tokens=600_000, max_num_seqs=256)
        return simulate(model, load, np.zeros(150), settings).replay.duration_s

    assert duration_s("auto") <= 1.005 * min(map(duration_s, ("serial", "mixed:2048", "mixed:8192")))


@pytest.mark.parametrize("policy", ["mixed:2048", "auto"])
def test_the_longest_output_first_ends_sooner(policy: str) -> None:
    lengths = [(2000, 20)] * 100 + [(2000, 400)]

    def outcome(order: PromptOrder) -> Simulation:
        return run(
            lengths, [0.0] * len(lengths), policy=Policy.parse(policy), kv_cache_tokens=300_000, prompt_order=order
        )

    arrival, longest = outcome("arrival"), outcome("longest-output")
    # The rest of it, alone at the end, takes a second and more of some six.
    assert longest.replay.duration_s < 0.95 * arrival.replay.duration_s
    assert output_lens(longest) == output_lens(arrival)


def test_deadlines_count_from_arrival() -> None:
    conv = load_workload("azure:conv", num_requests=20)
    slo = Slo(ttft_ms=200, tpot_ms=8)
    soon, late = (simulate(MODEL, conv, np.full(20, at_s), SETTINGS, slo=slo).replay for at_s in (0.0, 1000.0))
    assert [o.metrics.ttft_ms for o in late.served] == pytest.approx([o.metrics.ttft_ms for o in soon.served])


def test_concurrency_is_limited_and_progress_is_told() -> None:
    seen: list[str | None] = []
    requests = workload(*[(100, 50)] * 4)
    single = simulate(
        MODEL, requests, np.zeros(4), SETTINGS, max_concurrency=1, on_done=lambda row: seen.append(row.error)
    )
    ends = [output.metrics.token_times_s[-1] for output in single.replay.served]
    assert [output.metrics.arrival_s for output in single.replay.served] == [0.0, *ends[:-1]]
    assert seen == [None] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_tokens": 8191}, "max_model_len=8192"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"host_overhead_ms": math.nan}, "host_overhead_ms"),
        ({"time_noise": -0.1}, "time_noise"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(SETTINGS, **changes)


def test_noise_repeats_with_its_seed_alone() -> None:
    quiet, noisy, again, other = (
        run([(1000, 50)] * 4, [0.0, 0.1, 0.2, 0.3], **changes).replay.duration_s
        for changes in ({}, {"time_noise": 0.2}, {"time_noise": 0.2}, {"time_noise": 0.2, "seed": 1})
    )
    assert noisy == again
    assert len({quiet, noisy, other}) == 3
    assert 0.5 * quiet < noisy < 2 * quiet


def test_sizes_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="50 SMs is not in the performance table"):
        SimulatedEngine(MODEL, changed(SETTINGS, decode_sms=(32, 50)))
    with pytest.raises(ConfigError, match="split:48"):
        SimulatedEngine(MODEL, changed(SETTINGS, policy=Policy.parse("split:48"), decode_sms=(32,)))


@few(25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 60)), min_size=1, max_size=12),
    policy=st.sampled_from(POLICIES),
    rate=st.sampled_from([1.0, 30.0, math.inf]),
    seed=st.integers(0, 5),
    slo=st.sampled_from([NO_TARGETS, TIGHT, Slo(tpot_ms=3), Slo(ttft_ms=20)]),
    cache_tokens=st.sampled_from([1024, 2000, 20_000]),
    max_num_seqs=st.sampled_from([1, 3, 64]),
    chunk_tokens=st.sampled_from([64, 500, 8192]),
)
def test_whatever_comes_is_served_within_the_caches_bounds(
    lengths: list[tuple[int, int]],
    policy: str,
    rate: float,
    seed: int,
    slo: Slo,
    cache_tokens: int,
    max_num_seqs: int,
    chunk_tokens: int,
) -> None:
    """No request starves, whatever the targets, the policy and the room there is."""
    simulation = run(
        lengths,
        Arrivals(request_rate=rate, seed=seed).times(workload(*lengths)).tolist(),
        slo=slo,
        policy=Policy.parse(policy),
        kv_cache_tokens=cache_tokens,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk_tokens,
        host_overhead_ms=0.1,
    )
    assert output_lens(simulation) == [output for _, output in lengths]
    assert simulation.stats.kv_blocks_peak <= simulation.stats.kv_blocks_total
    assert simulation.stats.kv_blocks_used == 0
    for output in simulation.replay.served:
        times = (output.metrics.arrival_s, *output.metrics.token_times_s)
        assert list(times) == sorted(times)
        # Each token takes as long as weights are read, but the host may see two at once.
        assert times[-1] - times[0] > 0.003 * output.output_tokens
