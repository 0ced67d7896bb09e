"""Proposes what an engine should capture for a workload, under budgets of memory and time. No torch.

A recorded run says which steps came up. Each captured size saves them time: less padding, no turns with prefill, fewer
launches one by one. The proposal repeatedly takes the size that saves the most time for its cost.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from bullet_graph.errors import ConfigError
from bullet_graph.graphs import capture_plan as plans
from bullet_graph.graphs.key import batch_size_buckets, smallest_holding
from bullet_graph.hardware import GENERIC
from bullet_graph.partition.masks import lane_sms
from bullet_graph.perf.performance import PaddedModel, PerformanceModel
from bullet_graph.runtime.simulated import StepRecord

SINGLE_ROW_LOSS = 0.116
"""Least share of a step that padding a single row costs: 4.63 ms instead of 3.88 ms, in FP8 2.79 and 2.50, since one
row has a matrix kernel of its own (bench/LOG.md). Tables are interpolated and do not show it."""

LEAST_SPLIT_GAIN = 0.05
"""Least share of its step that a split gains over taking turns: the planner chose it for throughput or for a target."""

UNSEEN_SHARE = 0.01
"""Weight of all batch sizes together that never came up, as a share of the whole GPU's decode steps: a burst may bring
them, and must not be padded to the very largest size."""

BATCH_STEP = 8
"""Batch sizes are chosen among 1, 2, 4 and multiples of it: matrix kernels work in tiles."""

ROW_STEP = 16
"""Rows of piecewise graphs are chosen among multiples of it."""

PIECEWISE: Literal["piecewise"] = "piecewise"
GroupKey = int | Literal["piecewise"] | None
"""What is captured: decode steps of the whole GPU (None) or beside a partition's SMs, or piecewise graphs."""

PaddedMs = Callable[[int], float]
"""Milliseconds by the number of rows to which steps are padded."""

_NEGLIGIBLE = 1e-12
"""Share of a group's time that is rounding."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the graphs' device memory and of the seconds of capturing at each start; infinite for none."""

    memory_bytes: float = math.inf
    time_s: float = math.inf

    def affords(self, num_bytes: float, seconds: float) -> bool:
        """Whether graphs of these costs fit, rounding aside."""
        return num_bytes <= self.memory_bytes * (1 + 1e-9) and seconds <= self.time_s * (1 + 1e-9)

    def share(self, num_bytes: float, seconds: float) -> float:
        """The larger share of the two limits that a cost takes; seconds where there is no limit."""
        return max(num_bytes / self.memory_bytes, seconds / self.time_s) or seconds


@dataclass(frozen=True, slots=True)
class Demand:
    """Steps of one size; ``num_steps`` is 0 for one that may yet come up.

    ``padded_ms`` is the time that they lose together when padded to a size that holds them; ``unserved_ms`` the same
    when no captured size does, infinite where that must not be.
    """

    size: int
    num_steps: int
    padded_ms: PaddedMs
    unserved_ms: float

    def lost_ms(self, sizes: Sequence[int]) -> float:
        """Time lost with these sizes captured, which rise."""
        held = smallest_holding(self.size, sizes)
        return self.unserved_ms if held is None else self.padded_ms(held)


@dataclass(frozen=True, slots=True)
class Group:
    """Steps that share their captured sizes, each of which costs ``num_bytes`` of device memory and ``seconds``.

    ``candidates`` are the sizes to choose from, rising: those that some step would be padded to.
    """

    demands: tuple[Demand, ...]
    candidates: tuple[int, ...]
    num_bytes: float = plans.DECODE_GRAPH_BYTES
    seconds: float = plans.DECODE_GRAPH_S

    @classmethod
    def of(cls, demands: Sequence[Demand], grid: Sequence[int], layers: int = 0) -> "Group":
        """A group whose candidates are the sizes of a rising grid that steps reach; ``layers`` of piecewise graphs."""
        reached = {smallest_holding(demand.size, grid) for demand in demands}
        candidates = tuple(size for size in grid if size in reached)
        pieces = (layers * plans.PIECE_BYTES, layers * plans.PIECE_S) if layers else ()
        return cls(tuple(demands), candidates, *pieces)

    def saved_ms(self, size: int, sizes: Sequence[int]) -> float:
        """Time that one more size saves beside ``sizes``, which rise."""
        index = bisect_left(sizes, size)
        below = sizes[index - 1] if index else 0
        return math.fsum(
            demand.lost_ms(sizes) - demand.padded_ms(size) for demand in self.demands if below < demand.size <= size
        )


