"""Decision traces: their records, one JSON object a line, and their reader. ``engine/trace.py`` writes them."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from bullet_graph.errors import TraceError, first_problem

TRACE_FORMAT = "bullet-graph decision trace"
TRACE_FORMAT_VERSION = 2
WARMUP_PREFIX = "warmup-"
"""Of the ids of requests before a measurement, or before a server listens."""

LaneName = Literal["decode", "prefill"]
LANES: tuple[LaneName, LaneName] = ("decode", "prefill")

# Larger is no count and no time; and beyond it floats no longer hold whole microseconds.
_LIMIT = 2**53
Whole = Annotated[int, Field(strict=True, gt=-_LIMIT, lt=_LIMIT)]
Number = Annotated[float, Field(strict=True, gt=-_LIMIT, lt=_LIMIT)]


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Where a trace comes from; ``num_sms`` is None on a device without SM partitions, ``slo`` is text."""

    model: str
    device: str
    num_sms: Whole | None
    num_layers: Whole
    policy: str
    slo: str
    version: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, and the load it was made for, with the fields of ``planner/plan.py``. Times are on the engine's clock.

    Attributes:
        waiting: prompts that waited, as far as the planner looked; ``queued_tokens`` is of all.
        budget_ms, slack_ms: None without targets.
        decode_sms, prefill_sms: SMs of the lanes; None for all.
        count: consecutive ticks with this decision.
    """

    decision: Whole
    time_s: Number
    running: Whole
    waiting: Whole
    kv_tokens: Whole
    queued_tokens: Whole
    budget_ms: Number | None
    slack_ms: Number | None
    policy: str
    decode: Annotated[bool, Field(strict=True)]
    chunk_tokens: Whole
    slice_layers: Whole
    decode_sms: Whole | None
    prefill_sms: Whole | None
    bound: str
    options: tuple[dict[str, Any], ...]
    count: Whole = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A step, or some layers of one, on a lane. Times are on the engine's clock.

    Attributes:
        ticket: the executor's number for it, unique among those in flight.
        decode_sms, prefill_sms: SMs of the lanes at the time; None for all.
        retired_s, device_ms: when the host saw its end, and the measured device time; None if it never ended.
    """

    ticket: Whole
    lane: LaneName
    decision: Whole
    time_s: Number
    policy: str
    decode_rows: Whole
    prefill_rows: Whole
    layers: Whole
    decode_sms: Whole | None
    prefill_sms: Whole | None
    predicted_ms: Number | None
    retired_s: Number | None = None
    device_ms: Number | None = None


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that ended because of ``stop``, ``length``, ``abort`` or ``error``; times are on the engine's clock.

    ``cached_tokens`` of its prompt came from the prefix cache. ``first_scheduled_s`` is the launch of its first chunk.
    ``token_us`` says when each token reached the host, in microseconds after its arrival.
    """

    request_id: str
    reason: str
    prompt_tokens: Whole
    output_tokens: Whole
    arrival_s: Number
    first_scheduled_s: Number | None
    token_us: tuple[Whole, ...]
    ttft_limit_ms: Number | None
    tpot_limit_ms: Number | None
    cached_tokens: Whole = 0

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token; None without one."""
        return self.token_us[0] / 1e3 if self.token_us else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time between tokens; None for fewer than two."""
        count = len(self.token_us)
        return (self.token_us[-1] - self.token_us[0]) / (count - 1) / 1e3 if count > 1 else None


@dataclass(frozen=True, slots=True)
class Trace:
    """The content of a trace file, in order; ``start_s`` is its first event or arrival, ``notes`` say what it lacks."""

    header: TraceHeader
    decisions: tuple[Decision, ...]
    launches: tuple[Launch, ...]
    requests: tuple[TracedRequest, ...]
    notes: tuple[str, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Repeat:
    decision: Whole
    count: Whole
    time_s: Number


@dataclass(frozen=True, slots=True)
class _Retirement:
    ticket: Whole
    time_s: Number
    device_ms: Number


_Record = TraceHeader | Decision | _Repeat | Launch | _Retirement | TracedRequest
_HEADER: TypeAdapter[_Record] = TypeAdapter(TraceHeader)
_RECORDS: Mapping[str, TypeAdapter[_Record]] = MappingProxyType(
    {
        "decision": TypeAdapter(Decision),
        "repeat": TypeAdapter(_Repeat),
        "launch": TypeAdapter(Launch),
        "retire": TypeAdapter(_Retirement),
        "request": TypeAdapter(TracedRequest),
    }
)


def read_trace(path: Path) -> Trace:
    """Read a trace file; a warm-up, and a last line that a crash cut short, are left out, with a note.

    Raises TraceError, with file and line, for what cannot be read, is no trace or another version's, or is broken.
    """
    header: TraceHeader | None = None
    decisions: dict[int, Decision] = {}
    launches, requests, notes = list[Launch](), list[TracedRequest](), list[str]()
    pending: dict[int, int] = {}  # index of each launch under way, by ticket
    last_s = -math.inf
    for place, record in _records(path, notes):
        try:
            match record:
                case TraceHeader():
                    header = record
                    continue
                case Decision():
                    decisions[record.decision] = record
                case _Repeat(number, count):
                    decision = decisions[number]
                    decisions[number] = dataclasses.replace(decision, count=decision.count + count)
                case Launch():
                    pending[record.ticket] = len(launches)
                    launches.append(record)
                case _Retirement(ticket, time_s, device_ms):
                    index = pending.pop(ticket)
                    launches[index] = dataclasses.replace(launches[index], retired_s=time_s, device_ms=device_ms)
                case TracedRequest():
                    requests.append(record)
                    if record.token_us:
                        last_s = max(last_s, record.arrival_s + record.token_us[-1] / 1e6)
                    continue
        except KeyError as missing:
            raise TraceError(f"{place} refers to {missing}, which is on no line before; the file is damaged") from None
        last_s = max(last_s, record.time_s)
    if header is None:
        raise TraceError(f"{path}: the file is empty; name a file that bullet-graph's --trace-decisions wrote")
    if pending:
        notes.append(f"launches that were never seen to end, and are left out: {len(pending)}")
    warm_up, warm_s = [r for r in requests if r.request_id.startswith(WARMUP_PREFIX)], -math.inf
    if 0 < len(warm_up) < len(requests):
        notes.append(f"requests of the warm-up, left out with all that came before: {len(warm_up)}")
        warm_s = max(r.arrival_s + (r.token_us or (0,))[-1] / 1e6 for r in warm_up)
        requests = [r for r in requests if not r.request_id.startswith(WARMUP_PREFIX)]
    made = tuple(d for d in decisions.values() if d.time_s > warm_s)
    begun = tuple(x for x in launches if x.time_s > warm_s)
    starts = [d.time_s for d in made[:1]] + [x.time_s for x in begun[:1]]
    start_s = min(starts + [r.arrival_s for r in requests], default=0.0)
    return Trace(header, made, begun, tuple(requests), tuple(notes), start_s, max(last_s, start_s))


def _records(path: Path, notes: list[str]) -> Iterator[tuple[str, _Record]]:
    """The file's records, the header first, each with its place in words."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number}:"
                try:
                    content = json.loads(line.decode("utf-8"), parse_constant=int)  # which NaN is not
                except (ValueError, RecursionError):
                    if number > 1 and not line.endswith(b"\n"):
                        notes.append(f"line {number}, the last, was cut short and is left out")
                        return
                    raise TraceError(
                        f"{place} must hold one JSON object, but does not; the file is no trace, or is damaged"
                    ) from None
                adapter = _adapter(place, content, is_first=number == 1)
                try:
                    yield f"{place} {content.get('type')}", adapter.validate_python(content)
                except ValidationError as error:
                    raise TraceError(f"{place} {first_problem(error)}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); name a file of --trace-decisions") from None


def _adapter(place: str, content: object, *, is_first: bool) -> TypeAdapter[_Record]:
    values = content if isinstance(content, dict) else {}
    if not is_first:
        kind = values.get("type")
        if isinstance(kind, str) and kind in _RECORDS:
            return _RECORDS[kind]
        raise TraceError(f"{place} must have a type among {', '.join(_RECORDS)}, but has {kind!r}")
    if values.get("format") != TRACE_FORMAT:
        raise TraceError(f"{place} does not begin a decision trace; name a file that --trace-decisions wrote")
    if (found := values.get("format_version")) != TRACE_FORMAT_VERSION:
        raise TraceError(
            f"{place} format version {TRACE_FORMAT_VERSION} is required, but the trace has {found!r}; read it with "
            f"the bullet-graph that wrote it ({values.get('version')})"
        )
    return _HEADER
