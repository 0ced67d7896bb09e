"""Chooses what to capture for a workload under budgets of memory and time. No torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bullet_graph.engine.capture_usage import CaptureUsage
from bullet_graph.errors import ConfigError
from bullet_graph.graphs.capture_plan import (
    DECODE_GRAPH_BYTES,
    DECODE_GRAPH_S,
    PIECE_BYTES,
    PIECE_S,
    CapturePlan,
    DecodeSizes,
)
from bullet_graph.graphs.key import FINE_ROWS, batch_size_buckets, smallest_holding
from bullet_graph.graphs.size_choice import Choice, Demand, best_choices, lost_ms

BATCH_STEP = 8
"""Batch sizes are chosen among 1, 2, 4 and multiples of it: the matrix kernels work in tiles."""

ROW_STEP = 16
"""Rows of short forwards are chosen among multiples of it up to 1,024; above, among those captured without a plan: the
time of the choice grows with the cube of the candidates."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What capturing may take; infinite for no limit.

    Attributes:
        memory_bytes: of the device.
        time_s: at every start, compiling left out.
    """

    memory_bytes: float = math.inf
    time_s: float = math.inf

    def affords(self, item_bytes: float, item_s: float) -> int:
        """How many graphs of such a cost; infinite budgets afford more than any engine has."""
        return int(min(self.memory_bytes / item_bytes, self.time_s / item_s, 1e6) + 1e-9)

    def less(self, num_bytes: float, seconds: float) -> "Budget":
        """What is left of it."""
        return Budget(self.memory_bytes - num_bytes, self.time_s - seconds)


@dataclass(frozen=True, slots=True)
class SizeUse:
    """What one captured size does.

    Attributes:
        size: rows.
        num_steps: steps that it serves.
        num_exact: those of them that need no padding.
        worth_ms: time lost without it, by batches as well that did not come up but may; infinite where it must be.
    """

    size: int
    num_steps: int
    num_exact: int
    worth_ms: float


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Steps that the same captured sizes serve, and what these do.

    Attributes:
        name: ``whole GPU``, ``N SMs``, or ``short forwards``.
        num_steps: steps that were seen.
        num_unserved: those of them that no size holds.
        lost_ms: time lost by all that were seen.
        sizes: those captured.
    """

    name: str
    num_steps: int
    num_unserved: int
    lost_ms: float
    sizes: tuple[SizeUse, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """The steps that a run asked for, as demands.

    Attributes:
        decode: by SMs of the decode lane, None (the whole GPU) always among them, as the first.
        forwards: with prompt tokens, on the whole GPU, of as many rows as may be captured.
        num_layers: of the model.
        max_num_seqs: that the whole GPU must hold.
    """

    decode: dict[int | None, list[Demand]]
    forwards: list[Demand]
    num_layers: int
    max_num_seqs: int

    @classmethod
    def of(cls, usage: CaptureUsage, like: CapturePlan) -> "Workload":
        """What a run has collected that captured graphs of such an engine may serve."""
        partitions = sorted(sms for sms in usage.decode if sms is not None)
        decode: dict[int | None, list[Demand]] = {
            None: usage.whole_gpu_demands(unseen=batch_size_buckets(like.max_num_seqs))
        }
        decode |= {sms: usage.partition_demands(sms) for sms in partitions}
        max_rows = like.piecewise_rows[-1] if like.piecewise_rows else 0
        forwards = usage.forward_demands(max_rows)
        return cls(decode, forwards, usage.model.num_layers, like.max_num_seqs)

    def batch_candidates(self, decode_sms: int | None) -> tuple[int, ...]:
        """Batch sizes worth capturing for so many SMs, rising: where the batches that were seen are padded to."""
        grid = [size for size in (1, 2, 4) if size < self.max_num_seqs]
        grid += [*range(BATCH_STEP, self.max_num_seqs, BATCH_STEP), self.max_num_seqs]
        return _reached(grid, self.decode[decode_sms])

    def row_candidates(self, like: CapturePlan) -> tuple[int, ...]:
        """Rows of short forwards worth capturing, rising, none above those of ``like``; see :data:`ROW_STEP`."""
        most = max(like.piecewise_rows, default=0)
        fine = range(ROW_STEP, min(most, FINE_ROWS) + 1, ROW_STEP)
        coarse = [rows for rows in like.piecewise_rows if rows > FINE_ROWS]
        return _reached([*fine, *coarse], self.forwards)

    def everything(self, *, like: CapturePlan) -> CapturePlan:
        """Every candidate captured: the least time lost that there can be."""
        decode = {sms: self.batch_candidates(sms) for sms in self.decode}
        return _plan(like, decode, self.row_candidates(like))

    def uses(self, plan: CapturePlan) -> tuple[GroupUse, ...]:
        """What each size of a plan would do for these steps."""
        sizes = {entry.decode_sms: entry.batch_sizes for entry in plan.decode}
        names = dict.fromkeys((*self.decode, *sizes))
        groups = [
            _use("whole GPU" if sms is None else f"{sms} SMs", self.decode.get(sms, []), sizes.get(sms, ()))
            for sms in names
        ]
        return (*groups, _use("short forwards", self.forwards, plan.piecewise_rows))


def propose(workload: Workload, budget: Budget, *, like: CapturePlan) -> CapturePlan:
    """The plan within a budget that loses these steps, and those that may yet come up, the least time.

    First the best sizes for each partition, for every number of them; then the best numbers for all partitions together
    (a knapsack whose items all cost the same); and the same against every number of sizes of short forwards.

    Args:
        like: a plan of the same model and engine; its rows of short forwards end where such a forward may.

    Raises:
        ConfigError: the budget affords not even one graph.
    """
    most = budget.affords(DECODE_GRAPH_BYTES, DECODE_GRAPH_S)
    if most < 1:
        raise ConfigError(
            f"the whole GPU needs a graph of max_num_seqs={workload.max_num_seqs} rows, about "
            f"{DECODE_GRAPH_BYTES / 1e9:.3f} GB and {DECODE_GRAPH_S:.3f} s, but the budget is "
            f"{budget.memory_bytes / 1e9:g} GB and {budget.time_s:g} s: raise --memory-gb or --time-s"
        )
    choices = {}
    for sms, demands in workload.decode.items():
        candidates = workload.batch_candidates(sms)
        choices[sms] = best_choices(candidates, demands, most=min(most, len(candidates)))
    by_count = _share_out(choices, most)
    rows = workload.row_candidates(like)
    best: tuple[float, dict[int | None, Choice], Choice] | None = None
    for count, forwards in enumerate(best_choices(rows, workload.forwards, most=len(rows))):
        pieces = count * workload.num_layers
        left = budget.less(pieces * PIECE_BYTES, pieces * PIECE_S)
        affordable = left.affords(DECODE_GRAPH_BYTES, DECODE_GRAPH_S)
        if affordable < 1:
            break
        decode = by_count[min(affordable, len(by_count) - 1)]
        lost = sum(choice.lost_ms for choice in decode.values()) + forwards.lost_ms
        if best is None or lost < best[0] * (1 - 1e-12):
            best = lost, decode, forwards
    assert best is not None  # no pieces at all are affordable
    _, decode, forwards = best
    return _plan(like, {sms: choice.sizes for sms, choice in decode.items()}, forwards.sizes)


def _share_out(choices: dict[int | None, tuple[Choice, ...]], most: int) -> list[dict[int | None, Choice]]:
    """By number of graphs in all: the choice for each partition that loses the least time together."""
    shared: list[dict[int | None, Choice]] = [{}]
    totals = [0.0]
    for sms, own in choices.items():
        room = min(most, len(totals) + len(own) - 2)
        splits = []
        for count in range(room + 1):
            ways = range(max(count - len(totals) + 1, 0), min(count, len(own) - 1) + 1)
            splits.append(min(ways, key=lambda k, n=count: own[k].lost_ms + totals[n - k]))  # type: ignore[misc]
        shared = [shared[count - k] | {sms: own[k]} for count, k in enumerate(splits)]
        totals = [own[k].lost_ms + totals[count - k] for count, k in enumerate(splits)]
    return shared


def _reached(grid: Iterable[int], demands: Sequence[Demand]) -> tuple[int, ...]:
    """The sizes of a grid that some step is padded to, rising; between two of them, a size would serve none better."""
    sizes = tuple(grid)
    reached = {smallest_holding(demand.size, sizes) for demand in demands}
    return tuple(sorted(size for size in reached if size is not None))


def _plan(like: CapturePlan, decode: dict[int | None, tuple[int, ...]], rows: tuple[int, ...]) -> CapturePlan:
    return CapturePlan(
        model=like.model,
        dtype=like.dtype,
        num_sms=like.num_sms,
        max_num_seqs=like.max_num_seqs,
        decode=tuple(DecodeSizes(sms, sizes) for sms, sizes in decode.items() if sizes),
        piecewise_rows=rows,
    )


def _use(name: str, demands: Sequence[Demand], sizes: Sequence[int]) -> GroupUse:
    expected = lost_ms(demands, sizes)
    served = {size: [d for d in demands if smallest_holding(d.size, sizes) == size] for size in sizes}
    uses = tuple(
        SizeUse(
            size,
            sum(d.num_steps for d in served[size]),
            sum(d.num_steps for d in served[size] if d.size == size),
            lost_ms(demands, [other for other in sizes if other != size]) - expected,
        )
        for size in sizes
    )
    total = sum(d.num_steps for d in demands)
    lost = lost_ms([d for d in demands if d.num_steps], sizes)
    return GroupUse(name, total, total - sum(use.num_steps for use in uses), lost, uses)
