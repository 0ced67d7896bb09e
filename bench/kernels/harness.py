"""What the kernel benchmarks share: the command, random inputs, times from CUDA graphs, and ceilings."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import torch
from torch import Tensor

from bench.record import Tool
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig
from bullet_graph.errors import ConfigError, DeviceError
from bullet_graph.kernels.flashinfer_attention import PagedBatch
from bullet_graph.kernels.memory import KVCache
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.energy import DeviceMonitor, DeviceReport, open_probe
from bullet_graph.perf.table import ProfilePoint
from bullet_graph.runtime.bursts import Workbench, open_workbench
from bullet_graph.runtime.profile import prepare_profile

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
DENSE_PRESETS = sorted(name for name, model in PRESETS.items() if not model.num_experts)
Int32Array: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Run: TypeAlias = Callable[[], object]

_BURST_US = 12_000.0
_CEILING_SIZE = 8192
_HEAT_S = 3.0


class _OnGpu(click.Command):
    def invoke(self, ctx: click.Context) -> Any:
        if not torch.cuda.is_available():
            raise DeviceError(
                f"this benchmark needs a GPU, but torch {torch.__version__} sees no CUDA device: check `nvidia-smi` "
                "and that torch is a CUDA build"
            )
        check_result_file(ctx.params["output_json"], overwrite=True)
        with torch.inference_mode():
            torch.manual_seed(0)
            return super().invoke(ctx)


class GpuCommand(Tool, _OnGpu):
    """A command that needs a GPU and writes ``--output-json``."""


output_option = click.option(
    "--output-json",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    required=True,
    help="Where the results go; an existing file is replaced.",
)


def parse_counts(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """An option's callback: read positive integers such as ``64,256``."""
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise click.BadParameter(f"{value!r} is no list of positive integers: write 64,256")
    return counts


# ---- inputs ----


def random_tensor(*shape: int, std: float = 1.0) -> Tensor:
    """Random bfloat16 on the GPU."""
    return torch.empty(*shape, dtype=DTYPE, device=DEVICE).normal_(std=std)


def random_cache(config: ModelConfig, num_blocks: int) -> KVCache:
    """A KV cache full of random keys and values."""
    cache = KVCache(config, num_blocks=num_blocks, block_tokens=KV_BLOCK_TOKENS, dtype=DTYPE, device=DEVICE)
    for index in range(config.num_layers):
        for half in cache.layer(index):
            half.normal_()
    return cache


def lengths(rows: int, context: int, spread: bool) -> Int32Array:
    """Context tokens of each row: all equal, or lognormal with that mean."""
    if not spread:
        return np.full(rows, context, dtype=np.int32)
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, rows)
    kv_lens: Int32Array = np.clip(drawn * context / drawn.mean(), 1, 16384).astype(np.int32)
    return kv_lens


