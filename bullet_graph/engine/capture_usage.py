"""Which captured graphs a served workload asks for, and what time they save it. No torch."""

from dataclasses import dataclass, field

from bullet_graph.graphs.size_choice import Demand
from bullet_graph.partition.spec import SMS_PER_TPC
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.runtime.simulated import StepRecord

EAGER_LAYER_MS = 0.2
"""What a layer of a forward costs the host that is launched kernel by kernel, whatever its rows
(``graphs/layer_graphs.py``); a forward that is shorter on the device waits for that."""


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
        self.num_steps += 1
        self.tokens += record.tokens
        self.pairs += record.pairs
        self.batch_size += record.batch_size
        self.kv_tokens += record.kv_tokens
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
        placement = record.placement
        tpcs = placement.partition.decode_tpcs
        decode_sms = None if tpcs is None else SMS_PER_TPC * tpcs
        if placement.lane == "prefill":
            if decode_sms is not None:
                self._note_slice(decode_sms, record)
        elif record.tokens:
            self.forwards.setdefault(record.tokens + record.batch_size, Rows()).add(record)
        else:
            sizes = self.decode.setdefault(decode_sms, {})
            sizes.setdefault(record.batch_size, Rows()).add(record)

    def _note_slice(self, decode_sms: int, record: StepRecord) -> None:
        num_layers, placement = self.model.num_layers, record.placement
        last = num_layers if placement.last_layer is None else placement.last_layer
        share = (last - placement.first_layer) / num_layers
        alone_ms = share * self.model.prefill(record.tokens, record.pairs).ms
        beside_ms, whole_ms = self.beside_ms.get(decode_sms, (0.0, 0.0))
        self.beside_ms[decode_sms] = beside_ms + record.device_ms, whole_ms + alone_ms

    def decode_demands(self, decode_sms: int | None, unserved_ms: float) -> list[Demand]:
        """The decode steps on so many SMs; those on the whole GPU must be served.

        A step that is padded costs what its padded rows cost. One that a part of the GPU has no graph for takes its
        turn with prefill on the whole GPU instead, which costs what both would take there, one after the other.

        Args:
            unserved_ms: of a step on the whole GPU that no graph holds.
        """
        demands = []
        for size, rows in sorted(self.decode.get(decode_sms, {}).items()):
            missing = unserved_ms if decode_sms is None else self._turns_ms(decode_sms, size, rows)
            demands.append(
                Demand(size, rows.num_steps, _PaddedDecode(self.model, decode_sms, size, rows), missing)
            )
        return demands

    def _turns_ms(self, decode_sms: int, size: int, rows: Rows) -> float:
        beside_ms, whole_ms = self.beside_ms.get(decode_sms, (1.0, 0.0))
        alone_ms = self.model.decode(size, rows.kv_tokens // rows.num_steps).ms
        split_ms = rows.device_ms / rows.num_steps
        return rows.num_steps * max(alone_ms + split_ms * whole_ms / beside_ms - split_ms, 0.0)

    def forward_demands(self) -> list[Demand]:
        """Forwards with prompt tokens: padded to captured pieces, or launched kernel by kernel at the host's speed."""
        demands = []
        eager_ms = EAGER_LAYER_MS * self.model.num_layers
        for size, rows in sorted(self.forwards.items()):
            padded = _PaddedForward(self.model, size, rows)
            unserved_ms = rows.num_steps * max(eager_ms - padded.ms(size), 0.0)
            demands.append(Demand(size, rows.num_steps, padded, unserved_ms))
        return demands


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
            lost = max(self._ms(padded) - self._ms(self.size), 0.0)
            self.known_ms[padded] = self.rows.num_steps * lost
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
