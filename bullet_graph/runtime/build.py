"""Plans the memory of a resolved configuration and builds its executor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import psutil
import torch

from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig
from bullet_graph.errors import ConfigError
from bullet_graph.graphs.capture_plan import CapturePlan, CaptureReport, default_plan, named_plan
from bullet_graph.graphs.compile_counts import CompileCounts
from bullet_graph.graphs.compiled import CompiledPart, LayerPart
from bullet_graph.graphs.key import batch_size_buckets
from bullet_graph.kernels.communicator import Communicators
from bullet_graph.kernels.memory import KVCache
from bullet_graph.models.checkpoint import WeightLoading, open_checkpoint
from bullet_graph.models.decoder import Decoder, cos_sin_tables
from bullet_graph.models.hub import download
from bullet_graph.models.layers import LayerFunctions
from bullet_graph.models.progress import progress_bar
from bullet_graph.models.weights import fill_dummy, zero_weights
from bullet_graph.partition.backend import open_backend
from bullet_graph.partition.masks import LANES, WHOLE_GPU, Lane, SmPartition, lane_sms, partition_of
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime import capture_cache
from bullet_graph.runtime.cpu import CpuExecutor, compiled_for_cpu
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.memory import DeviceMemory, MemoryLedger, graphs_bytes, plan_memory, workspace_bytes
from bullet_graph.runtime.performance import find_performance
from bullet_graph.runtime.resolve import Runtime, check_device
from bullet_graph.runtime.self_check import SelfCheck, reference_logits

CPU_KV_CACHE_BYTES = 1024**3
"""Size of the KV cache on the CPU unless ``kv_cache_bytes`` is set; host memory is left to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a start is given besides its configuration; ``on_ledger`` is called before anything is allocated.

    A build of a capture cache brings its own ``captured``; without, the configured cache is opened. Of a rank of tensor
    parallelism, ``agree`` gives the ledger that all ranks can hold, from the rank's own.
    """

    clock: StartClock = field(default_factory=StartClock)
    progress: bool = False
    on_ledger: Callable[[MemoryLedger], object] | None = None
    captured: capture_cache.CapturedStart | None = None
    agree: Callable[[MemoryLedger], MemoryLedger] = lambda ledger: ledger
    communicators: Communicators = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuiltRuntime:
    """An executor, and the findings of its start; None for what it does not need, or does not have on the CPU.

    ``partition_backend`` is the back end that confines the lanes, and why.
    """

    executor: Executor
    memory: MemoryLedger
    performance: PerformanceModel | None = None
    partition_backend: str | None = None
    capture: CaptureReport | None = None
    lane_sms: Mapping[tuple[Lane, SmPartition], frozenset[int]] = field(default_factory=dict)
    compiles: CompileCounts = field(default_factory=CompileCounts)
    cache_use: capture_cache.CacheUse = field(default_factory=capture_cache.CacheUse)
    self_check: SelfCheck | None = None


def build_executor(config: EngineConfig, runtime: Runtime, start: Start) -> BuiltRuntime:
    """Plan the memory, then load the weights and, meanwhile, build the executor.

    Raises as :func:`check_device`, :func:`find_performance` and :func:`plan_memory` do; CheckpointError where the
    weights cannot be read; PartitionError where the SM partitions cannot be made, or do not hold.
    """
    if config.tensor_parallel_size != runtime.model.num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} is for engines, and this is for one rank: leave it out"
        )
    with start.clock.phase("device"):
        check_device(config, runtime)
        cached_table = partial(capture_cache.cached_perf_table, capture_cache.configured_store(config), runtime)
        performance = find_performance(config, runtime, cached_table=cached_table)
        ledger = start.agree(plan_ledger(config, runtime, performance))
    if start.on_ledger is not None:
        start.on_ledger(ledger)
    plan = entry_plan(config, runtime, performance)
    build = partial(_build_cpu if runtime.device.type == "cpu" else _build_cuda, config, runtime, performance, ledger)
    built, compiles, cache_use = capture_cache.start_with_captures(config, runtime, plan, partial(build, start), start)
    return replace(built, compiles=compiles, cache_use=cache_use, self_check=None)


def entry_plan(config: EngineConfig, runtime: Runtime, performance: PerformanceModel | None) -> dict[str, Any]:
    """What this engine's entry in a capture cache is named by, besides machine and model; raises ConfigError."""
    if runtime.device.type == "cpu":
        return {"model": config.model_name, "dtype": runtime.dtype_name, "compiled_rows": config.max_forward_rows}
    plan = asdict(capture_plan_of(config, runtime, performance))
    # Without graphs nothing is compiled for them.
    return plan if config.cuda_graphs else plan | {"cuda_graphs": False}


