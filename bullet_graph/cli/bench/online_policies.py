"""Runs of ``bullet-graph bench online``: the same arrivals under one policy after another, on one engine."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bullet_graph.cli.bench.online import OnlineRun, serve_online, warm_up
from bullet_graph.cli.engine_run import RunRecord, describe_run, load_requests, open_engine
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.errors import WorkloadError
from bullet_graph.models.progress import progress_bar
from bullet_graph.runtime.resolve import resolve
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals


@dataclass(frozen=True, slots=True)
class OnlineComparison:
    """The same arrivals under one policy after another.

    Attributes:
        trace: name of the workload.
        runs: one for each policy, in the order asked for.
        record: of the engine that served them all; its counters are of no run.
        partitions: which back end confined the lanes and why; None on the CPU.
    """

    trace: str
    runs: tuple[OnlineRun, ...]
    record: RunRecord
    partitions: str | None


def config_for(config: EngineConfig, policies: Sequence[Policy], slo: Slo) -> EngineConfig:
    """Settings of one engine that can serve under each of these policies in turn, and begins with these targets.

    Args:
        config: its settings otherwise.
        policies: at least one. Sizes that ``split:NUM_SMS`` names are prepared unless another policy chooses the size:
            then those of ``config.decode_sms``, or of the performance table, are.
        slo: targets.
    """
    sizes = config.decode_sms
    chooses_size = any(policy.name in ("auto", "split") and policy.decode_sms is None for policy in policies)
    if not chooses_size:
        named = (policy.decode_sms for policy in policies)
        sizes += tuple(size for size in named if size is not None and size not in sizes)
    if len(policies) > 1 and any(policy.uses_prefill_lane for policy in policies):
        # Whose engine can serve as any other.
        policy = Policy("auto")
    else:
        # The largest forward counts; and mixed may need a table where serial never does.
        policy = max(policies, key=lambda policy: (policy.chunk_tokens or math.inf, policy.name == "mixed"))
    return dataclasses.replace(config, policy=policy, slo=slo, decode_sms=sizes)


def run_online(
    config: EngineConfig,
    policies: Sequence[Policy],
    trace: str,
    num_prompts: int | None,
    arrivals: Arrivals,
    *,
    slo: Slo,
    num_warmups: int,
    quiet: bool,
    trace_decisions: Path | None = None,
) -> OnlineComparison:
    """Serve a workload as it arrives, under each of some policies in turn, on one engine.

    Args:
        config: the engine's settings; its policy and targets are not used.
        policies: at least one, each once.
        trace: see :func:`bullet_graph.workloads.load_workload`.
        num_prompts: first so many requests, or None for all.
        arrivals: when they come.
        slo: targets of every request.
        num_warmups: requests before each measured run.
        quiet: show neither the memory ledger nor progress bars.
        trace_decisions: write every decision, the warm-up's included, to this file; for one policy only.

    Raises:
        BulletGraphError: from the workload, its arrivals, the model or the device; WorkloadError where no request
            completed.
    """
    # Whatever can be wrong with the settings, the trace and its arrivals shows before the weights are loaded.
    config = config_for(config, policies, slo)
    runtime = resolve(config)
    workload = load_requests(runtime, trace, num_prompts, seed=config.seed)
    arrivals.times(workload)
    if all(r.prompt_tokens + r.output_tokens > runtime.max_model_len for r in workload.requests):
        raise WorkloadError(
            f"each of the {len(workload.requests)} requests of {workload.name} is longer than max_model_len="
            f"{runtime.max_model_len}, prompt and output together, so none can be served: raise --max-model-len, or "
            "take a model with room for them"
        )
    runs: list[OnlineRun] = []
    with open_engine(config, quiet=quiet, trace_decisions=trace_decisions) as engine:
        for policy in policies:
            # One that this engine cannot serve is told before the first run.
            engine.set_policy(policy, slo)
        for policy in policies:
            warm_up(engine, workload, num_warmups, policy=policy, slo=slo, seed=arrivals.seed)
            show = not quiet and sys.stderr.isatty()
            with progress_bar(
                show, total=len(workload.requests), unit="req", desc=str(policy), leave=False
            ) as advance:
                runs.append(
                    serve_online(
                        engine, workload, arrivals, policy=policy, slo=slo, on_done=lambda _: advance(1)
                    )
                )
        stats = engine.stats()
        record = describe_run(config, runtime, stats, stats, runs[-1].device, engine)
        return OnlineComparison(workload.name, tuple(runs), record, engine.partition_backend)
