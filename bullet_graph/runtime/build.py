"""Resolves a configuration against the machine and builds the executor it asks for."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig
from bullet_graph.errors import ConfigError, DeviceError, UnsupportedModelError
from bullet_graph.graphs.report import CaptureReport
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.kv_cache import KVCache
from bullet_graph.models.loader import dummy_weights, load_weights
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.rope import cos_sin_table
from bullet_graph.models.weights import ModelWeights
from bullet_graph.partition.backend import open_backend
from bullet_graph.partition.spec import SmPartition, partition_of
from bullet_graph.runtime.cpu import CpuExecutor
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.launcher import Launcher
from bullet_graph.runtime.memory import DeviceMemory, MemoryLedger, plan_memory

FLASHINFER_RELEASE = "0.6.12"
"""The release whose compiled modules ``models.flashinfer_attention`` calls; pyproject.toml pins the same."""

GPU_HEAD_DIMS = (64, 128, 256)
"""Head sizes that FlashInfer's fa2 and fa3 kernels are written for."""

CPU_KV_CACHE_BYTES = 1024**3
"""The KV cache's size on the CPU unless ``kv_cache_bytes`` says otherwise: host memory is not ours to fill."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Runtime:
    """What an engine runs on.

    Attributes:
        model: the model's shape.
        folder: where its files are; None for a preset.
        device: where it runs.
        dtype: of weights, activations and cache.
        max_model_len: resolved limit, in tokens.
    """

    model: ModelConfig
    folder: Path | None
    device: torch.device
    dtype: torch.dtype
    max_model_len: int


def resolve(config: EngineConfig) -> Runtime:
    """Find model and device, and settle what the configuration leaves open.

    Raises:
        ModelError: the model cannot be found or used.
        DeviceError: a GPU was asked for where there is none.
        ConfigError: settings that contradict the model.
    """
    model, folder = resolve_model(config.model)
    if config.load_format == "safetensors" and folder is None:
        raise ConfigError(
            f"load_format=safetensors needs a model folder, but {config.model!r} is a preset of shapes only: "
            "use load_format=dummy, or give a folder"
        )
    device = _resolve_device(config)
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
    elif device.type == "cpu":
        dtype = torch.float32
    else:
        dtype = torch.bfloat16 if model.dtype is torch.float32 else model.dtype
    if device.type == "cuda" and dtype is torch.float32:
        raise ConfigError("the GPU path computes in bfloat16 or float16, not float32: pass dtype=bfloat16")
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the model's own limit of {limit} positions"
        )
    return Runtime(model, folder, device, dtype, config.max_model_len or limit)


def _resolve_device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise DeviceError(
            f"device=cuda was asked for, but torch {torch.__version__} sees no CUDA device: "
            "check `nvidia-smi` and that torch is a CUDA build, or pass device=cpu"
        )
    return torch.device("cuda" if config.device != "cpu" and available else "cpu")


@dataclass(frozen=True, slots=True)
class BuiltRuntime:
    """An executor, and what its start showed.

    Attributes:
        executor: ready for steps.
        memory: the ledger it was built by.
        partition_backend: which back end confines the lanes and why; None on the CPU.
        capture: what capturing decode graphs cost; None where none were.
    """

    executor: Executor
    memory: MemoryLedger
    partition_backend: str | None = None
    capture: CaptureReport | None = None


def build_executor(
    config: EngineConfig,
    runtime: Runtime,
    *,
    progress: bool,
    on_ledger: Callable[[MemoryLedger], None],
) -> BuiltRuntime:
    """Plan the memory, then load the weights and build the executor.

    Args:
        progress: show progress bars.
        on_ledger: told the ledger before anything is allocated.

    Raises:
        InsufficientMemoryError: the ledger does not fit.
        CheckpointError: the weights cannot be read.
        DeviceError: a library that the GPU path needs is missing.
        PartitionError: the SM partitions asked for cannot be had, or do not hold.
    """
    ledger = plan_ledger(config, runtime)
    on_ledger(ledger)
    build = _build_cpu if runtime.device.type == "cpu" else _build_cuda
    return build(config, runtime, ledger, progress)


def plan_ledger(config: EngineConfig, runtime: Runtime) -> MemoryLedger:
    """Divide the device's memory as an engine would; nothing is allocated.

    Raises:
        InsufficientMemoryError: it does not fit.
        ConfigError: SM partitions were asked for on the CPU.
        DeviceError: a library that the GPU path needs is missing.
        UnsupportedModelError: the GPU path has no kernels for the model.
        PartitionError: a partition's size is odd.
    """
    if runtime.device.type == "cpu":
        if config.decode_sms or config.partition_backend not in ("auto", "none"):
            raise ConfigError(
                "SM partitions need a GPU, but the device is the CPU: leave out decode_sms and partition_backend"
            )
        host = psutil.virtual_memory()
        device, workspaces, graphs, limit = DeviceMemory(host.total, host.available), 0, 0, CPU_KV_CACHE_BYTES
    else:
        _require_cuda_libraries()
        # Imported here because it needs triton and flashinfer, which a machine without a GPU does not have.
        from bullet_graph.runtime.cuda import CudaExecutor  # noqa: PLC0415

        if runtime.model.head_dim not in GPU_HEAD_DIMS:
            raise UnsupportedModelError(
                f"the GPU's attention kernels need heads of {', '.join(map(str, GPU_HEAD_DIMS))}, the model's have "
                f"{runtime.model.head_dim}: pass device=cpu"
            )
        num_partitions = len(_partitions(config, runtime.device)) if config.cuda_graphs else 0
        free, total = torch.cuda.mem_get_info(runtime.device)
        device, limit = DeviceMemory(total, free), None
        workspaces = CudaExecutor.workspace_bytes(runtime.model, config.max_num_seqs)
        graphs = CudaExecutor.graph_bytes(config.max_num_seqs, num_partitions)
    return plan_memory(
        config,
        runtime.model,
        dtype=runtime.dtype,
        max_model_len=runtime.max_model_len,
        device=device,
        workspaces_bytes=workspaces,
        graphs_bytes=graphs,
        kv_cache_limit_bytes=limit,
    )


def _build_cpu(config: EngineConfig, runtime: Runtime, ledger: MemoryLedger, progress: bool) -> BuiltRuntime:
    executor = CpuExecutor(_decoder(config, runtime, ledger, progress), max_num_seqs=config.max_num_seqs)
    return BuiltRuntime(executor, ledger)


def _build_cuda(config: EngineConfig, runtime: Runtime, ledger: MemoryLedger, progress: bool) -> BuiltRuntime:
    # Imported here because it needs triton and flashinfer, which a machine without a GPU does not have.
    from bullet_graph.runtime.cuda import CudaExecutor  # noqa: PLC0415

    partitions = _partitions(config, runtime.device)
    # Before the weights: a partition that does not hold should not cost their loading.
    backend, why = open_backend(config.partition_backend, partitions, device=torch.cuda.current_device())
    executor = CudaExecutor(
        _decoder(config, runtime, ledger, progress),
        max_num_seqs=config.max_num_seqs,
        max_rows=config.chunk_tokens + config.max_num_seqs,
        num_kv_blocks=ledger.num_kv_blocks,
        launcher=Launcher(backend, runtime.device),
        partitions=partitions if config.cuda_graphs else (),
        progress=progress,
    )
    return BuiltRuntime(executor, ledger, why, executor.capture)


def _partitions(config: EngineConfig, device: torch.device) -> tuple[SmPartition, ...]:
    """The whole GPU, and a partition for each size of the decode lane that is wanted."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    sizes = (None, *sorted(set(config.decode_sms)))
    return tuple(partition_of(size, num_sms=num_sms) for size in sizes)


