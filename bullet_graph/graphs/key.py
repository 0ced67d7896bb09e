"""Which captured graph serves a decode step."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bullet_graph.partition.spec import WHOLE_GPU, SmPartition

_ROW_STEPS = ((256, 16), (512, 32), (1024, 64))
"""(up to so many rows, buckets so many rows apart): padding stays within a tile of a matrix product."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One captured decode graph.

    Attributes:
        batch_size: rows, padding included.
        partition: the SMs its kernels were captured for.
    """

    batch_size: int
    partition: SmPartition = WHOLE_GPU


def batch_size_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes to capture, rising: 1, 2, 4, then steps of 8 to 64, 16 to 256, 32 to 512, 64 above.

    Padding costs little where a step is memory-bound, and the matrix kernels work in tiles of 64 rows or
    more, so the steps widen; the largest is ``max_batch_size`` itself.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32)]
    sizes += range(512, max_batch_size + 1, 64)
    return (*[size for size in sizes if size < max_batch_size], max_batch_size)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to capture short forwards for, rising, none above ``max_rows``."""
    sizes: list[int] = []
    start = 0
    for end, step in _ROW_STEPS:
        sizes += range(start + step, end + 1, step)
        start = end
    return tuple(size for size in sizes if size <= max_rows)


def worthwhile_buckets(times_ms: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes that are faster than every larger one, rising.

    Matrix kernels are at times slower for fewer rows: then the rows are better padded up to the next size.

    Args:
        times_ms: measured time by size.
    """
    kept: list[int] = []
    for size in sorted(times_ms, reverse=True):
        if not kept or times_ms[size] < times_ms[kept[-1]]:
            kept.append(size)
    return tuple(kept[::-1])


def largest_first(batch_sizes: Mapping[SmPartition, Sequence[int]]) -> list[GraphKey]:
    """The graphs to capture for these sizes by partition, the largest first: the smaller find room in its memory."""
    keys = [GraphKey(size, partition) for partition, sizes in batch_sizes.items() for size in sizes]
    return sorted(keys, key=lambda key: -key.batch_size)


def smallest_holding(batch_size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the rising sizes that holds so many rows; None where none does."""
    index = bisect_left(sizes, batch_size)
    return sizes[index] if index < len(sizes) else None


def bucket_for(batch_size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds ``batch_size`` rows, which must not exceed the largest."""
    return buckets[bisect_left(buckets, batch_size)]