def plan_ledger(config: EngineConfig, runtime: Runtime, performance: PerformanceModel | None = None) -> MemoryLedger:
    """Divide the device's memory as an engine would, without allocating anything; raises as :func:`build_executor`.

    ``performance`` is the model whose partitions the policy may choose from; None where it chooses none.
    """
    check_device(config, runtime)
    workspaces = graphs = 0
    if runtime.device.type == "cpu":
        host = psutil.virtual_memory()
        device, limit = DeviceMemory(host.total, host.available), CPU_KV_CACHE_BYTES // runtime.model.num_ranks
    else:
        free, total = torch.cuda.mem_get_info(runtime.device)
        device, limit = DeviceMemory(total, free), None
        workspaces = workspace_bytes(runtime.model)
        if config.cuda_graphs:
            plan = capture_plan_of(config, runtime, performance)
            graphs = graphs_bytes(plan, runtime.model, dtype_bytes=runtime.dtype.itemsize)
    return plan_memory(
        config,
        runtime.model,
        dtype_bytes=runtime.dtype.itemsize,
        max_model_len=runtime.max_model_len,
        device=device,
        workspaces_bytes=workspaces,
        graphs_bytes=graphs,
        kv_cache_limit_bytes=limit,
    )


def capture_plan_of(config: EngineConfig, runtime: Runtime, performance: PerformanceModel | None = None) -> CapturePlan:
    """What an engine on a GPU captures: the plan it names, or all buckets for the partitions it may use.

    Raises ConfigError where the plan cannot be read or is another engine's, PartitionError where a size is odd.
    """
    dtype, num_sms = runtime.dtype_name, runtime.gpu.num_sms
    if (plan := named_plan(config, dtype=dtype, num_sms=num_sms)) is not None:
        return plan
    decode_sms = [sms for p in partitions_of(config, runtime, performance) if (sms := lane_sms(p)) is not None]
    return default_plan(config, dtype=dtype, num_sms=num_sms, shape=runtime.model, decode_sms=decode_sms)


@contextmanager
def decoder_while_loading(
    config: EngineConfig, runtime: Runtime, ledger: MemoryLedger, start: Start
) -> Iterator[tuple[Decoder, Callable[[], None]]]:
    """Allocate weights and KV cache on the runtime's device; a thread fills the weights during the block.

    Yields the decoder, and a function that waits for its weights and raises any error of their loading. Raises
    CheckpointError, before anything is allocated, where the files' headers show that the weights cannot be read.
    """
    with ExitStack() as stack:
        checkpoint = None
        if runtime.folder is not None and config.load_format != "dummy":
            folder = runtime.folder
            if runtime.hub_id is not None:
                with start.clock.phase("weights"):
                    folder = download(runtime.hub_id, folder.name, weights=True)
            checkpoint = stack.enter_context(open_checkpoint(folder, runtime.model))
        with start.clock.phase("allocation"):
            dtype, device, blocks = runtime.dtype, runtime.device, ledger.num_kv_blocks
            cache = KVCache(runtime.model, num_blocks=blocks, block_tokens=KV_BLOCK_TOKENS, dtype=dtype, device=device)
            weights = zero_weights(runtime.model, dtype=dtype, device=device)
            cos_sin = cos_sin_tables(runtime.model, runtime.max_model_len, device)
            decoder = Decoder(runtime.model, weights, cache, cos_sin)
        if checkpoint is None:
            loading = WeightLoading(
                weights, fill_dummy(runtime.model, weights, seed=config.seed, zipf_exponent=config.zipf_exponent)
            )
        else:
            total = checkpoint.num_bytes
            bar = progress_bar(start.progress, total=total, desc="Loading weights", unit="B", unit_scale=True)
            loading = WeightLoading(weights, checkpoint.fill(weights), stack.enter_context(bar))
        stack.enter_context(loading)

        def join_weights() -> None:
            loading.join()
            if loading.ended_s is not None:
                start.clock.add("weights", loading.started_s, loading.ended_s)

        yield decoder, join_weights


