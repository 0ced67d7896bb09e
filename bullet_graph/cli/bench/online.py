"""Arrival replay in this process: a workload's requests come to an engine at their times."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bullet_graph.cli.engine_run import watch_device
from bullet_graph.config import Policy
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.replay import replay, timed_requests
from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.perf.energy import DeviceReport
from bullet_graph.perf.replay_metrics import ReplayResult, ServedRequest, summarize_replay
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals, Workload

BACKEND = "bullet_graph"

WARMUP_OUTPUT_TOKENS = 64
WARMUP_GAP_S = 0.02
"""Between warm-up requests, so that some come while others decode: other kernels run than for all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRun:
    """What one replay brought; all figures are of this run alone.

    Attributes:
        result: latencies, rates and goodput.
        policy: how prefill and decode shared the device.
        slo: targets of every request, and of the planner.
        policy_shares: share of the device time of all launches, by policy.
        num_steps: forwards.
        num_preemptions: sequences that lost their KV blocks and were recomputed.
        kv_blocks_peak: most KV blocks in use at once.
        kv_blocks_total: KV blocks that sequences can own.
        device: clocks, power and energy meanwhile.
        joules_per_output_token: energy of the board over tokens generated; None without a GPU or NVML.
        joules_per_token: the same over prompt and output tokens.
    """

    result: ReplayResult
    policy: Policy
    slo: Slo
    policy_shares: Mapping[str, float]
    num_steps: int
    num_preemptions: int
    kv_blocks_peak: int
    kv_blocks_total: int
    device: DeviceReport
    joules_per_output_token: float | None
    joules_per_token: float | None

    def fields(self, *, detailed: bool = False) -> dict[str, Any]:
        """The figures for a JSON file, flat but for shares and device; ``detailed`` adds those of each request."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del own["result"]
        return (
            self.result.fields(detailed=detailed)
            | own
            | {
                "policy": str(self.policy),
                "slo": str(self.slo),
                "policy_shares": dict(self.policy_shares),
                "device": dataclasses.asdict(self.device),
            }
        )


def serve_online(
    engine: Engine,
    workload: Workload,
    arrivals: Arrivals,
    *,
    policy: Policy,
    slo: Slo,
    on_done: Callable[[ServedRequest], object] = lambda _: None,
) -> OnlineRun:
    """Serve a workload as its requests come; one engine serves many runs.

    The engine's loop is made anew for each run: its counters and its peak of KV blocks are the run's alone. What the
    planner has learned of its predictions' errors, in warm-ups and in earlier runs, stays.

    Args:
        engine: with nothing under way, and able to serve as ``policy``: one made for ``auto`` is.
        workload: the requests, with their recorded lengths.
        arrivals: when they come.
        policy: how prefill and decode share the device.
        slo: targets of every request.
        on_done: called with each request's outcome.

    Raises:
        ConfigError: arrivals out of range, or a policy that the engine cannot serve.
        WorkloadError: no request completed.
        RequestError: the engine has requests under way.
        EngineDeadError: the engine failed.
    """
    requests = timed_requests(
        workload,
        arrivals.times(workload),
        vocab_size=engine.model_config.vocab_size,
        slo=slo,
        seed=arrivals.seed,
    )
    engine.set_policy(policy, slo)
    started = datetime.now()
    with watch_device(engine) as monitor:
        run = replay(engine, requests, max_concurrency=arrivals.max_concurrency, on_done=on_done)
    result = summarize_replay(
        run.served,
        duration_s=run.duration_s,
        started=started,
        backend=BACKEND,
        model_id=engine.config.model,
        request_rate=arrivals.request_rate,
        burstiness=None if arrivals.request_rate is None else arrivals.burstiness,
        max_concurrency=arrivals.max_concurrency,
    )
    if not result.completed:
        raise WorkloadError(
            f"none of the {result.failed} requests of {workload.name} could be served; the first: "
            f"{result.details.errors[0]}"
        )
    stats = engine.stats()
    energy_joules = monitor.report.energy_joules

    def joules_per(num_tokens: int) -> float | None:
        return None if energy_joules is None else energy_joules / num_tokens

    return OnlineRun(
        result=result,
        policy=policy,
        slo=slo,
        policy_shares=stats.policy_shares,
        num_steps=stats.num_steps,
        num_preemptions=stats.num_preemptions,
        kv_blocks_peak=stats.kv_blocks_peak,
        kv_blocks_total=stats.kv_blocks_total,
        device=monitor.report,
        joules_per_output_token=joules_per(result.total_output_tokens),
        joules_per_token=joules_per(result.total_input_tokens + result.total_output_tokens),
    )


def warm_up(
    engine: Engine, workload: Workload, num_warmups: int, *, policy: Policy, slo: Slo, seed: int
) -> None:
    """Serve a few requests under a policy and forget about them, so that kernels made on first use are there.

    Prompts are as long as the workload's first (and its first again, where it has fewer), outputs at most
    ``WARMUP_OUTPUT_TOKENS``; random prompts are others than those measured.

    Args:
        engine: with nothing under way.
        workload: that will be served.
        num_warmups: how many requests; 0 does nothing.
        policy: as for :func:`serve_online`.
        slo: targets of every request.
        seed: of the run that follows.

    Raises:
        ConfigError: a negative number, or a policy that the engine cannot serve.
        RequestError: the engine has requests under way.
        EngineDeadError: the engine failed.
    """
    if num_warmups < 0:
        raise ConfigError(f"the number of warm-up requests must be at least 0, got {num_warmups}")
    if num_warmups == 0:
        return
    engine.set_policy(policy, slo)
    first = itertools.islice(itertools.cycle(workload.requests), num_warmups)
    short = tuple(
        dataclasses.replace(r, output_tokens=min(r.output_tokens, WARMUP_OUTPUT_TOKENS)) for r in first
    )
    requests = timed_requests(
        Workload(workload.name, short),
        [WARMUP_GAP_S * index for index in range(num_warmups)],
        vocab_size=engine.model_config.vocab_size,
        slo=slo,
        seed=seed + 1,
    )
    replay(engine, requests, id_prefix="warmup-")
