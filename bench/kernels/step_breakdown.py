"""Where the time of a decode step goes: kernels by group, and what each group must move and compute."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bullet_graph.errors import DeviceError
from bullet_graph.models.config import ModelConfig
from bullet_graph.perf.traffic import decode_weight_bytes, kv_cache_bytes_per_token

DTYPE_BYTES = 2
PROFILED_STEPS = 5
GROUPS = ("products", "attention", "norms", "rope", "swiglu", "head", "sampling", "other")
_NAMES = {  # part of a kernel's name, in lower case; Inductor's names tell what they fuse; the first that fits
    "sampling": ("sample_kernel",),
    "attention": ("decode_attention_kernel", "combine_partials_kernel"),
    "rope": ("rope_and_cache_kernel",),
    "norms": ("add_rms_norm_kernel", "rsqrt"),
    "swiglu": ("silu",),
    "products": ("nvjet", "gemm", "gemv", "cutlass", "splitk", "cublas"),
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
    """What a group must do in a step; activations count once read and once written, though the L2 may hold them."""

    num_bytes: float
    flops: float


def group_of(name: str) -> str:
    """The group of a kernel by its name; the head's product is among the products here."""
    lowered = name.lower()
    return next((group for group, parts in _NAMES.items() if any(p in lowered for p in parts)), "other")


def split_steps(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Launches of several steps, each of which ends with sampling, step by step in the order of their starts."""
    steps: list[list[Kernel]] = []
    current: list[Kernel] = []
    for kernel in sorted(kernels, key=lambda one: one.start):
        current.append(kernel)
        if group_of(kernel.name) == _LAST:
            steps.append(current)
            current = []
    return steps


def in_turn(kernels: Sequence[Kernel]) -> Iterator[tuple[Kernel, float, float]]:
    """Each kernel, in the order of their starts, with the µs before it in which none ran and the µs of its own.

    Where kernels overlap, the time is the earlier one's.
    """
    ordered = sorted(kernels, key=lambda one: one.start)
    busy_until = ordered[0].start if ordered else 0.0
    for kernel in ordered:
        yield (
            kernel,
            max(0.0, kernel.start - busy_until),
            max(0.0, kernel.end - max(kernel.start, busy_until)),
        )
        busy_until = max(busy_until, kernel.end)


def time_by_group(step: Sequence[Kernel]) -> dict[str, float]:
    """µs of one step by group, and "gaps", in which no kernel runs; together they are the step's span.

    As :func:`in_turn` has it. Products behind the last norm are the head's.

    Args:
        step: its kernels, in the order of their starts.
    """
    groups = [group_of(kernel.name) for kernel in step]
    last_norm = max((i for i, group in enumerate(groups) if group == "norms"), default=len(step))
    times = dict.fromkeys((*GROUPS, "gaps"), 0.0)
    for index, (group, (_, gap, own)) in enumerate(zip(groups, in_turn(step), strict=True)):
        times["gaps"] += gap
        times["head" if group == "products" and index > last_norm else group] += own
    return times


def work_by_group(config: ModelConfig, rows: int, context: int) -> dict[str, Work]:
    """What each group of a decode step in a 16-bit dtype must do.

    Args:
        config: the model.
        rows: sequences, a token each.
        context: tokens that each attends to.
    """
    layers, hidden, intermediate = config.num_layers, config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.kv_size
    head_weights = config.vocab_size * hidden * DTYPE_BYTES
    norm_weights = (2 * layers + 1) * hidden * DTYPE_BYTES
    all_weights = decode_weight_bytes(config, batch_size=0, dtype_bytes=DTYPE_BYTES)
    layer_weights = all_weights - head_weights - norm_weights
    inputs_and_outputs = 2 * hidden + qkv + config.q_size + 3 * intermediate + hidden
    kv_bytes = kv_cache_bytes_per_token(config, dtype_bytes=DTYPE_BYTES)

    def activations(columns: float) -> float:
        return rows * columns * DTYPE_BYTES

    def product(weight_bytes: float) -> float:
        return 2 * rows * weight_bytes / DTYPE_BYTES

    attended = 4 * rows * context * config.q_size * layers
    return {
        "products": Work(layer_weights + layers * activations(inputs_and_outputs), product(layer_weights)),
        "attention": Work(rows * context * kv_bytes + layers * activations(2 * config.q_size), attended),
        "norms": Work(norm_weights + (2 * layers + 1) * activations(4 * hidden), 0.0),
        "rope": Work(layers * activations(2 * qkv), 0.0),
        "swiglu": Work(layers * activations(3 * intermediate), 0.0),
        "head": Work(head_weights + activations(hidden + config.vocab_size), product(head_weights)),
        "sampling": Work(activations(config.vocab_size), 0.0),
        "other": Work(activations(3 * hidden), 0.0),
    }


def breakdown_rows(
    times: dict[str, float], work: dict[str, Work], copy_gb_per_s: float
) -> list[dict[str, Any]]:
    """A row a group, the longest first, and the whole step's at the end.

    Args:
        times: of :func:`time_by_group`.
        work: of :func:`work_by_group`.
        copy_gb_per_s: what the memory delivers to a large copy.
    """
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
    rows.sort(key=lambda one: -one["us"])
    return [*rows, row("step", span, total)]


def kernels_of(run: Callable[[], object]) -> list[Kernel]:
    """Launches and copies of a run on the GPU, by torch's profiler."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def profile(step: Callable[[], object]) -> dict[str, float]:
    """Median µs by group over some steps, by torch's profiler on the GPU.

    Raises:
        DeviceError: it saw no whole step.
    """

    def run() -> None:
        for _ in range(PROFILED_STEPS):
            step()
            torch.cuda.synchronize()

    launched = [kernel for kernel in kernels_of(run) if not kernel.name.startswith("Memcpy")]
    steps = [time_by_group(one) for one in split_steps(launched)]
    if not steps:
        raise DeviceError(
            f"torch's profiler saw {len(launched)} kernels and no whole decode step: check that CUPTI may be used here"
        )
    return {name: statistics.median(one[name] for one in steps) for name in steps[0]}
