"""Which captured graph serves a decode step."""

from bisect import bisect_left
from dataclasses import dataclass

from bullet_graph.partition.spec import WHOLE_GPU, SmPartition


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


def bucket_for(batch_size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds ``batch_size`` rows, which must not exceed the largest."""
    return buckets[bisect_left(buckets, batch_size)]
