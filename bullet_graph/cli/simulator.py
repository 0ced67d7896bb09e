"""Serves a workload in virtual time, on a GPU that need not be there."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bullet_graph._version import __version__
from bullet_graph.cli.tables import ReplayRun, counters
from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig, Policy
from bullet_graph.engine.simulation import HOST_OVERHEAD_MS, SimulationSettings, simulate
from bullet_graph.engine.trace import DecisionTrace, TraceHeader
from bullet_graph.errors import ConfigError, PerfTableError
from bullet_graph.graphs.capture_plan import CapturePlan, load_plan
from bullet_graph.hardware import KNOWN_GPUS, gpu_spec
from bullet_graph.models.config import DTYPE_BYTES, ModelConfig
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.performance import PaddedModel, PerformanceModel
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.roofline import Roofline, kv_cache_bytes_per_token
from bullet_graph.perf.table import gpu_nickname, load_table
from bullet_graph.runtime.capture_plan import check_plan
from bullet_graph.runtime.memory import GIB, DeviceMemory, plan_memory
from bullet_graph.runtime.performance import table_model
from bullet_graph.runtime.simulated import StepRecord
from bullet_graph.workloads import Arrivals, load_workload

_ROOFLINE_PREFIX = "roofline:"
_RESERVED_BYTES = 5 * GIB // 2
"""Workspaces, libraries and graphs of an engine with 1,024 sequences on an H200, by its memory ledger."""


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A GPU and a model on it.

    Attributes:
        times: where step times come from: ``measured table``, ``roofline``, or ``roofline of an unmeasured GPU``.
        performance: predicts them, batches padded as the engine's CUDA graphs pad them.
        unpadded: the same without padding.
        capture_plan: the configuration's, or None.
        dtype: of weights and KV cache.
        folder: of the model; None for a preset.
    """

    gpu: str
    model: ModelConfig
    times: str
    performance: PerformanceModel
    unpadded: PerformanceModel
    capture_plan: CapturePlan | None
    dtype: str
    max_model_len: int
    kv_cache_tokens: int
    folder: Path | None


class Simulator:
    """A workload, a device and an engine's settings, ready to run at any rate under any policy.

    Args:
        gpu: see :func:`open_device`.
        config: of the engine.
        trace: see :func:`~bullet_graph.workloads.load_workload`.
        num_prompts: its first N requests; None: all.
        arrivals: when the requests arrive.
        host_overhead_ms: host time per launch.
        time_noise: relative spread of the device's times around the prediction.

    Raises:
        BulletGraphError: errors in workload, model, table or settings.
    """

    def __init__(
        self,
        *,
        gpu: str,
        config: EngineConfig,
        trace: str,
        num_prompts: int | None,
        arrivals: Arrivals,
        host_overhead_ms: float = HOST_OVERHEAD_MS,
        time_noise: float = 0.0,
    ) -> None:
        self.config = config
        self.arrivals = arrivals
        self._spread = {"host_overhead_ms": host_overhead_ms, "time_noise": time_noise}
        self.device = open_device(gpu, config)
        folder = self.device.folder
        tokenizer = None if folder is None else Tokenizer.from_folder(folder)
        tokenize = None if tokenizer is None else tokenizer.encode
        self.workload = load_workload(trace, num_requests=num_prompts, seed=config.seed, tokenize=tokenize)

    def run(
        self,
        policy: Policy,
        arrivals: Arrivals | None = None,
        *,
        trace: DecisionTrace | None = None,
        on_done: Callable[[object], object] = lambda _: None,
        on_step: Callable[[StepRecord], object] = lambda _: None,
        capture_plan: CapturePlan | None = None,
    ) -> ReplayRun:
        """Serve the workload once.

        Args:
            policy: how prefill and decode share the device.
            arrivals: other than the simulator's.
            trace: records every decision.
            on_done: called with each request's outcome.
            on_step: called with every finished launch.
            capture_plan: other than the configuration's.
        """
        config, device = self.config, self.device
        arrivals = arrivals or self.arrivals
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
            seed=config.seed,
            **self._spread,
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
        result = simulation.replay.result(
            arrivals, started=started, backend="bullet-graph simulate", model_id=config.model
        )
        return ReplayRun(result, counters(simulation.stats) | {"policy": str(policy)})

    def open_trace(self, path: Path, policy: Policy, *, overwrite: bool) -> DecisionTrace:
        """Open a file for every decision of a run under this policy."""
        performance = self.device.performance
        header = TraceHeader(
            model=self.config.model,
            device=f"{self.device.gpu}, simulated",
            num_sms=performance.num_sms,
            num_layers=performance.num_layers,
            policy=str(policy),
            slo=str(self.config.slo),
            version=__version__,
        )
        return DecisionTrace.open(path, header=header, overwrite=overwrite)

    def title(self) -> str:
        """The simulation in a line."""
        config, gpu = self.config, f"{self.device.gpu} (simulated, {self.device.times})"
        return f"{config.model} on {gpu}, {self.workload.name}, {config.slo}"

    def describe(self) -> dict[str, Any]:
        """The fields that all runs share, for a JSON file."""
        config, device, plan = self.config, self.device, self.device.capture_plan
        decode_sms = (config.decode_sms or device.performance.decode_sms) if plan is None else plan.decode_sms
        own = ("seed", "max_num_seqs", "max_num_batched_tokens", "prompt_order", "capture_plan")
        return {
            "gpu": device.gpu,
            "performance": device.times,
            "trace": self.workload.name,
            "slo": str(config.slo),
            "version": __version__,
            "max_model_len": device.max_model_len,
            "kv_cache_tokens": device.kv_cache_tokens,
            "decode_sms": list(decode_sms),
            **{name: getattr(config, name) for name in own},
            **self._spread,
        }


