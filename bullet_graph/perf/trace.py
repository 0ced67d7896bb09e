"""Decision traces: their records, one JSON object a line, and their reader. ``engine/trace.py`` writes them."""

import dataclasses
import json
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bullet_graph.errors import TraceError

TRACE_FORMAT = "bullet-graph decision trace"
TRACE_FORMAT_VERSION = 2

LaneName = Literal["decode", "prefill"]
LANES: tuple[LaneName, LaneName] = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Where a trace comes from; ``num_sms`` is None on a device without SM partitions, ``slo`` is text."""

    model: str
    device: str
    num_sms: int | None
    num_layers: int
    policy: str
    slo: str
    version: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, and the load it was made for. Times are on the engine's clock.

    Attributes:
        running: sequences that decoded.
        waiting: prompts that waited, as far as the planner looked; ``queued_tokens`` is of all.
        kv_tokens: tokens that the running sequences attended to.
        budget_ms: longest interval between tokens that holds every TPOT target; None without targets.
        slack_ms: longest wait for the next token that does; None without targets.
        decode: whether decode steps may be launched.
        chunk_tokens: most prompt rows of the next chunk.
        slice_layers: layers of each launch on the prefill lane.
        decode_sms, prefill_sms: SMs of the lanes; None for all.
        bound: what decided.
        options: the options considered, with their predictions.
        count: consecutive ticks with this decision.
    """

    decision: int
    time_s: float
    running: int
    waiting: int
    kv_tokens: int
    queued_tokens: int
    budget_ms: float | None
    slack_ms: float | None
    policy: str
    decode: bool
    chunk_tokens: int
    slice_layers: int
    decode_sms: int | None
    prefill_sms: int | None
    bound: str
    options: tuple[dict[str, Any], ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A step, or some layers of one, on a lane.

    Attributes:
        ticket: the executor's number for it, unique among those in flight.
        decision: the number of the decision that it followed.
        time_s: when the host launched it, on the engine's clock.
        decode_sms, prefill_sms: SMs of the lanes at the time; None for all.
        predicted_ms: predicted device time; None without a prediction.
        retired_s, device_ms: when the host saw its end, and the measured device time; None if it never ended.
    """

    ticket: int
    lane: LaneName
    decision: int
    time_s: float
    policy: str
    decode_rows: int
    prefill_rows: int
    layers: int
    decode_sms: int | None
    prefill_sms: int | None
    predicted_ms: float | None
    retired_s: float | None = None
    device_ms: float | None = None


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that ended.

    Attributes:
        reason: ``stop``, ``length``, ``abort`` or ``error``.
        arrival_s: on the engine's clock.
        first_scheduled_s: launch of its first chunk; None if there was none.
        token_us: when each token reached the host, in microseconds after its arrival.
        ttft_limit_ms, tpot_limit_ms: its targets; None without one.
    """

    request_id: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    first_scheduled_s: float | None
    token_us: tuple[int, ...]
    ttft_limit_ms: float | None
    tpot_limit_ms: float | None

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


# Larger is no count and no time; and beyond it floats no longer hold whole microseconds.
_LIMIT = 2**53

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class _Repeat:
    decision: int
    count: int
    time_s: float


@dataclass(frozen=True, slots=True)
class _Retirement:
    ticket: int
    time_s: float
    device_ms: float


_AnyRecord = Decision | _Repeat | Launch | _Retirement | TracedRequest
_RECORDS: dict[str, type[_AnyRecord]] = {
    "decision": Decision,
    "repeat": _Repeat,
    "launch": Launch,
    "retire": _Retirement,
    "request": TracedRequest,
}


def read_trace(path: Path) -> Trace:
    """Read a trace file; a last line that a crash cut short is left out, with a note.

    Raises:
        TraceError: the file cannot be read, is no trace or one of another version, or a line is broken; with the
            file and line.
    """
    reader = _Reader(path)
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                reader.take(number, line)
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read ({error.strerror}); name a file that --trace-decisions wrote"
        ) from None
    return reader.trace()


