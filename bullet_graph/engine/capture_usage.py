"""Which captured graphs a served workload asks for, and what time they save it. No torch."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from bullet_graph.graphs.key import EAGER_LAYER_MS
from bullet_graph.graphs.size_choice import Demand
from bullet_graph.partition.masks import SMS_PER_TPC
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.runtime.step_work import StepRecord

CAPTURED_LAYER_MS = 0.08
"""What a layer of a forward costs the host that runs in captured pieces: 2.5 ms for 32 layers (bench/LOG.md)."""

SINGLE_ROW_LOSS = 0.146
"""Least share of a step that one row loses when it is padded: 4.24 ms with the matrix kernel that one row has of its
own, 4.86 ms with the library's (bench/LOG.md). No table tells, as it goes in a line from one row to the next size."""

LEAST_SPLIT_GAIN = 0.05
"""Least share of its step that a split gains over taking turns: the planner took it, if not for throughput, then for a
target that turns would miss."""

UNSEEN_SHARE = 0.01
"""Batch sizes of the whole GPU that never came up count as this share of its decode steps, all together: a burst may
bring them, and must not be padded to the very largest size."""


@dataclass(slots=True)
class Rows:
    """Steps with the same number of rows, added up.

    Attributes:
        num_steps: how many.
        tokens: prompt rows.
        pairs: (query, key) pairs of their attention.
        batch_size: decode rows.
        kv_tokens: tokens that these attend to.
        device_ms: time on the device.
    """

    num_steps: int = 0
    tokens: int = 0
    pairs: float = 0.0
    batch_size: int = 0
    kv_tokens: int = 0
    device_ms: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Add one step."""
        work = record.work
        self.num_steps += 1
        self.tokens += work.tokens
        self.pairs += work.pairs
        self.batch_size += work.batch_size
        self.kv_tokens += work.kv_tokens
        self.device_ms += record.device_ms


@dataclass(slots=True)
class CaptureUsage:
    """Collects the steps of a run.

    Attributes:
        model: of the device, that pads nothing.
        decode: decode steps by SMs of the decode lane (None: the whole GPU), then by batch size.
        forwards: whole forwards with prompt tokens on the decode lane, by rows.
        beside_ms: by SMs of the decode lane: time of the slices of prefill on the other SMs, and what they would have
            taken on the whole GPU.
    """

    model: PerformanceModel
    decode: dict[int | None, dict[int, Rows]] = field(default_factory=dict)
    forwards: dict[int, Rows] = field(default_factory=dict)
    beside_ms: dict[int, tuple[float, float]] = field(default_factory=dict)

    def note(self, record: StepRecord) -> None:
        """Take a launch in; those on the prefill lane are never captured."""
        placement, work = record.placement, record.work
        tpcs = placement.partition.decode_tpcs
        decode_sms = None if tpcs is None else SMS_PER_TPC * tpcs
        if placement.lane == "prefill":
            if decode_sms is not None:
                self._note_slice(decode_sms, record)
        elif work.tokens:
            self.forwards.setdefault(work.tokens + work.batch_size, Rows()).add(record)
        else:
            sizes = self.decode.setdefault(decode_sms, {})
            sizes.setdefault(work.batch_size, Rows()).add(record)

    def _note_slice(self, decode_sms: int, record: StepRecord) -> None:
        num_layers, placement = self.model.num_layers, record.placement
        last = num_layers if placement.last_layer is None else placement.last_layer
        share = (last - placement.first_layer) / num_layers
        alone_ms = share * self.model.prefill(record.work.tokens, record.work.pairs).ms
        beside_ms, whole_ms = self.beside_ms.get(decode_sms, (0.0, 0.0))
        self.beside_ms[decode_sms] = beside_ms + record.device_ms, whole_ms + alone_ms

    def whole_gpu_demands(self, unseen: Iterable[int]) -> list[Demand]:
        """The decode steps on the whole GPU, which must be served, and sizes that may yet come up."""
        seen = self.decode.get(None, {})
        total = Rows()
        for rows in seen.values():
            total.num_steps += rows.num_steps
            total.batch_size += rows.batch_size
            total.kv_tokens += rows.kv_tokens
        depth = max(total.kv_tokens // max(total.batch_size, 1), 1)
        demands = [
            Demand(size, rows.num_steps, _PaddedDecode(self.model, None, size, rows), math.inf)
            for size, rows in sorted(seen.items())
        ]
        new = sorted(set(unseen) - seen.keys())
        for size in new:
            one = _PaddedDecode(
                self.model, None, size, Rows(num_steps=1, batch_size=size, kv_tokens=size * depth)
            )
            weight = UNSEEN_SHARE * max(total.num_steps, 1) / len(new)
            demands.append(Demand(size, 0, partial(_scaled, one, weight), math.inf))
        return demands

    def partition_demands(self, decode_sms: int) -> list[Demand]:
        """The decode steps beside prefill on so many SMs.

        A step that is padded costs what its padded rows cost. One that a part of the GPU has no graph for takes its
        turn with prefill on the whole GPU instead, which costs what both would take there, one after the other.
        """
        return [
            Demand(
                size,
                rows.num_steps,
                _PaddedDecode(self.model, decode_sms, size, rows),
                self._turns_ms(decode_sms, size, rows),
            )
            for size, rows in sorted(self.decode[decode_sms].items())
        ]

    def _turns_ms(self, decode_sms: int, size: int, rows: Rows) -> float:
        beside_ms, whole_ms = self.beside_ms.get(decode_sms, (1.0, 0.0))
        alone_ms = self.model.decode(size, rows.kv_tokens // rows.num_steps).ms
        split_ms = rows.device_ms / rows.num_steps
        turns_ms = alone_ms + split_ms * whole_ms / beside_ms
        return rows.num_steps * max(turns_ms - split_ms, LEAST_SPLIT_GAIN * split_ms)

    def forward_demands(self, max_rows: int) -> list[Demand]:
        """Forwards with prompt tokens of up to so many rows: padded to captured pieces, or launched kernel by kernel.

        What that takes longer on the host is lost in full: until it is done, the host launches and hands out nothing
        else.
        """
        eager_ms = (EAGER_LAYER_MS - CAPTURED_LAYER_MS) * self.model.num_layers
        return [
            Demand(size, rows.num_steps, _PaddedForward(self.model, size, rows), rows.num_steps * eager_ms)
            for size, rows in sorted(self.forwards.items())
            if size <= max_rows
        ]


@dataclass(slots=True)
class _PaddedDecode:
    """Time lost by decode steps of a size when they are padded; asked again and again for the same."""

    model: PerformanceModel
    decode_sms: int | None
    size: int
    rows: Rows
    known_ms: dict[int, float] = field(default_factory=dict)

    def __call__(self, padded: int) -> float:
        if padded not in self.known_ms:
            own_ms = self._ms(self.size)
            least = SINGLE_ROW_LOSS * own_ms if self.size == 1 < padded else 0.0
            self.known_ms[padded] = self.rows.num_steps * max(self._ms(padded) - own_ms, least)
        return self.known_ms[padded]

    def _ms(self, batch_size: int) -> float:
        return self.model.decode(batch_size, self.rows.kv_tokens // self.rows.num_steps, self.decode_sms).ms


@dataclass(slots=True)
class _PaddedForward:
    """Time lost by forwards with prompt tokens when they are padded."""

    model: PerformanceModel
    size: int
    rows: Rows
    known_ms: dict[int, float] = field(default_factory=dict)

    def __call__(self, padded: int) -> float:
        if padded not in self.known_ms:
            self.known_ms[padded] = self.rows.num_steps * max(self.ms(padded) - self.ms(self.size), 0.0)
        return self.known_ms[padded]

    def ms(self, size: int) -> float:
        """Time of one of them with so many rows; rows of padding attend to nothing."""
        mean, n = self.rows, self.rows.num_steps
        tokens, pairs = max(round(mean.tokens / n), 1) + size - self.size, mean.pairs / n
        if not mean.batch_size:
            return self.model.prefill(tokens, pairs).ms
        return self.model.mixed(tokens, pairs, max(round(mean.batch_size / n), 1), mean.kv_tokens // n).ms


def _scaled(lost_ms: Callable[[int], float], factor: float, padded: int) -> float:
    return factor * lost_ms(padded)