def _build_cpu(
    config: EngineConfig,
    runtime: Runtime,
    performance: PerformanceModel | None,
    ledger: MemoryLedger,
    start: Start,
    captured: capture_cache.CapturedStart,
) -> BuiltRuntime:
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    communicators = start.communicators
    with decoder_while_loading(config, runtime, ledger, start) as (decoder, join_weights):
        functions: dict[Lane, LayerFunctions] = {}
        if config.compile:
            made: dict[str, CompiledPart] = {}

            def compiled_once(part: LayerPart) -> CompiledPart:
                made[part.name] = made.get(part.name) or captured.compiler(part)
                return made[part.name]

            with start.clock.phase("kernels"):
                for lane in LANES:
                    functions[lane] = compiled_for_cpu(
                        decoder, config.max_forward_rows, compiled_once, communicators.get(lane)
                    )
        executor = CpuExecutor(
            decoder, max_num_seqs=config.max_num_seqs, functions=functions or None, communicators=communicators
        )
        join_weights()
    check = None
    if functions:
        # Of one row, nothing is compiled.
        sizes = batch_size_buckets(config.max_num_seqs)[1:] or (2,)
        check = SelfCheck(
            decoder, partial(reference_logits, decoder, functions["decode"]), sizes, communicators.get("decode")
        )
    return BuiltRuntime(executor, ledger, performance, self_check=check)


def _build_cuda(
    config: EngineConfig,
    runtime: Runtime,
    performance: PerformanceModel | None,
    ledger: MemoryLedger,
    start: Start,
    captured: capture_cache.CapturedStart,
) -> BuiltRuntime:
    clock, communicators = start.clock, start.communicators
    plan = capture_plan_of(config, runtime, performance)
    # Before the weights are loaded: a partition that does not hold should fail early, and the proof needs an idle GPU.
    with clock.phase("partitions"):
        backend, why = open_backend(config.partition_backend, tuple(plan.batch_sizes), device=runtime.device.index)
    with ExitStack() as undo, capture_cache.triton_hashed_meanwhile():
        undo.callback(backend.close)
        decoder, join_weights = undo.enter_context(decoder_while_loading(config, runtime, ledger, start))
        with clock.phase("imports"):
            # Here, since a machine without a GPU has no triton, and weights are loaded meanwhile.
            from bullet_graph.runtime.cuda import CudaExecutor  # noqa: PLC0415
        with clock.phase("kernels"):
            captured.load_attention(runtime)
        tuned_rows = captured.piecewise_rows(plan) if config.cuda_graphs else None
        if communicators:
            # Ranks would time them differently, and pad forwards to different numbers of rows.
            tuned_rows = tuple(plan.piecewise_rows)
        executor = CudaExecutor(
            decoder,
            config,
            backend=backend,
            plan=plan,
            join_weights=join_weights,
            clock=clock,
            progress=start.progress,
            compiler=captured.compiler,
            tuned_rows=tuned_rows,
            communicators=communicators,
        )
        undo.pop_all()
    lane_sms = {(lane, p): backend.expected_sms(lane, p) for p in plan.batch_sizes for lane in LANES}
    check = None
    if config.cuda_graphs:
        check = SelfCheck(decoder, executor.self_check_logits, plan.batch_sizes[WHOLE_GPU], communicators.get("decode"))
    return BuiltRuntime(executor, ledger, performance, why, executor.capture, lane_sms, self_check=check)


def partitions_of(
    config: EngineConfig, runtime: Runtime, performance: PerformanceModel | None = None
) -> tuple[SmPartition, ...]:
    """The whole GPU, and a partition for each decode lane size that is configured or that the policy may choose."""
    sizes: Sequence[int] = config.decode_sms
    if config.policy.decode_sms is not None:
        sizes = (*sizes, config.policy.decode_sms)
    elif not sizes and config.policy.name in ("auto", "split") and config.partition_backend != "none":
        sizes = () if performance is None else performance.decode_sms
    return tuple(partition_of(size, num_sms=runtime.gpu.num_sms) for size in (None, *sorted(set(sizes))))
