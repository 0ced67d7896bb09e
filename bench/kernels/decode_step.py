"""The engine's captured decode step: its time, its share of the memory's bandwidth, and where the time goes.

    python -m bench.kernels.decode_step --output-json bench/results/h200/decode_step.json

Weights, cache and tokens are random. The bandwidth counts weights, keys and values once, beside that of a large copy.
torch's profiler gives the time by group of kernels. What each group must move and compute is counted from the model's
shape, activations once read and once written.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch._C._autograd import DeviceType

from bench.kernels.harness import DTYPE, GpuCommand, device_text, open_bench, output_option, parse_counts, watch_gpu
from bench.record import write_report
from bullet_graph.errors import DeviceError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.quantization import in_formats
from bullet_graph.perf.bandwidth import measure_copy_gb_per_s
from bullet_graph.perf.roofline import (
    decode_step_bytes,
    decode_weight_bytes,
    expert_projections,
    kv_cache_bytes_per_token,
    layer_matrices,
)
from bullet_graph.perf.table import ProfilePoint

GROUPS = ("products", "experts", "attention", "norms", "rope", "swiglu", "head", "sampling", "other")
_NAMES = {  # parts of kernel names in lower case; Inductor's names say what they fuse; the first that fits
    "sampling": ("sample_kernel",),
    "attention": ("decode_attention_kernel", "combine_partials_kernel"),
    "rope": ("rope_and_cache_kernel",),
    "norms": ("add_rms_norm", "rsqrt"),
    "swiglu": ("silu", "act_and_mul"),
    "experts": ("grouped_matmul", "route_kernel", "sort_kernel", "combine_kernel"),
    "products": ("nvjet", "gemm", "one_row", "cutlass", "splitk", "cublas", "matmul_kernel"),
}
_LAST = "sampling"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch, times in µs on one clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a group of kernels must move and compute in a step."""

    num_bytes: float
    flops: float


def group_of(name: str) -> str:
    """The group of a kernel by its name; the output head's product counts as "products" here."""
    return next((group for group, parts in _NAMES.items() if any(p in name.lower() for p in parts)), "other")