def _require_cuda_libraries() -> None:
    """Check for the libraries of the ``cuda`` extra; FlashInfer's internals are called, so its release counts."""
    missing = [name for name in ("triton", "flashinfer") if find_spec(name) is None]
    if missing:
        raise DeviceError(
            f"the GPU path needs {' and '.join(missing)}, not installed here: "
            "pip install 'bullet-graph[cuda]', or pass device=cpu"
        )
    found = version("flashinfer-python")
    if found != FLASHINFER_RELEASE:
        raise DeviceError(
            f"the GPU path needs flashinfer-python {FLASHINFER_RELEASE}, found {found}: "
            f"pip install flashinfer-python=={FLASHINFER_RELEASE}"
        )


def _decoder(config: EngineConfig, runtime: Runtime, ledger: MemoryLedger, progress: bool) -> Decoder:
    cache = KVCache(
        runtime.model,
        num_blocks=ledger.num_kv_blocks,
        block_tokens=KV_BLOCK_TOKENS,
        dtype=runtime.dtype,
        device=runtime.device,
    )
    weights = _weights(config, runtime, progress)
    return Decoder(
        runtime.model, weights, cache, cos_sin_table(runtime.model, runtime.max_model_len, runtime.device)
    )


def _weights(config: EngineConfig, runtime: Runtime, progress: bool) -> ModelWeights:
    if runtime.folder is None or config.load_format == "dummy":
        return dummy_weights(runtime.model, dtype=runtime.dtype, device=runtime.device, seed=config.seed)
    return load_weights(
        runtime.folder, runtime.model, dtype=runtime.dtype, device=runtime.device, progress=progress
    )
