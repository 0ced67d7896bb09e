"""What a decision trace tells: its records, as ``engine/trace.py`` writes them and ``trace_file.py`` reads them."""

from dataclasses import dataclass
from typing import Any, Literal

TRACE_FORMAT = "bullet-graph decision trace"
TRACE_FORMAT_VERSION = 1

LaneName = Literal["decode", "prefill"]
LANES: tuple[LaneName, LaneName] = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Where a trace comes from.

    Attributes:
        model: its name.
        device: its name.
        num_sms: SMs of the GPU; None where there is none to divide.
        num_layers: layers of the model.
        policy: the policy asked for.
        slo: the engine's latency targets, in words.
        version: of the package.
    """

    model: str
    device: str
    num_sms: int | None
    num_layers: int
    policy: str
    slo: str
    version: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, and what there was to do when it was made.

    Attributes:
        decision: its number.
        time_s: on the engine's clock.
        running: sequences that decoded.
        waiting: prompts that waited, as far as the planner looked.
        kv_tokens: tokens that the running sequences attended to.
        queued_tokens: tokens of all waiting prompts.
        budget_ms: longest interval between tokens that held every TPOT target; None without targets.
        slack_ms: longest wait for the next token that did; None without targets.
        policy: the policy chosen.
        decode: decode steps could be launched.
        chunk_tokens: most prompt rows of the next chunk.
        slice_layers: layers of each slice on the prefill lane.
        decode_sms: SMs of the decode lane; None for all.
        prefill_sms: SMs of the prefill lane; None for all.
        bound: what decided.
        options: what was weighed, with predictions.
        count: ticks in a row at which the same was decided.
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
    """A step, or some layers of one, given to a lane.

    Attributes:
        ticket: the executor's number for it, unique among those under way.
        lane: where it ran.
        decision: the decision that it followed.
        time_s: when the host launched it.
        policy: its policy.
        decode_rows: sequences that decoded.
        prefill_rows: prompt tokens.
        layers: layers it ran.
        decode_sms: SMs of the decode lane at the time; None for all.
        prefill_sms: SMs of the prefill lane at the time; None for all.
        predicted_ms: time on the device, foretold; None without a prediction.
        retired_s: when the host saw that it was over; None if it never did.
        device_ms: time on the device, measured; None likewise.
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
        request_id: the caller's id.
        reason: ``stop``, ``length``, ``abort`` or ``error``.
        prompt_tokens: of its prompt.
        output_tokens: of its output.
        arrival_s: on the engine's clock.
        first_scheduled_s: when its first chunk was launched; None if none was.
        token_us: when each token reached the host, in microseconds after its arrival.
        ttft_limit_ms: its target for the first token; None without one.
        tpot_limit_ms: its target for the mean time between tokens; None without one.
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
    """A trace file's content.

    Attributes:
        header: where it comes from.
        decisions: in order.
        launches: in order.
        requests: those that ended, in order.
        notes: what is missing from it.
        start_s: its first event, or the first arrival, on the engine's clock.
        end_s: its last event.
    """

    header: TraceHeader
    decisions: tuple[Decision, ...]
    launches: tuple[Launch, ...]
    requests: tuple[TracedRequest, ...]
    notes: tuple[str, ...]
    start_s: float
    end_s: float
