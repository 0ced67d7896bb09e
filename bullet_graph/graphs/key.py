"""The sizes that CUDA graphs are captured for, and which of them serves a step."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bullet_graph.hardware import GENERIC
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition
from bullet_graph.perf.roofline import DecoderShape, expert_projections, layer_matrices

PRODUCT_FLOPS_PER_MS = 600e9
"""Rate of a layer's matrix products of many rows: an H200 under its power cap does 610 to 683 TFLOP/s with an 8B model
(bench/LOG.md). A slower GPU captures more sizes than its host needs."""

FINE_ROWS = 1024
"""For any model, piecewise graphs reach this number of rows, in steps of at most a matrix product's tile."""

FP8_LAYER_MS = 0.7
"""Host time to launch one dense FP8 layer: 0.55 to 0.85 ms on two hosts (bench/LOG.md)."""

EXPERTS_ROWS = 4096
"""With experts, they reach this one: a layer has 15 launches, in FP8 0.7 to 1.9 ms of the host (bench/LOG.md)."""

_ROW_STEPS = ((256, 16), (512, 32), (FINE_ROWS, 64), (2048, 128), (4096, 256))
"""(last bucket, step up to it): above 256 rows, padding is at most an eighth of the rows, 4 % on average."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One captured decode graph; ``batch_size`` includes padding."""

    batch_size: int
    partition: SmPartition = WHOLE_GPU


def batch_size_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes to capture, rising: 1, 2, 4, then steps of 8 to 64, 16 to 256, 32 to 512, 64 above.

    Steps widen because padding costs little in a memory-bound step, and matrix kernels work in tiles of 64 rows or
    more. The largest size is ``max_batch_size`` itself.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32)]
    sizes += range(512, max_batch_size + 1, 64)
    return (*[size for size in sizes if size < max_batch_size], max_batch_size)


def launch_bound_rows(shape: DecoderShape) -> int:
    """Rows up to which launching a layer kernel by kernel takes longer than its products: 276 for llama-3.1-8b.

    Host time of a layer × FLOP/s / (2 × weights that a row meets): each row takes two FLOPs per weight. Dense FP8
    layers have more launches, and products of twice the rate: 1,926 rows for llama-3.1-8b-fp8.
    """
    weights: float = sum(map(math.prod, layer_matrices(shape)))
    weights += shape.own_experts_per_token * sum(map(math.prod, expert_projections(shape).values()))
    has_fp8_products = shape.fp8 is not None and not shape.num_experts
    layer_ms, rate = (FP8_LAYER_MS, 2) if has_fp8_products else (GENERIC.eager_layer_ms, 1)
    return math.ceil(layer_ms * rate * PRODUCT_FLOPS_PER_MS / (2 * weights))


def row_buckets(max_rows: int, shape: DecoderShape) -> tuple[int, ...]:
    """Numbers of rows to capture piecewise graphs for, rising, up to ``max_rows``.

    They end with the first that holds :func:`launch_bound_rows` and 1,024 rows (4,096 with experts): longer forwards
    keep the device busy while the host launches them.
    """
    least = EXPERTS_ROWS if shape.num_experts else FINE_ROWS
    sizes: list[int] = []
    start = 0
    for end, step in (*_ROW_STEPS, (max_rows, 512)):
        sizes += range(start + step, min(end, max_rows) + 1, step)
        start = end
    return tuple(sizes[: bisect_left(sizes, max(launch_bound_rows(shape), least)) + 1])


def worthwhile_buckets(times_ms: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes that are faster than every larger one, rising: some matrix kernels are slower for fewer rows."""
    kept: list[int] = []
    for size in sorted(times_ms, reverse=True):
        if not kept or times_ms[size] < times_ms[kept[-1]]:
            kept.append(size)
    return tuple(kept[::-1])


def smallest_holding(batch_size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the rising sizes that holds the batch, or None."""
    index = bisect_left(sizes, batch_size)
    return sizes[index] if index < len(sizes) else None


def bucket_for(batch_size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds ``batch_size`` rows, which the largest must hold."""
    return buckets[bisect_left(buckets, batch_size)]
