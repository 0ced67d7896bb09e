"""Runs of ``bullet-graph simulate``: one for each policy, or a search for each policy's goodput."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bullet_graph._version import __version__
from bullet_graph.cli.simulate.device import SimulatedDevice, open_device
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.output import EngineStats
from bullet_graph.engine.simulation import SimulationSettings, simulate
from bullet_graph.engine.trace import DecisionTrace, TraceHeader
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.models.progress import progress_bar
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.goodput_search import GoodputSearch
from bullet_graph.perf.performance import PaddedModel
from bullet_graph.perf.replay_metrics import ReplayResult, summarize_replay
from bullet_graph.runtime.simulated import StepRecord
from bullet_graph.workloads import Workload, load_workload
from bullet_graph.workloads.arrivals import arrival_times, trace_times

BACKEND = "bullet-graph simulate"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSpec:
    """What to simulate.

    Attributes:
        gpu: see :func:`~bullet_graph.cli.simulate.device.open_device`.
        config: of the engine; its policy is not used.
        policies: the policies to compare.
        trace: see :func:`~bullet_graph.workloads.load_workload`.
        num_prompts: first so many requests, or None for all.
        request_rate: requests a second, infinite for all at once, None for the trace's own times.
        time_scale: factor on the trace's own times.
        burstiness: of random arrivals.
        max_concurrency: most requests under way at once; None is no limit.
        host_overhead_ms: what a launch costs the host.
        time_noise: how far the device's times are from those predicted.
        attainment: share of requests that must meet all targets, in a search.
    """

    gpu: str
    config: EngineConfig
    policies: tuple[Policy, ...]
    trace: str
    num_prompts: int | None
    request_rate: float | None
    time_scale: float
    burstiness: float
    max_concurrency: int | None
    host_overhead_ms: float
    time_noise: float
    attainment: float


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One simulated run.

    Attributes:
        result: its figures.
        stats: the engine's counters at the end.
    """

    result: ReplayResult
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class RateSearch:
    """The rates tried in a search: results in order of rate, and the goodput (None: no rate served enough)."""

    goodput: float | None
    results: tuple[ReplayResult, ...]


class Simulator:
    """A workload, a device and an engine's settings, ready to run at any rate in any policy.

    Raises:
        BulletGraphError: for whatever is wrong with workload, model, table or settings.
    """

    def __init__(self, spec: SimulationSpec) -> None:
        self.spec = spec
        self.device: SimulatedDevice = open_device(spec.gpu, spec.config)
        folder = self.device.folder
        tokenizer = None if folder is None else Tokenizer.from_folder(folder)
        self.workload: Workload = load_workload(
            spec.trace,
            num_requests=spec.num_prompts,
            seed=spec.config.seed,
            tokenize=None if tokenizer is None else tokenizer.encode,
        )

    def run(
        self,
        policy: Policy,
        request_rate: float | None,
        *,
        trace: DecisionTrace | None = None,
        on_done: Callable[[object], object] = lambda _: None,
        on_step: Callable[[StepRecord], object] = lambda _: None,
        capture_plan: CapturePlan | None = None,
    ) -> PolicyRun:
        """Serve the workload once.

        Args:
            on_step: told of every launch that has finished.
            capture_plan: to follow in the place of the configuration's.
        """
        spec, config, device = self.spec, self.spec.config, self.device
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
        if request_rate is None:
            arrivals = trace_times(self.workload, scale=spec.time_scale)
        else:
            arrivals = arrival_times(
                len(self.workload.requests),
                request_rate=request_rate,
                burstiness=spec.burstiness,
                seed=config.seed,
            )
        simulation = simulate(
            performance,
            self.workload,
            arrivals,
            settings,
            slo=config.slo,
            max_concurrency=spec.max_concurrency,
            trace=trace,
            on_step=on_step,
            on_done=on_done,
        )
        result = summarize_replay(
            simulation.replay.served,
            duration_s=simulation.replay.duration_s,
            started=started,
            backend=BACKEND,
            model_id=config.model,
            request_rate=request_rate,
            burstiness=None if request_rate is None else spec.burstiness,
            max_concurrency=spec.max_concurrency,
        )
        return PolicyRun(result, simulation.stats)

    def compare(self, *, trace_file: Path | None, overwrite: bool, progress: bool) -> dict[str, PolicyRun]:
        """Run every policy at the rate asked for.

        Args:
            trace_file: write every decision here; for one policy only.
            overwrite: replace that file if it exists.
            progress: show a progress bar.
        """
        runs: dict[str, PolicyRun] = {}
        total = len(self.spec.policies) * len(self.workload.requests)
        with progress_bar(progress, total=total, unit="req") as advance:
            for policy in self.spec.policies:
                trace = None if trace_file is None else self._open_trace(trace_file, policy, overwrite)
                try:
                    runs[str(policy)] = self.run(
                        policy, self.spec.request_rate, trace=trace, on_done=lambda _: advance(1)
                    )
                finally:
                    if trace is not None:
                        trace.close()
        return runs

    def sweep(self, first_rate: float, *, progress: bool) -> dict[str, RateSearch]:
        """Find every policy's goodput."""
        searches: dict[str, RateSearch] = {}
        with progress_bar(progress, unit="run") as advance:
            for policy in self.spec.policies:
                search = GoodputSearch(first_rate=first_rate, attainment=self.spec.attainment)
                tried: dict[float, ReplayResult] = {}
                while (rate := search.next_rate()) is not None:
                    tried[rate] = self.run(policy, rate).result
                    search.record(rate, tried[rate].slo_attainment or 0.0)
                    advance(1)
                searches[str(policy)] = RateSearch(search.goodput, tuple(tried[key] for key in sorted(tried)))
        return searches

    def describe(self) -> dict[str, Any]:
        """What was simulated, for the result file."""
        spec, config, device = self.spec, self.spec.config, self.device
        return {
            "gpu": device.gpu,
            "performance": "measured table" if device.is_measured else "roofline",
            "trace": self.workload.name,
            "seed": config.seed,
            "slo": str(config.slo),
            "version": __version__,
            "max_model_len": device.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "prompt_order": config.prompt_order,
            "kv_cache_tokens": device.kv_cache_tokens,
            "decode_sms": list(
                (config.decode_sms or device.performance.decode_sms)
                if device.capture_plan is None
                else device.capture_plan.decode_sms
            ),
            "capture_plan": config.capture_plan,
            "host_overhead_ms": spec.host_overhead_ms,
            "time_noise": spec.time_noise,
        }

    def _open_trace(self, path: Path, policy: Policy, overwrite: bool) -> DecisionTrace:
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