def open_device(gpu: str, config: EngineConfig) -> SimulatedDevice:
    """Find the model and the GPU's times for it, and divide its memory as an engine would.

    Args:
        gpu: a table file of ``bullet-graph profile`` (ending in .json), a GPU's name for a table that comes with the
            package, or ``roofline:`` and a name for an estimate.
        config: of the engine.

    Raises:
        ModelError: the model cannot be found or used.
        PerfTableError: there is no such table, or it is of another model or dtype.
        ConfigError: a GPU that is not known, or settings that contradict the model.
        InsufficientMemoryError: model and cache do not fit the GPU.
    """
    model, folder = resolve_model(config.model)
    dtype = "bfloat16" if model.dtype == "float32" else model.dtype
    limit = model.max_position_embeddings
    max_model_len = config.max_model_len or limit
    if max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the model's own limit of {limit} positions: lower it"
        )
    performance: PerformanceModel
    unpadded: PerformanceModel
    if gpu.startswith(_ROOFLINE_PREFIX):
        spec = KNOWN_GPUS[_known_gpu(gpu.removeprefix(_ROOFLINE_PREFIX))]
        name, memory_bytes = spec.name, spec.memory_bytes
        times = "roofline" if spec.is_measured else "roofline of an unmeasured GPU"
        performance = unpadded = Roofline(spec, model, dtype_bytes=DTYPE_BYTES[dtype])
    else:
        table = load_table(gpu, model=config.model, dtype=dtype)
        name, times = table.key.gpu, "measured table"
        if table.key.dtype != dtype:
            raise PerfTableError(
                f"the table {gpu} was measured in {table.key.dtype}, but {config.model} runs in {dtype}: "
                "measure one in this dtype with `bullet-graph profile`"
            )
        memory_bytes = table.provenance.get(
            "device_memory_bytes", gpu_spec(name, table.key.num_sms).memory_bytes
        )
        performance, unpadded = table_model(table, config.max_num_seqs, model), TableModel(table, model)
    tokens = _kv_cache_tokens(config, model, DTYPE_BYTES[dtype], max_model_len, name, memory_bytes)
    plan = None
    if config.capture_plan is not None:
        plan = load_plan(config.capture_plan)
        check_plan(plan, config, name=config.capture_plan, dtype=dtype, num_sms=unpadded.num_sms)
        performance = PaddedModel(unpadded, plan.padded)
    return SimulatedDevice(
        name, model, times, performance, unpadded, plan, dtype, max_model_len, tokens, folder
    )


def _kv_cache_tokens(
    config: EngineConfig,
    model: ModelConfig,
    dtype_bytes: int,
    max_model_len: int,
    gpu: str,
    memory_bytes: int | None,
) -> int:
    if memory_bytes is None:
        if config.kv_cache_bytes is None:
            raise ConfigError(
                f"the memory of {gpu} is not known: give the KV cache's size with --kv-cache-bytes"
            )
        block_bytes = KV_BLOCK_TOKENS * kv_cache_bytes_per_token(model, dtype_bytes=dtype_bytes)
        return max(config.kv_cache_bytes // block_bytes - 1, 0) * KV_BLOCK_TOKENS
    return plan_memory(
        config,
        model,
        dtype_bytes=dtype_bytes,
        max_model_len=max_model_len,
        device=DeviceMemory(memory_bytes, memory_bytes),
        workspaces_bytes=_RESERVED_BYTES,
        graphs_bytes=0,
    ).kv_cache_tokens


def _known_gpu(name: str) -> str:
    for known in KNOWN_GPUS:
        if gpu_nickname(known) == gpu_nickname(name):
            return known
    raise ConfigError(
        f"there is no estimate for the GPU {name!r}: use {_ROOFLINE_PREFIX}NAME with NAME one of "
        f"{', '.join(map(gpu_nickname, KNOWN_GPUS))}"
    )