def blocks_for(kv_lens: Int32Array) -> int:
    """KV blocks that sequences of these lengths need."""
    return int((-(-kv_lens // KV_BLOCK_TOKENS)).sum())


def scattered_blocks(kv_lens: Int32Array, num_blocks: int) -> tuple[Int32Array, Int32Array]:
    """Blocks in random order, as a cache has them after hours of service: kv_indptr [rows + 1], kv_indices [in use].

    Raises ConfigError where the sequences need more blocks than ``num_blocks``.
    """
    indptr = np.concatenate(([0], np.cumsum(-(-kv_lens // KV_BLOCK_TOKENS)))).astype(np.int32)
    if indptr[-1] > num_blocks:
        raise ConfigError(
            f"a case needs {indptr[-1]} blocks, the cache holds {num_blocks}: make it larger or the case smaller"
        )
    return indptr, np.random.default_rng(1).permutation(num_blocks)[: indptr[-1]].astype(np.int32)


def paged_batch(kv_lens: Int32Array, num_blocks: int) -> PagedBatch:
    """Sequences whose last tokens are query rows; blocks are scattered over the cache."""
    indptr, indices = scattered_blocks(kv_lens, num_blocks)
    q_indptr = torch.arange(len(kv_lens) + 1, dtype=torch.int32)
    return PagedBatch(
        q_indptr=q_indptr.to(DEVICE),
        kv_indptr=torch.from_numpy(indptr).to(DEVICE),
        kv_indices=torch.from_numpy(indices).to(DEVICE),
        last_block_tokens=torch.from_numpy((kv_lens - 1) % KV_BLOCK_TOKENS + 1).to(DEVICE),
        host_q_indptr=q_indptr,
        host_kv_indptr=torch.from_numpy(indptr),
        host_kv_lens=torch.from_numpy(kv_lens),
    )


# ---- times ----


def capture(run: Run, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a run, which runs once before."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def burst_us(run: Run, stream: torch.cuda.Stream | None = None) -> float:
    """Median time of a captured run over some 12 ms, too short for the power cap to matter."""
    stream = stream or torch.cuda.Stream()
    graph = capture(run, stream)
    estimate = min(replays_us(graph, stream, 3))
    return float(np.median(replays_us(graph, stream, max(5, int(_BURST_US / estimate)))))


def replays_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, count: int) -> list[float]:
    """The times of ``count`` replays, one after the other, in µs."""
    with torch.cuda.stream(stream):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def sustained_ms(run: Run, seconds: float) -> tuple[float, DeviceReport]:
    """Mean time of a captured run replayed until the GPU is at its power cap, and the GPU's state meanwhile.

    The first third of ``seconds`` is not measured.
    """
    graph = capture(run)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    count = max(3, int(seconds * 2e3 / 3 / start.elapsed_time(end)))
    for _ in range(count // 2):
        graph.replay()
    torch.cuda.synchronize()
    with watch_gpu() as monitor:
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / count, monitor.report


def watch_gpu() -> DeviceMonitor:
    """Clock, power and energy of the GPU."""
    return DeviceMonitor(open_probe(DEVICE))


def device_text(report: DeviceReport) -> str:
    """Such as ``691 W 1507 MHz``; what NVML does not say is left out."""
    figures = ((report.power_w, "W"), (report.sm_clock_mhz, "MHz"))
    return " ".join(f"{value.mean:.0f} {unit}" for value, unit in figures if value is not None)


def product_ceiling_tflops() -> float:
    """Sustained rate of a large square bfloat16 product by cuBLAS, in 10¹² operations a second."""
    a, b = random_tensor(_CEILING_SIZE, _CEILING_SIZE), random_tensor(_CEILING_SIZE, _CEILING_SIZE)
    out = torch.empty_like(a)
    ms, _ = sustained_ms(lambda: torch.mm(a, b, out=out), 3.0)
    return 2e-9 * _CEILING_SIZE**3 / ms


# ---- the engine's own steps ----


@contextmanager
def open_bench(
    model: str,
    points: Sequence[ProfilePoint],
    *,
    decode_sms: Sequence[int] = (),
    backend: str = "none",
    kv_cache_dtype: str = "auto",
) -> Iterator[tuple[Workbench, str]]:
    """The engine's lanes with random weights, ready to measure these points, and heated to sustained clocks.

    ``decode_sms`` has the SMs of the decode lane for each partition that the points name.
    """
    config = EngineConfig(
        model=model,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        device="cuda",
        max_num_seqs=max(1, *(point.batch_size for point in points)),
        max_num_batched_tokens=max(KV_BLOCK_TOKENS, *(point.tokens for point in points)),
        partition_backend=backend,  # type: ignore[arg-type]
        decode_sms=tuple(decode_sms),
    )
    prepared = prepare_profile(config)
    if too_large := [point for point in points if not prepared.limits.allows(point)]:
        held = f"{prepared.limits.kv_tokens:,}"
        raise ConfigError(f"{too_large[0]} need more than the KV cache's {held} tokens: ask for fewer rows")
    with open_workbench(prepared, progress=True) as (bench, why):
        bench.capture(points, progress=True)
        bench.measure(points[0], _HEAT_S)
        yield bench, why
