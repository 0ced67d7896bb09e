"""The order in which an engine captures its CUDA graphs, and its progress. No torch."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.graphs.key import GraphKey
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition


@dataclass(frozen=True, slots=True)
class PieceKey:
    """One piecewise graph: forwards of ``rows`` rows, padding included, up to the attention of ``layer``."""

    rows: int
    layer: int
    partition: ClassVar[SmPartition] = WHOLE_GPU


CaptureKey = GraphKey | PieceKey


def hot_keys(plan: CapturePlan) -> list[GraphKey]:
    """The graphs that an engine cannot serve well without, in the order of their capture.

    First comes the largest step of the whole GPU, which serves any batch and in whose memory all others find room. The
    smallest follows, whose kernels may differ; then the smallest set that at most doubles the rows planned for a batch.
    """
    sizes = plan.decode[0].batch_sizes
    hot = {sizes[-1]: None, sizes[0]: None}
    served = sizes[0]
    while served < sizes[-1]:
        smallest = sizes[bisect_right(sizes, served)]
        served = sizes[bisect_right(sizes, 2 * smallest) - 1]
        hot[served] = None
    return [GraphKey(size) for size in hot]


def capture_order(plan: CapturePlan, num_layers: int) -> list[CaptureKey]:
    """All that a plan captures, the hottest first.

    After :func:`hot_keys` come the other sizes of the whole GPU, the largest of each partition, piecewise graphs, and
    the other sizes of the partitions. The largest piecewise graph comes first of its kind; then sizes rise.
    """
    hot = hot_keys(plan)
    whole = [key for size in plan.decode[0].batch_sizes if (key := GraphKey(size)) not in hot]
    parts = [(partition, sizes) for partition, sizes in plan.batch_sizes.items() if partition != WHOLE_GPU]
    largest = [GraphKey(sizes[-1], partition) for partition, sizes in parts]
    others = [GraphKey(size, partition) for partition, sizes in parts for size in sizes[:-1]]
    rows = plan.piecewise_rows
    pieces = [PieceKey(size, layer) for size in (*rows[-1:], *rows[:-1]) for layer in range(num_layers)]
    return [*hot, *whole, *largest, *pieces, *sorted(others, key=lambda key: key.batch_size)]


class CaptureProgress:
    """What is captured of a plan, and what is next."""

    def __init__(self, plan: CapturePlan, num_layers: int) -> None:
        self._sizes = plan.batch_sizes
        self._missing = dict.fromkeys(capture_order(plan, num_layers))

    @property
    def missing(self) -> list[CaptureKey]:
        """What is left, in the order of its capture."""
        return list(self._missing)

    @property
    def next(self) -> CaptureKey | None:
        """The next to capture; None: nothing is left."""
        return next(iter(self._missing), None)

    def note(self, key: CaptureKey) -> None:
        del self._missing[key]

    def max_batch_size(self, partition: SmPartition) -> int:
        """Most rows of a step that may be placed on a partition now, 0 for none.

        The whole GPU takes any batch as soon as its first graph is there. Another partition only takes batches that are
        padded as planned, since predictions count with that.
        """
        sizes = self._sizes[partition]
        if partition == WHOLE_GPU:
            return 0 if GraphKey(sizes[-1]) in self._missing else sizes[-1]
        return max(takewhile(lambda size: GraphKey(size, partition) not in self._missing, sizes), default=0)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """Cost of capturing at a start; ``num_bytes`` of device memory include workspaces allocated on the way."""

    num_graphs: int
    compile_seconds: float
    capture_seconds: float
    num_bytes: int