@dataclass(slots=True)
class CaptureUsage:
    """Collects the steps of a run.

    ``model`` must pad nothing; ``routes``: it has experts. ``steps`` are by what would capture them, then by rows;
    ``beside_ms``, by SMs of the decode lane, is the time of prefill on the other SMs, and its time on the whole GPU.
    """

    model: PerformanceModel
    routes: bool
    steps: dict[GroupKey, dict[int, list[StepRecord]]] = field(default_factory=dict)
    beside_ms: dict[int, tuple[float, float]] = field(default_factory=dict)

    def note(self, record: StepRecord) -> None:
        """Add a launch. Those on the prefill lane are never captured."""
        placement, work = record.placement, record.work
        decode_sms = lane_sms(placement.partition)
        if placement.lane == "decode":
            sizes = self.steps.setdefault(PIECEWISE if work.tokens else decode_sms, {})
            sizes.setdefault(max(work.tokens + work.batch_size, placement.least_rows), []).append(record)
        elif decode_sms is not None:
            num_layers = self.model.num_layers
            last = num_layers if placement.last_layer is None else placement.last_layer
            alone_ms = self.model.prefill(work.tokens, work.pairs).ms * ((last - placement.first_layer) / num_layers)
            beside_ms, whole_ms = self.beside_ms.get(decode_sms, (0.0, 0.0))
            self.beside_ms[decode_sms] = beside_ms + record.device_ms, whole_ms + alone_ms

    def lost_percent(self, groups: dict[GroupKey, Group], plan: plans.CapturePlan) -> float:
        """Share of the steps' time that padding and missing sizes cost under a plan."""
        records = (each for sizes in self.steps.values() for same in sizes.values() for each in same)
        device_ms = math.fsum(each.device_ms for each in records)
        sizes_of = {entry.decode_sms: entry.batch_sizes for entry in plan.decode}
        lost_ms = math.fsum(
            demand.lost_ms(plan.piecewise_rows if key == PIECEWISE else sizes_of.get(key, ()))
            for key, group in groups.items()
            for demand in group.demands
            if demand.num_steps
        )
        return 100 * lost_ms / device_ms if device_ms else 0.0

    def groups(self, like: plans.CapturePlan) -> dict[GroupKey, Group]:
        """The steps by what captures them; ``like`` is a plan of the same model and engine.

        Piecewise graphs end where those of ``like`` do.
        """
        most = like.max_num_seqs
        grid = [size for size in (1, 2, 4) if size < most] + [*range(BATCH_STEP, most, BATCH_STEP), most]
        found: dict[GroupKey, Group] = {None: Group.of(self._whole_gpu(most), grid)}
        for sms in sorted(key for key in self.steps if isinstance(key, int)):
            found[sms] = Group.of([self._beside(sms, *item) for item in self.steps[sms].items()], grid)
        one = replace(like, decode=(plans.DecodeSizes(None, (like.max_num_seqs,)),), piecewise_rows=())
        num_bytes = one.graph_bytes(self.model.num_layers)
        found = {key: replace(group, num_bytes=num_bytes) for key, group in found.items()}
        rows = range(ROW_STEP, max(like.piecewise_rows, default=0) + 1, ROW_STEP)
        forwards = self.steps.get(PIECEWISE, {}).items()
        fitting = [self._forward(*item) for item in forwards if rows and item[0] <= rows[-1]]
        found[PIECEWISE] = Group.of(fitting, rows, self.model.num_layers)
        return found

    def _whole_gpu(self, max_num_seqs: int) -> list[Demand]:
        """Decode steps on the whole GPU, which must be served, and sizes that may yet come up."""
        seen = self.steps.get(None, {})
        demands = []
        for size, same in seen.items():
            padded_ms = self._padded_decode(size, _total(same, "kv_tokens") // len(same), len(same))
            demands.append(Demand(size, len(same), padded_ms, math.inf))
        every = [record for same in seen.values() for record in same]
        depth = max(_total(every, "kv_tokens") // max(_total(every, "batch_size"), 1), 1)
        unseen = set(batch_size_buckets(max_num_seqs)) - seen.keys()
        n = UNSEEN_SHARE * max(len(every), 1) / max(len(unseen), 1)
        return demands + [Demand(size, 0, self._padded_decode(size, size * depth, n), math.inf) for size in unseen]

    def _beside(self, decode_sms: int, size: int, same: Sequence[StepRecord]) -> Demand:
        """Decode steps beside prefill; without a graph the two take turns on the whole GPU, and lose that time."""
        beside_ms, whole_ms = self.beside_ms.get(decode_sms, (1.0, 0.0))
        n = len(same)
        kv_tokens = _total(same, "kv_tokens") // n
        split_ms = sum(record.device_ms for record in same) / n
        turns_ms = self.model.decode(size, kv_tokens).ms + split_ms * whole_ms / beside_ms
        lost_ms = n * max(turns_ms - split_ms, LEAST_SPLIT_GAIN * split_ms)
        return Demand(size, n, self._padded_decode(size, kv_tokens, n, decode_sms), lost_ms)

    def _forward(self, size: int, same: Sequence[StepRecord]) -> Demand:
        """Forwards with prompt tokens: padded to piecewise graphs, or launched kernel by kernel."""
        n, batch_size = len(same), _total(same, "batch_size")
        tokens, pairs = max(round(_total(same, "tokens") / n), 1), _total(same, "pairs") / n
        kv_tokens = _total(same, "kv_tokens") // n

        def ms(rows: int) -> float:
            padded = tokens + rows - size  # Padding attends to nothing.
            if not batch_size:
                return self.model.prefill(padded, pairs).ms
            return self.model.mixed(padded, pairs, max(round(batch_size / n), 1), kv_tokens).ms

        # The longer host time is lost in full: meanwhile the host launches nothing else.
        eager_ms = (GENERIC.eager_layer_ms - GENERIC.captured_layer_ms) * self.model.num_layers
        return Demand(size, n, _padded(ms, size, n), n * eager_ms)

    def _padded_decode(self, size: int, kv_tokens: int, n: float, sms: int | None = None) -> PaddedMs:
        def ms(rows: int) -> float:
            return PaddedModel(self.model, lambda *_: rows, routes=self.routes).decode(size, kv_tokens, sms).ms

        return _padded(ms, size, n)


def _total(same: Sequence[StepRecord], name: str) -> Any:
    return sum(getattr(record.work, name) for record in same)


def _padded(ms: PaddedMs, size: int, num_steps: float) -> PaddedMs:
    """Time that steps lose when padded to a number of rows."""
    ms, least_share = cache(ms), SINGLE_ROW_LOSS if size == 1 else 0.0
    return lambda rows: num_steps * max(ms(rows) - ms(size), least_share * ms(size) if rows > size else 0.0)


def propose(groups: dict[GroupKey, Group], budget: Budget, *, like: plans.CapturePlan) -> plans.CapturePlan:
    """A plan within a budget: greedily, the size that saves the most time for its share of the budget.

    Raises ConfigError where the budget does not allow a single graph.
    """
    num_bytes, seconds = groups[None].num_bytes, groups[None].seconds
    if not budget.affords(num_bytes, seconds):
        raise ConfigError(
            f"the whole GPU needs a graph of max_num_seqs={like.max_num_seqs} rows, about "
            f"{num_bytes / 1e9:.3f} GB and {seconds:.3f} s, but the budget is "
            f"{budget.memory_bytes / 1e9:g} GB and {budget.time_s:g} s: raise --memory-gb or --time-s"
        )
    chosen: dict[GroupKey, list[int]] = {name: [] for name in groups}
    chosen[None] = [like.max_num_seqs]

    def savings(name: GroupKey) -> list[tuple[float, int]]:
        group, sizes = groups[name], chosen[name]
        share = budget.share(group.num_bytes, group.seconds)
        least = _NEGLIGIBLE * max(sum(d.unserved_ms for d in group.demands if d.unserved_ms < math.inf), 1.0)
        found = [(group.saved_ms(size, sizes), size) for size in group.candidates if size not in sizes]
        return [(saved / share, size) for saved, size in found if saved > least]

    ratings = {name: savings(name) for name in groups}
    while True:
        affordable = [
            (max(rated), name)
            for name, rated in ratings.items()
            if rated and budget.affords(num_bytes + groups[name].num_bytes, seconds + groups[name].seconds)
        ]
        if not affordable:
            break
        (_, size), name = max(affordable, key=lambda item: item[0])
        chosen[name] = sorted([*chosen[name], size])
        num_bytes += groups[name].num_bytes
        seconds += groups[name].seconds
        ratings[name] = savings(name)
    decode = ((name, sizes) for name, sizes in chosen.items() if not isinstance(name, str) and sizes)
    return replace(
        like,
        decode=tuple(plans.DecodeSizes(name, tuple(sizes)) for name, sizes in decode),
        piecewise_rows=tuple(chosen[PIECEWISE]),
    )
