"""What a simulation needs of a GPU that is not there: the performance model, and room for the KV cache."""

from dataclasses import dataclass
from pathlib import Path

from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig
from bullet_graph.errors import ConfigError, PerfTableError
from bullet_graph.graphs.capture_plan import CapturePlan, load_plan
from bullet_graph.hardware import KNOWN_GPUS, gpu_spec
from bullet_graph.models.config import DTYPE_BYTES, ModelConfig
from bullet_graph.models.presets import resolve_model
from bullet_graph.perf.performance import PaddedModel, PerformanceModel
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.roofline import Roofline, kv_cache_bytes_per_token
from bullet_graph.perf.table import gpu_nickname, load_table
from bullet_graph.runtime.capture_plan import check_plan
from bullet_graph.runtime.memory import GIB, DeviceMemory, plan_memory
from bullet_graph.runtime.performance import table_model

ROOFLINE_PREFIX = "roofline:"
"""Before a GPU's name: an estimate by arithmetic, with nothing measured."""

_RESERVED_BYTES = 5 * GIB // 2
"""Workspaces, libraries and graphs of an engine with 1,024 sequences on an H200, as its ledger told."""


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A GPU and a model on it.

    Attributes:
        gpu: the GPU's name.
        model: the model.
        times: where step times come from: ``measured table``, ``roofline``, or ``roofline of an unmeasured GPU``.
        performance: predicts them, batches padded as the engine's graphs pad them.
        unpadded: the same without padding.
        capture_plan: the plan that the configuration names, or None.
        dtype: of weights and KV cache.
        max_model_len: most tokens of a prompt and its output together.
        kv_cache_tokens: tokens that the KV cache holds.
        folder: the model's folder; None for a preset.
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
    if gpu.startswith(ROOFLINE_PREFIX):
        name = _known_gpu(gpu.removeprefix(ROOFLINE_PREFIX))
        spec = KNOWN_GPUS[name]
        times = "roofline" if spec.is_measured else "roofline of an unmeasured GPU"
        memory_bytes = spec.memory_bytes
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
        name,
        model,
        times=times,
        performance=performance,
        unpadded=unpadded,
        capture_plan=plan,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_tokens=tokens,
        folder=folder,
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
    ledger = plan_memory(
        config,
        model,
        dtype_bytes=dtype_bytes,
        max_model_len=max_model_len,
        device=DeviceMemory(memory_bytes, memory_bytes),
        workspaces_bytes=_RESERVED_BYTES,
        graphs_bytes=0,
    )
    return ledger.kv_cache_tokens


def _known_gpu(name: str) -> str:
    for known in KNOWN_GPUS:
        if gpu_nickname(known) == gpu_nickname(name):
            return known
    raise ConfigError(
        f"there is no estimate for the GPU {name!r}: use {ROOFLINE_PREFIX}NAME with NAME one of "
        f"{', '.join(map(gpu_nickname, KNOWN_GPUS))}"
    )