def split_steps(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The launches of each whole step; a step ends with sampling, which may be several launches."""
    steps: list[list[Kernel]] = [[]]
    for kernel in sorted(kernels, key=lambda one: one.start):
        if steps[-1] and group_of(steps[-1][-1].name) == _LAST != group_of(kernel.name):
            steps.append([])
        steps[-1].append(kernel)
    return [step for step in steps if step and group_of(step[-1].name) == _LAST]


def time_by_group(step: Sequence[Kernel]) -> dict[str, float]:
    """µs of one step by group, and "gaps", in which no kernel runs; together they are the step's span.

    Where kernels overlap, the time is the earlier one's. Products after the last norm are the head's.
    """
    groups = [group_of(kernel.name) for kernel in step]
    last_norm = max((i for i, group in enumerate(groups) if group == "norms"), default=len(step))
    times = dict.fromkeys((*GROUPS, "gaps"), 0.0)
    busy_until = step[0].start if step else 0.0
    for index, (group, kernel) in enumerate(zip(groups, step, strict=True)):
        times["gaps"] += max(0.0, kernel.start - busy_until)
        name = "head" if group == "products" and index > last_norm else group
        times[name] += max(0.0, kernel.end - max(kernel.start, busy_until))
        busy_until = max(busy_until, kernel.end)
    return times


def work_by_group(config: ModelConfig, rows: int, context: int) -> dict[str, Work]:
    """What each group must do in a decode step of ``rows`` sequences at ``context`` tokens; activations in bfloat16."""
    layers, hidden, intermediate = config.num_layers, config.hidden_size, config.dense_mlp_size
    size = DTYPE.itemsize
    qkv = config.q_size + 2 * config.kv_size
    head_weights = config.vocab_size * hidden * size
    norm_weights = (2 * layers + 1) * hidden * size
    layer_weights = decode_weight_bytes(config, batch_size=0, dtype_bytes=size) - head_weights - norm_weights
    kv_bytes = kv_cache_bytes_per_token(config, dtype_bytes=size)

    def activations(columns: float) -> float:
        return rows * columns * size

    def product(matrices: Iterable[tuple[int, int]]) -> float:
        return 2.0 * rows * layers * sum(map(math.prod, matrices))

    experts = decode_weight_bytes(config, batch_size=rows, dtype_bytes=size) - rows * hidden * size
    experts_flops = config.experts_per_token * product(expert_projections(config).values())
    in_and_out = 3 * hidden + qkv + config.q_size + 3 * intermediate
    return {
        "products": Work(layer_weights + layers * activations(in_and_out), product(layer_matrices(config))),
        "experts": Work(experts - layer_weights - head_weights - norm_weights, experts_flops),
        "attention": Work(
            rows * context * kv_bytes + layers * activations(2 * config.q_size),
            4.0 * rows * context * config.q_size * layers,
        ),
        "norms": Work(norm_weights + (2 * layers + 1) * activations(4 * hidden), 0.0),
        "rope": Work(layers * activations(2 * qkv), 0.0),
        "swiglu": Work(layers * activations(3 * intermediate), 0.0),
        "head": Work(head_weights + activations(hidden + config.vocab_size), 2.0 * rows * head_weights / size),
        "sampling": Work(activations(config.vocab_size), 0.0),
        "other": Work(activations(3 * hidden), 0.0),
    }


def breakdown(times: dict[str, float], work: dict[str, Work], copy_gb_per_s: float) -> list[dict[str, Any]]:
    """A row per group, the longest first, and the whole step's at the end."""
    span = sum(times.values())
    total = Work(sum(w.num_bytes for w in work.values()), sum(w.flops for w in work.values()))

    def row(name: str, us: float, of: Work) -> dict[str, Any]:
        gb_per_s = of.num_bytes / us / 1e3 if us else 0.0
        return {
            "group": name,
            "us": round(us, 2),
            "share_of_step": round(us / span, 4),
            **asdict(of),
            "gb_per_s": round(gb_per_s, 1),
            "share_of_copy": round(gb_per_s / copy_gb_per_s, 4),
            "tflops": round(of.flops / us / 1e6, 1) if us else 0.0,
        }

    rows = [row(name, us, work.get(name, Work(0.0, 0.0))) for name, us in times.items() if us or name in work]
    return [*sorted(rows, key=lambda one: -one["us"]), row("step", span, total)]


def profile(run: Callable[[], object]) -> dict[str, float]:
    """Median µs by group over a run's decode steps, by torch's profiler; DeviceError where it saw no whole step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    launched = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith("Memcpy")
    ]
    steps = [time_by_group(one) for one in split_steps(launched)]
    if not steps:
        raise DeviceError(
            f"torch's profiler saw {len(launched)} kernels and no whole decode step: check that CUPTI may be used here"
        )
    return {name: statistics.median(one[name] for one in steps) for name in steps[0]}


def show(rows: list[dict[str, Any]]) -> None:
    """Print a breakdown."""
    for row in rows:
        click.echo(
            f"  {row['group']:10} {row['us']:9.1f} us {100 * row['share_of_step']:5.1f} %"
            f" {row['num_bytes'] / 1e6:9.1f} MB {row['gb_per_s']:7.0f} GB/s"
            f" {100 * row['share_of_copy']:5.1f} % of a copy {row['tflops']:6.1f} TFLOP/s"
        )


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="llama-3.1-8b")
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto")
@click.option("--rows", default="1,8,16,32,64,128,256", callback=parse_counts)
@click.option("--context", type=click.IntRange(min=1), default=1000, help="Tokens per row.")
@click.option("--profiled-rows", default="64,256", callback=parse_counts)
@click.option("--seconds", type=click.FloatRange(min=0.05), default=1.0, help="Per step.")
@output_option
def main(
    model: str,
    kv_cache_dtype: str,
    rows: tuple[int, ...],
    context: int,
    profiled_rows: tuple[int, ...],
    seconds: float,
    output_json: Path,
) -> None:
    config = in_formats(PRESETS[model], quantization=None, kv_cache_dtype=kv_cache_dtype)
    copy_gb_per_s = round(measure_copy_gb_per_s("cuda"), 1)
    torch.cuda.empty_cache()
    points = [ProfilePoint("decode", batch_size=count, context_tokens=context) for count in sorted(rows)[::-1]]
    report = {"model": model, "kv_cache_dtype": kv_cache_dtype, "context": context, "copy_gb_per_s": copy_gb_per_s}
    cases, breakdowns = [], []
    with open_bench(model, points, kv_cache_dtype=kv_cache_dtype) as (bench, _):
        for point in points:
            started_s = time.perf_counter()
            with watch_gpu() as monitor:
                (ms,) = bench.measure(point, seconds)
            # By the board's energy counter. Its power is an average over the last second, in which other steps ran.
            energy = monitor.report.energy_joules
            joules = energy and energy / (time.perf_counter() - started_s) * ms / 1e3
            count = point.batch_size
            num_bytes = decode_step_bytes(config, batch_size=count, context_tokens=context, dtype_bytes=DTYPE.itemsize)
            gb_per_s = num_bytes / ms / 1e6
            click.echo(
                f"{count:4} rows x {context} tokens: {ms:7.3f} ms, {gb_per_s:5.0f} GB/s, "
                f"{100 * gb_per_s / copy_gb_per_s:.0f} % of a copy's {copy_gb_per_s:.0f}, "
                f"{'–' if joules is None else f'{joules:.2f}'} J, {device_text(monitor.report)}"
            )
            cases.append(
                {"rows": count, "step_ms": round(ms, 4), "joules": joules}
                | {"gb_per_s": round(gb_per_s, 1), "device": asdict(monitor.report)}
            )
        for point in (point for point in points if point.batch_size in profiled_rows):
            click.echo(f"{point.batch_size} rows by group of kernels, profiled:")
            try:
                times = profile(lambda point=point: bench.measure(point, 0.02))  # type: ignore[misc]
            except Exception as error:  # what the profiler cannot do must not lose the steps' times
                click.echo(f"  {error}")
                continue
            found = breakdown(times, work_by_group(config, point.batch_size, context), copy_gb_per_s)
            show(found)
            breakdowns.append({"rows": point.batch_size, "groups": found})
    write_report(output_json, report | {"cases": cases, "breakdowns": breakdowns})


if __name__ == "__main__":
    main()
