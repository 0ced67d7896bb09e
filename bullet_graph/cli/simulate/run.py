"""Runs an engine in virtual time, under one policy or several."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bullet_graph._version import __version__
from bullet_graph.cli.simulate.device import open_device
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.output import EngineStats
from bullet_graph.engine.simulation import HOST_OVERHEAD_MS, SimulationSettings, simulate
from bullet_graph.engine.trace import DecisionTrace, TraceHeader
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.metrics import ReplayResult
from bullet_graph.perf.performance import PaddedModel
from bullet_graph.runtime.simulated import StepRecord
from bullet_graph.workloads import Arrivals, load_workload

BACKEND = "bullet-graph simulate"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSpec:
    """What to simulate.

    Attributes:
        gpu: see :func:`~bullet_graph.cli.simulate.device.open_device`.
        config: of the engine.
        trace: see :func:`~bullet_graph.workloads.load_workload`.
        num_prompts: its first N requests; None: all.
        arrivals: when the requests arrive.
        host_overhead_ms: host time per launch.
        time_noise: relative spread of the device's times around the prediction.
    """

    gpu: str
    config: EngineConfig
    trace: str
    num_prompts: int | None
    arrivals: Arrivals
    host_overhead_ms: float = HOST_OVERHEAD_MS
    time_noise: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The figures of one run under a policy, and the engine's counters at its end."""

    policy: Policy
    result: ReplayResult
    stats: EngineStats

    def fields(self, *, detailed: bool = False) -> dict[str, Any]:
        """The figures for a JSON file; ``detailed`` adds those of each request."""
        names = ("policy_shares", "num_steps", "num_preemptions", "kv_blocks_peak", "kv_blocks_total")
        counters = {name: getattr(self.stats, name) for name in names}
        return self.result.fields(detailed=detailed) | counters | {"policy": str(self.policy)}


class Simulator:
    """A workload, a device and an engine's settings, ready to run at any rate under any policy.

    Raises:
        BulletGraphError: errors in workload, model, table or settings.
    """

    def __init__(self, spec: SimulationSpec) -> None:
        self.spec = spec
        self.device = open_device(spec.gpu, spec.config)
        folder = self.device.folder
        tokenizer = None if folder is None else Tokenizer.from_folder(folder)
        self.workload = load_workload(
            spec.trace,
            num_requests=spec.num_prompts,
            seed=spec.config.seed,
            tokenize=None if tokenizer is None else tokenizer.encode,
        )

    def run(
        self,
        policy: Policy,
        arrivals: Arrivals | None = None,
        *,
        trace: DecisionTrace | None = None,
        on_done: Callable[[object], object] = lambda _: None,
        on_step: Callable[[StepRecord], object] = lambda _: None,
        capture_plan: CapturePlan | None = None,
    ) -> PolicyRun:
        """Serve the workload once.

        Args:
            policy: how prefill and decode share the device.
            arrivals: other than those of the spec.
            trace: records every decision.
            on_done: called with each request's outcome.
            on_step: called with every finished launch.
            capture_plan: other than the configuration's.
        """
        spec, config, device = self.spec, self.spec.config, self.device
        arrivals = arrivals or spec.arrivals
        performance = device.performance
        if capture_plan is not None:
            performance = PaddedModel(device.unpadded, capture_plan.padded)
        started = datetime.now()
        settings = SimulationSettings(
            policy=policy,
            kv_cache_tokens=device.kv_cache_tokens,
            max_model_len=device.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            decode_sms=config.decode_sms or None,
            prompt_order=config.prompt_order,
            capture_plan=capture_plan or device.capture_plan,
            host_overhead_ms=spec.host_overhead_ms,
            time_noise=spec.time_noise,
            seed=config.seed,
        )
        simulation = simulate(
            performance,
            self.workload,
            arrivals.times(self.workload),
            settings,
            slo=config.slo,
            max_concurrency=arrivals.max_concurrency,
            trace=trace,
            on_step=on_step,
            on_done=on_done,
        )
        result = simulation.replay.result(arrivals, started=started, backend=BACKEND, model_id=config.model)
        return PolicyRun(policy, result, simulation.stats)

    def open_trace(self, path: Path, policy: Policy, *, overwrite: bool) -> DecisionTrace:
        """Open a file for every decision of a run under this policy."""
        performance = self.device.performance
        header = TraceHeader(
            model=self.spec.config.model,
            device=f"{self.device.gpu}, simulated",
            num_sms=performance.num_sms,
            num_layers=performance.num_layers,
            policy=str(policy),
            slo=str(self.spec.config.slo),
            version=__version__,
        )
        return DecisionTrace.open(path, header=header, overwrite=overwrite)

    def title(self) -> str:
        """The simulation in a line."""
        config, gpu = self.spec.config, f"{self.device.gpu} (simulated, {self.device.times})"
        return f"{config.model} on {gpu}, {self.workload.name}, {config.slo}"

    def describe(self) -> dict[str, Any]:
        """The fields that all runs share, for a JSON file."""
        spec, config, device = self.spec, self.spec.config, self.device
        plan = device.capture_plan
        decode_sms = (config.decode_sms or device.performance.decode_sms) if plan is None else plan.decode_sms
        return {
            "gpu": device.gpu,
            "performance": device.times,
            "trace": self.workload.name,
            "seed": config.seed,
            "slo": str(config.slo),
            "version": __version__,
            "max_model_len": device.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "prompt_order": config.prompt_order,
            "kv_cache_tokens": device.kv_cache_tokens,
            "decode_sms": list(decode_sms),
            "capture_plan": config.capture_plan,
            "host_overhead_ms": spec.host_overhead_ms,
            "time_noise": spec.time_noise,
        }
