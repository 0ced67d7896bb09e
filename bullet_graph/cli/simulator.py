"""Serves a workload in virtual time, on a GPU that need not be there."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from bullet_graph._version import __version__
from bullet_graph.cli.tables import ReplayRun, counters
from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig, Policy
from bullet_graph.engine.simulation import HOST_OVERHEAD_MS, SimulationSettings, simulate
from bullet_graph.engine.trace import DecisionTrace, TraceHeader
from bullet_graph.errors import ConfigError, PerfTableError
from bullet_graph.graphs.capture_plan import CapturePlan, named_plan
from bullet_graph.hardware import KNOWN_GPUS, GpuSpec, gpu_spec
from bullet_graph.models.config import DTYPE_BYTES
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.performance import PaddedModel, PerformanceModel
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.roofline import Roofline, kv_cache_bytes_per_token
from bullet_graph.perf.table import gpu_nickname, load_table
from bullet_graph.runtime.memory import GIB, DeviceMemory, plan_memory
from bullet_graph.runtime.performance import table_model
from bullet_graph.runtime.simulated import StepRecord
from bullet_graph.workloads import Arrivals, load_workload

_ROOFLINE_PREFIX = "roofline:"
_RESERVED_BYTES = 5 * GIB // 2
"""Workspaces, libraries and graphs of an engine with 1,024 sequences on an H200, by its memory ledger."""


class Simulator:
    """A workload, a GPU and an engine's settings, ready to run at any rate under any policy.

    Args:
        gpu: a table file of ``bullet-graph profile`` (ending in .json), a GPU's name for a table that comes with the
            package, or ``roofline:`` and a name for an estimate.
        config: of the engine; its memory is divided as an engine would.
        trace: see :func:`~bullet_graph.workloads.load_workload`.
        num_prompts: its first N requests; None: all.
        arrivals: when the requests arrive.
        host_overhead_ms: host time per launch.
        time_noise: relative spread of the device's times around the prediction.

    Attributes:
        gpu: the GPU's name.
        times: where step times come from: ``measured table``, ``roofline``, or ``roofline of an unmeasured GPU``.
        performance: predicts step times, batches padded as the engine's CUDA graphs pad them.
        unpadded: the same without padding.
        dtype: of weights and KV cache.

    Raises:
        BulletGraphError: errors in workload, model, table or settings.
    """

    gpu: str
    times: str
    performance: PerformanceModel
    unpadded: PerformanceModel

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
        self.model, folder = resolve_model(config.model)
        self.dtype = "bfloat16" if self.model.dtype == "float32" else self.model.dtype
        limit = self.model.max_position_embeddings
        self.max_model_len = config.max_model_len or limit
        if self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={self.max_model_len} is more than the model's own limit of {limit} positions: lower it"
            )
        if gpu.startswith(_ROOFLINE_PREFIX):
            spec = _known_gpu(gpu.removeprefix(_ROOFLINE_PREFIX))
            self.gpu, memory_bytes = spec.name, spec.memory_bytes
            self.times = "roofline" if spec.is_measured else "roofline of an unmeasured GPU"
            self.unpadded = Roofline(spec, self.model, dtype_bytes=DTYPE_BYTES[self.dtype])
            self.performance = self.unpadded
        else:
            table = load_table(gpu, model=config.model, dtype=self.dtype)
            if table.key.dtype != self.dtype:
                raise PerfTableError(
                    f"the table {gpu} was measured in {table.key.dtype}, but {config.model} runs in {self.dtype}: "
                    "measure one in this dtype with `bullet-graph profile`"
                )
            self.gpu, self.times = table.key.gpu, "measured table"
            known_bytes = gpu_spec(self.gpu, table.key.num_sms).memory_bytes
            memory_bytes = table.provenance.get("device_memory_bytes", known_bytes)
            self.unpadded = TableModel(table, self.model)
            self.performance = table_model(table, config.max_num_seqs, self.model)
        self.kv_cache_tokens = self._kv_cache_tokens(memory_bytes)
        self.capture_plan = named_plan(config, dtype=self.dtype, num_sms=self.unpadded.num_sms)
        if self.capture_plan is not None:
            self.performance = PaddedModel(self.unpadded, self.capture_plan.padded)
        tokenizer = None if folder is None else Tokenizer.from_folder(folder)
        tokenize = None if tokenizer is None else tokenizer.encode
        self.workload = load_workload(trace, num_requests=num_prompts, seed=config.seed, tokenize=tokenize)

    def _kv_cache_tokens(self, memory_bytes: int | None) -> int:
        config, dtype_bytes = self.config, DTYPE_BYTES[self.dtype]
        if memory_bytes is None:
            if config.kv_cache_bytes is None:
                raise ConfigError(
                    f"the memory of {self.gpu} is not known: give the KV cache's size with --kv-cache-bytes"
                )
            block_bytes = KV_BLOCK_TOKENS * kv_cache_bytes_per_token(self.model, dtype_bytes=dtype_bytes)
            return max(config.kv_cache_bytes // block_bytes - 1, 0) * KV_BLOCK_TOKENS
        return plan_memory(
            config,
            self.model,
            dtype_bytes=dtype_bytes,
            max_model_len=self.max_model_len,
            device=DeviceMemory(memory_bytes, memory_bytes),
            workspaces_bytes=_RESERVED_BYTES,
            graphs_bytes=0,
        ).kv_cache_tokens

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
        config = self.config
        arrivals = arrivals or self.arrivals
        performance = self.performance
        if capture_plan is not None:
            performance = PaddedModel(self.unpadded, capture_plan.padded)
        started = datetime.now()
        settings = SimulationSettings(
            policy=policy,
            kv_cache_tokens=self.kv_cache_tokens,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            decode_sms=config.decode_sms or None,
            prompt_order=config.prompt_order,
            capture_plan=capture_plan or self.capture_plan,
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
        performance = self.performance
        header = TraceHeader(
            model=self.config.model,
            device=f"{self.gpu}, simulated",
            num_sms=performance.num_sms,
            num_layers=performance.num_layers,
            policy=str(policy),
            slo=str(self.config.slo),
            version=__version__,
        )
        return DecisionTrace.open(path, header=header, overwrite=overwrite)

    def title(self) -> str:
        """The simulation in a line."""
        config, gpu = self.config, f"{self.gpu} (simulated, {self.times})"
        return f"{config.model} on {gpu}, {self.workload.name}, {config.slo}"

    def describe(self) -> dict[str, Any]:
        """The fields that all runs share, for a JSON file."""
        config, plan = self.config, self.capture_plan
        decode_sms = (config.decode_sms or self.performance.decode_sms) if plan is None else plan.decode_sms
        own = ("seed", "max_num_seqs", "max_num_batched_tokens", "prompt_order", "capture_plan")
        return {
            "gpu": self.gpu,
            "performance": self.times,
            "trace": self.workload.name,
            "slo": str(config.slo),
            "version": __version__,
            "max_model_len": self.max_model_len,
            "kv_cache_tokens": self.kv_cache_tokens,
            "decode_sms": list(decode_sms),
            **{name: getattr(config, name) for name in own},
            **self._spread,
        }


def _known_gpu(name: str) -> GpuSpec:
    for known, spec in KNOWN_GPUS.items():
        if gpu_nickname(known) == gpu_nickname(name):
            return spec
    raise ConfigError(
        f"there is no estimate for the GPU {name!r}: use {_ROOFLINE_PREFIX}NAME with NAME one of "
        f"{', '.join(map(gpu_nickname, KNOWN_GPUS))}"
    )
