"""Runs of ``bullet-graph bench online``: the same arrivals under one arm after another, on one engine."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bullet_graph.cli.bench.online import Arrivals, OnlineRun, serve_online, warm_up
from bullet_graph.cli.engine_run import RunRecord, describe_run, load_requests, open_engine
from bullet_graph.config import Arm, EngineConfig
from bullet_graph.errors import WorkloadError
from bullet_graph.models.progress import progress_bar
from bullet_graph.runtime.resolve import resolve
from bullet_graph.slo import Slo


@dataclass(frozen=True, slots=True)
class OnlineComparison:
    """The same arrivals under one arm after another.

    Attributes:
        trace: name of the workload.
        runs: one for each arm, in the order asked for.
        record: of the engine that served them all; its counters are of no run.
        partitions: which back end confined the lanes and why; None on the CPU.
    """

    trace: str
    runs: tuple[OnlineRun, ...]
    record: RunRecord
    partitions: str | None


def config_for(config: EngineConfig, arms: Sequence[Arm], slo: Slo) -> EngineConfig:
    """Settings of one engine that can serve under each of these arms in turn, and begins with these targets.

    Args:
        config: its settings otherwise.
        arms: at least one. Sizes that ``split:NUM_SMS`` names are prepared unless another arm chooses the size:
            then those of ``config.decode_sms``, or of the performance table, are.
        slo: targets.
    """
    sizes = config.decode_sms
    chooses_size = any(arm.name in ("auto", "split") and arm.decode_sms is None for arm in arms)
    if not chooses_size:
        named = (arm.decode_sms for arm in arms)
        sizes += tuple(size for size in named if size is not None and size not in sizes)
    if len(arms) > 1 and any(arm.uses_prefill_lane for arm in arms):
        # Whose engine can serve as any other.
        arm = Arm("auto")
    else:
        # The largest forward counts; and mixed may need a table where serial never does.
        arm = max(arms, key=lambda arm: (arm.chunk_tokens or math.inf, arm.name == "mixed"))
    return dataclasses.replace(config, arm=arm, slo=slo, decode_sms=sizes)


def run_online(
    config: EngineConfig,
    arms: Sequence[Arm],
    trace: str,
    num_prompts: int | None,
    arrivals: Arrivals,
    *,
    slo: Slo,
    num_warmups: int,
    quiet: bool,
    trace_decisions: Path | None = None,
) -> OnlineComparison:
    """Serve a workload as it arrives, under each of some arms in turn, on one engine.

    Args:
        config: the engine's settings; its arm and targets are not used.
        arms: at least one, each once.
        trace: see :func:`bullet_graph.workloads.load_workload`.
        num_prompts: first so many requests, or None for all.
        arrivals: when they come.
        slo: targets of every request.
        num_warmups: requests before each measured run.
        quiet: show neither the memory ledger nor progress bars.
        trace_decisions: write every decision, the warm-up's included, to this file; for one arm only.

    Raises:
        BulletGraphError: from the workload, its arrivals, the model or the device; WorkloadError where no request
            completed.
    """
    # Whatever can be wrong with the settings, the trace and its arrivals shows before the weights are loaded.
    config = config_for(config, arms, slo)
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
        for arm in arms:
            # One that this engine cannot serve is told before the first run.
            engine.set_policy(arm, slo)
        for arm in arms:
            warm_up(engine, workload, num_warmups, arm=arm, slo=slo, seed=arrivals.seed)
            show = not quiet and sys.stderr.isatty()
            with progress_bar(
                show, total=len(workload.requests), unit="req", desc=str(arm), leave=False
            ) as advance:
                runs.append(
                    serve_online(engine, workload, arrivals, arm=arm, slo=slo, on_output=lambda _: advance(1))
                )
        stats = engine.stats()
        record = describe_run(config, runtime, stats, stats, runs[-1].device, engine)
        return OnlineComparison(workload.name, tuple(runs), record, engine.partition_backend)