class _Reader:
    """Takes a file's lines one by one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._header: TraceHeader | None = None
        self._decisions: dict[int, Decision] = {}
        self._launches: list[Launch] = []
        self._pending: dict[int, int] = {}  # index of each launch under way, by ticket
        self._requests: list[TracedRequest] = []
        self._notes: list[str] = []
        self._last_s = -math.inf

    def take(self, number: int, line: bytes) -> None:
        self._number = number
        try:
            content = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            if self._header is not None and not line.endswith(b"\n"):
                self._notes.append(f"line {number}, the last, was cut short and is left out")
                return
            raise self._error(
                "must hold one JSON object, but does not; the file is no trace, or is damaged"
            ) from None
        if self._header is None:
            self._header = self._read_header(content)
            return
        kind = content.get("type") if isinstance(content, dict) else None
        record_type = _RECORDS.get(kind) if isinstance(kind, str) else None
        if record_type is None:
            raise self._error(f"must have a type among {', '.join(_RECORDS)}, but has {kind!r}")
        record = self._parse(record_type, content)
        try:
            self._last_s = max(self._last_s, self._add(record))
        except KeyError as missing:
            raise self._error(
                f"{kind} refers to {missing}, which is on no line before; the file is damaged"
            ) from None

    def trace(self) -> Trace:
        if self._header is None:
            raise TraceError(
                f"{self._path}: the file is empty; name a file that bullet-graph's --trace-decisions wrote"
            )
        if self._pending:
            self._notes.append(
                f"launches that were never seen to end, and are left out: {len(self._pending)}"
            )
        decisions, launches = tuple(self._decisions.values()), tuple(self._launches)
        requests = tuple(self._requests)
        starts = [d.time_s for d in decisions[:1]] + [x.time_s for x in launches[:1]]
        starts += [r.arrival_s for r in requests]
        start_s = min(starts, default=0.0)
        end_s = max(self._last_s, start_s)
        return Trace(self._header, decisions, launches, requests, tuple(self._notes), start_s, end_s)

    def _read_header(self, content: object) -> TraceHeader:
        if not isinstance(content, dict) or content.get("format") != TRACE_FORMAT:
            raise self._error("does not begin a decision trace; name a file that --trace-decisions wrote")
        if (found := content.get("format_version")) != TRACE_FORMAT_VERSION:
            raise self._error(
                f"format version {TRACE_FORMAT_VERSION} is required, but the trace has {found!r}; read it with the "
                f"bullet-graph that wrote it ({content.get('version')})"
            )
        return self._parse(TraceHeader, content)

    def _parse(self, record_type: type[_Record], content: dict[str, object]) -> _Record:
        fields: dict[str, Any] = {}
        for name, wanted, fits in _CHECKS[record_type]:
            value = content.get(name)
            if not fits(value):
                raise self._error(f"{name} must be {wanted}, but is {json.dumps(value)[:80]}")
            fields[name] = tuple(value) if isinstance(value, list) else value
        return record_type(**fields)

    def _add(self, record: _AnyRecord) -> float:
        """Keep a record; returns the time of its last event."""
        match record:
            case Decision():
                self._decisions[record.decision] = record
            case _Repeat():
                decision = self._decisions[record.decision]
                count = decision.count + record.count
                self._decisions[record.decision] = dataclasses.replace(decision, count=count)
            case Launch():
                self._pending[record.ticket] = len(self._launches)
                self._launches.append(record)
            case _Retirement():
                index = self._pending.pop(record.ticket)
                self._launches[index] = dataclasses.replace(
                    self._launches[index], retired_s=record.time_s, device_ms=record.device_ms
                )
            case TracedRequest():
                self._requests.append(record)
                return record.arrival_s + record.token_us[-1] / 1e6 if record.token_us else -math.inf
        return record.time_s

    def _error(self, problem: str) -> TraceError:
        return TraceError(f"{self._path}, line {self._number}: {problem}")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _check(hint: Any) -> tuple[str, Callable[[object], bool]]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        parts = [_check(argument) for argument in arguments]
        return " or ".join(wanted for wanted, _ in parts), lambda v: any(fits(v) for _, fits in parts)
    if origin is Literal:
        return f"one of {', '.join(arguments)}", lambda v: v in arguments
    if origin is tuple:
        wanted, fits = _check(arguments[0])
        return f"a list, each of it {wanted}", lambda v: isinstance(v, list) and all(map(fits, v))
    return _PLAIN[origin or hint]


_PLAIN: dict[object, tuple[str, Callable[[object], bool]]] = {
    int: ("an integer", lambda v: isinstance(v, int) and not isinstance(v, bool) and abs(v) < _LIMIT),
    float: (
        "a number",
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < _LIMIT,
    ),
    bool: ("true or false", lambda v: isinstance(v, bool)),
    str: ("a text", lambda v: isinstance(v, str)),
    dict: ("an object", lambda v: isinstance(v, dict)),
    types.NoneType: ("null", lambda v: v is None),
}


def _field_checks(record_type: Any) -> list[tuple[str, str, Callable[[object], bool]]]:
    """Name, form in words and test of each field that a line of the type must have."""
    hints = get_type_hints(record_type)
    required = (f for f in dataclasses.fields(record_type) if f.default is dataclasses.MISSING)
    return [(f.name, *_check(hints[f.name])) for f in required]


_CHECKS: dict[type, list[tuple[str, str, Callable[[object], bool]]]] = {
    record_type: _field_checks(record_type) for record_type in (TraceHeader, *_RECORDS.values())
}
