"""Sums up a decision trace: device time by policy, prediction errors, why targets were missed; and Chrome's format."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet_graph.perf.performance import size_of
from bullet_graph.perf.trace import LANES, Decision, LaneName, Launch, Trace, TracedRequest, TraceHeader

FloatArray = NDArray[np.float64]

IDLE = "idle"
"""In the place of a policy's name: no launch was on the device."""

# Shares are sums of floats: less than this is nothing.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a trace, on the engine's clock."""

    start_s: float
    end_s: float

    def holds(self, time_s: float) -> bool:
        return self.start_s <= time_s <= self.end_s


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """``n`` measured launches on the device, and the ``m`` stretches of time between one start or end and the next.

    Attributes:
        start_s, end_s: [n].
        edges_s: [m + 1], where each stretch begins and the last one ends.
        active: by lane, [m]: index of the launch on it in each stretch; −1 for none.
    """

    launches: tuple[Launch, ...]
    start_s: FloatArray
    end_s: FloatArray
    edges_s: FloatArray
    active: dict[LaneName, NDArray[np.int64]]

    @classmethod
    def of(cls, launches: Iterable[Launch]) -> "Occupancy":
        """Place the launches in time.

        Only a launch's duration and when the host saw its end are known. A lane runs its launches in order, so each
        ended when the next began, at the latest.
        """
        measured = tuple(launch for launch in launches if launch.device_ms is not None)
        start_s, end_s = np.zeros(len(measured)), np.zeros(len(measured))
        next_start_s = dict.fromkeys(LANES, np.inf)
        for index in range(len(measured) - 1, -1, -1):
            launch = measured[index]
            assert launch.retired_s is not None
            assert launch.device_ms is not None
            end_s[index] = min(launch.retired_s, next_start_s[launch.lane])
            start_s[index] = next_start_s[launch.lane] = end_s[index] - launch.device_ms / 1e3
        edges_s = np.unique(np.concatenate((start_s, end_s))) if measured else np.zeros(1)
        middle_s = (edges_s[1:] + edges_s[:-1]) / 2
        active = {}
        for lane in LANES:
            active[lane] = np.full(middle_s.size, -1, dtype=np.int64)
            own = np.array([i for i, launch in enumerate(measured) if launch.lane == lane], dtype=np.int64)
            if own.size:
                last = np.searchsorted(start_s[own], middle_s, side="right") - 1
                on_device = (last >= 0) & (end_s[own[last]] > middle_s)
                active[lane][on_device] = own[last][on_device]
        return cls(measured, start_s, end_s, edges_s, active)

    def on_lane(self, lane: LaneName, values: FloatArray) -> FloatArray:
        """[m]: in each stretch, the value ([n]) of the launch on the lane, or 0."""
        index = self.active[lane]
        return np.where(index >= 0, values[index], 0.0) if len(self.launches) else np.zeros(index.size)

    def sms(self, num_sms: int) -> FloatArray:
        """[n]: the SMs that each launch may use, of a device with ``num_sms``."""
        own = (x.decode_sms if x.lane == "decode" else x.prefill_sms for x in self.launches)
        return np.array([num_sms if sms is None else sms for sms in own], dtype=np.float64)

    def by_policy(self) -> dict[str, FloatArray]:
        """[m] by policy, in order of appearance: its part of each stretch: 1, half of it beside another, or 0."""
        policies = np.array([launch.policy for launch in self.launches])
        lanes_busy = np.maximum(sum((self.active[lane] >= 0).astype(np.float64) for lane in LANES), 1.0)
        return {
            policy: sum(self.on_lane(lane, (policies == policy).astype(np.float64)) for lane in LANES) / lanes_busy
            for policy in dict.fromkeys(launch.policy for launch in self.launches)
        }

    def accumulated(self, weights: FloatArray, at_s: FloatArray) -> FloatArray:
        """Seconds up to each of the times, each stretch counted by its weight ([m])."""
        sums = np.concatenate(([0.0], np.cumsum(weights * np.diff(self.edges_s))))
        return np.asarray(np.interp(at_s, self.edges_s, sums), dtype=np.float64)

    def share(self, weights: FloatArray, window: Window) -> float:
        """Mean weight ([m]) in the window; 0 for a window without length."""
        before, after = self.accumulated(weights, np.array([window.start_s, window.end_s]))
        length_s = window.end_s - window.start_s
        return float(after - before) / length_s if length_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PolicyShare:
    """A policy's launches that ended in a window, its share of their device time, and of the time that passed.

    Two policies that run at once have half each of the time that passed.
    """

    policy: str
    num_launches: int
    device_share: float
    wall_share: float


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Predicted against measured device time of a policy's launches on a lane, of one size: up to ``most_rows``.

    Median and p90 are of the absolute errors, relative to the measured time. The bias is (sum of predictions ÷ sum of
    measurements − 1) × 100; negative: predictions are too short.
    """

    policy: str
    lane: LaneName
    most_rows: int
    num_launches: int
    median_percent: float
    p90_percent: float
    bias_percent: float


@dataclass(frozen=True, slots=True)
class Miss:
    """A target (``ttft`` or ``tpot``) that a request missed.

    The cause of a late TTFT is ``queued`` or ``prefill``, whichever took longer. That of TPOT is the policy that ran
    longest in the gaps between tokens that exceeded the target, or ``idle``. ``shares`` are of the time to the first
    token, or of those gaps, by cause, largest first.
    """

    request_id: str
    target: str
    measured_ms: float
    limit_ms: float
    cause: str
    shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Figures of a trace, or of a part of it.

    Attributes:
        num_launches: that ended in it.
        num_decisions: ticks at which a plan was made.
        num_infeasible: those at which there were options but none held the TPOT budget.
        bounds: ticks by what decided.
        policies: largest wall share first.
        lanes: shares of the time that passed in which each lane, ``both`` or none had a launch on the device.
        requests: those that ended; ``cut_off`` were aborted or failed, and are not judged by their targets. A request
            may have missed both targets.
        prompt_tokens, cached_tokens: of requests that ended, and how many of them came from the prefix cache.
        causes: misses by ``target: cause``, most frequent first.
        misses: the worst first, as a multiple of the target.
    """

    header: TraceHeader
    duration_s: float
    num_launches: int
    num_decisions: int
    num_infeasible: int
    bounds: dict[str, int]
    policies: tuple[PolicyShare, ...]
    lanes: dict[str, float]
    errors: tuple[PredictionError, ...]
    requests: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    causes: dict[str, int]
    misses: tuple[Miss, ...]
    notes: tuple[str, ...]


def summarize_trace(trace: Trace, window: Window | None = None) -> TraceSummary:
    """Sum up the decisions made, and the launches and requests that ended, in the window; None takes all."""
    window = window or Window(trace.start_s, trace.end_s)
    occupancy = Occupancy.of(trace.launches)
    decisions = [d for d in trace.decisions if window.holds(d.time_s)]
    bounds: Counter[str] = Counter()
    for decision in decisions:
        bounds[decision.bound] += decision.count
    ended = [x for x, end_s in zip(occupancy.launches, occupancy.end_s, strict=True) if window.holds(end_s)]
    requests = [r for r in trace.requests if window.holds(r.arrival_s + (r.token_us[-1] if r.token_us else 0) / 1e6)]
    completed = [r for r in requests if r.reason not in ("abort", "error")]
    weights = occupancy.by_policy()
    targeted = [r for r in completed if r.ttft_limit_ms is not None or r.tpot_limit_ms is not None]
    missed = [found for r in targeted if (found := _misses(r, occupancy, weights))]
    misses = sorted(chain.from_iterable(missed), key=lambda miss: -miss.measured_ms / miss.limit_ms)
    targets = Counter(miss.target for miss in misses)
    return TraceSummary(
        header=trace.header,
        duration_s=window.end_s - window.start_s,
        num_launches=len(ended),
        num_decisions=bounds.total(),
        num_infeasible=sum(d.count for d in decisions if d.options and not any(o.get("holds_tpot") for o in d.options)),
        bounds=dict(bounds.most_common()),
        policies=_policy_shares(ended, occupancy, weights, window),
        lanes=_lane_shares(occupancy, window),
        errors=_prediction_errors(ended),
        requests={
            "completed": len(completed),
            "cut_off": len(requests) - len(completed),
            "without_targets": len(completed) - len(targeted),
            "met": len(targeted) - len(missed),
            "missed_ttft": targets["ttft"],
            "missed_tpot": targets["tpot"],
        },
        prompt_tokens=sum(r.prompt_tokens for r in requests),
        cached_tokens=sum(r.cached_tokens for r in requests),
        causes=dict(Counter(f"{miss.target}: {miss.cause}" for miss in misses).most_common()),
        misses=tuple(misses),
        notes=trace.notes,
    )


def _policy_shares(
    ended: list[Launch], occupancy: Occupancy, weights: dict[str, FloatArray], window: Window
) -> tuple[PolicyShare, ...]:
    device_ms: defaultdict[str, float] = defaultdict(float)
    for launch in ended:
        device_ms[launch.policy] += launch.device_ms or 0.0
    total_ms = sum(device_ms.values())
    counts = Counter(launch.policy for launch in ended)
    shares = [
        PolicyShare(
            policy=policy,
            num_launches=counts[policy],
            device_share=device_ms[policy] / total_ms if total_ms else 0.0,
            wall_share=occupancy.share(of_policy, window),
        )
        for policy, of_policy in weights.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.wall_share))


def _lane_shares(occupancy: Occupancy, window: Window) -> dict[str, float]:
    decode, prefill = occupancy.active["decode"] >= 0, occupancy.active["prefill"] >= 0
    busy = {"decode": decode, "prefill": prefill, "both": decode & prefill, "any": decode | prefill}
    shares = {name: occupancy.share(on.astype(np.float64), window) for name, on in busy.items()}
    shares["idle"] = 1.0 - shares.pop("any")
    return shares


def _prediction_errors(ended: list[Launch]) -> tuple[PredictionError, ...]:
    pairs: defaultdict[tuple[str, LaneName, int], list[tuple[float, float]]] = defaultdict(list)
    for launch in ended:
        if launch.predicted_ms is not None and launch.device_ms:
            size = size_of(launch.decode_rows + launch.prefill_rows)
            pairs[launch.policy, launch.lane, size].append((launch.predicted_ms, launch.device_ms))
    errors = []
    for key, values in sorted(pairs.items()):
        predicted, measured = np.array(values).T
        median, p90 = np.percentile(np.abs(predicted / measured - 1) * 100, (50, 90))
        bias = (predicted.sum() / measured.sum() - 1) * 100
        errors.append(PredictionError(*key, len(values), float(median), float(p90), float(bias)))
    return tuple(errors)


def _misses(request: TracedRequest, occupancy: Occupancy, weights: dict[str, FloatArray]) -> list[Miss]:
    """The targets that a request missed; ``weights`` are the policies' parts of the stretches of time."""
    misses = []
    for target, measured_ms, limit_ms in (
        ("ttft", request.ttft_ms, request.ttft_limit_ms),
        ("tpot", request.tpot_ms, request.tpot_limit_ms),
    ):
        if measured_ms is None or limit_ms is None or measured_ms <= limit_ms:
            continue
        if target == "ttft":
            scheduled_s = request.first_scheduled_s
            waited_s = 0.0 if scheduled_s is None else scheduled_s - request.arrival_s
            queued = min(max(waited_s * 1e3 / measured_ms, 0.0), 1.0)
            shares = {"queued": queued, "prefill": 1.0 - queued}
        else:
            shares = _late_gap_shares(request, limit_ms, occupancy, weights)
        ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
        misses.append(Miss(request.request_id, target, measured_ms, limit_ms, next(iter(ordered)), ordered))
    return misses


def _late_gap_shares(
    request: TracedRequest, limit_ms: float, occupancy: Occupancy, weights: dict[str, FloatArray]
) -> dict[str, float]:
    """The policies' shares of the gaps between tokens that were longer than the target; there is at least one."""
    token_us = np.array(request.token_us)
    late = np.diff(token_us) / 1e3 > limit_ms
    late_s = np.diff(token_us)[late].sum() / 1e6
    shares = {}
    for policy, of_policy in weights.items():
        until_token_s = occupancy.accumulated(of_policy, request.arrival_s + token_us / 1e6)
        shares[policy] = float(np.diff(until_token_s)[late].sum() / late_s)
    shares = {policy: share for policy, share in shares.items() if share > _NEGLIGIBLE}
    idle = 1.0 - sum(shares.values())
    return shares | {IDLE: idle} if idle > _NEGLIGIBLE else shares


# ---- Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show ----

_PLANNER_THREAD = 0
_LANE_THREADS: dict[LaneName, int] = {"decode": 1, "prefill": 2}


def to_chrome_trace(trace: Trace, window: Window) -> dict[str, Any]:
    """The decisions made, and the launches begun, in the window, as an object to be written as JSON.

    Each lane is a thread of launches, and the planner is one of decisions. Counters show running and waiting
    sequences and each lane's SMs. Times are in microseconds from the trace's start.
    """
    occupancy = Occupancy.of(trace.launches)
    header = trace.header
    threads = {_PLANNER_THREAD: "planner"} | {n: f"{lane} lane" for lane, n in _LANE_THREADS.items()}
    events = [
        _event("M", "process_name", None, tid=0, args={"name": f"bullet-graph: {header.model} on {header.device}"}),
        *(_event("M", "thread_name", None, tid=n, args={"name": name}) for n, name in threads.items()),
    ]
    for decision in trace.decisions:
        if window.holds(decision.time_s):
            events.extend(_decision_events(decision, decision.time_s - trace.start_s))
    for launch, start_s in zip(occupancy.launches, occupancy.start_s.tolist(), strict=True):
        if window.holds(start_s):
            events.append(_launch_event(launch, start_s - trace.start_s))
    if header.num_sms is not None:
        events.extend(_sm_events(occupancy, header.num_sms, window, trace.start_s))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": asdict(header)}


def _event(phase: str, name: str, time_s: float | None, **other: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": 1} | ({} if time_s is None else {"ts": time_s * 1e6}) | other


def _counter(name: str, time_s: float, value: int) -> dict[str, Any]:
    return _event("C", name, time_s, args={name: value})


def _decision_events(decision: Decision, time_s: float) -> Iterator[dict[str, Any]]:
    shown = asdict(decision) | {"ticks": decision.count, "options": list(decision.options)}
    for name in ("time_s", "count", "running", "waiting", "policy", "decode"):
        del shown[name]
    name = f"{decision.policy} ({decision.bound})"
    yield _event("i", name, time_s, cat="decision", s="t", tid=_PLANNER_THREAD, args=shown)
    yield _counter("running", time_s, decision.running)
    yield _counter("waiting", time_s, decision.waiting)


def _launch_event(launch: Launch, start_s: float) -> dict[str, Any]:
    rows = []
    if launch.decode_rows:
        rows.append(f"{launch.decode_rows} decoding")
    if launch.prefill_rows:
        rows.append(f"{launch.prefill_rows} prompt tokens × {launch.layers} layers")
    shown = asdict(launch) | {"measured_ms": launch.device_ms}
    for name in ("ticket", "lane", "time_s", "retired_s", "device_ms"):
        del shown[name]
    return _event(
        "X",
        f"{launch.policy}: {', '.join(rows)}",
        start_s,
        cat=launch.policy,
        tid=_LANE_THREADS[launch.lane],
        dur=(launch.device_ms or 0.0) * 1e3,
        args=shown,
    )


def _sm_events(occupancy: Occupancy, num_sms: int, window: Window, origin_s: float) -> Iterator[dict[str, Any]]:
    """The SMs that each lane's launch may use, at first and wherever they change; 0 while the lane is idle."""
    sms = occupancy.sms(num_sms)
    first = max(int(np.searchsorted(occupancy.edges_s, window.start_s, side="right")) - 1, 0)
    times_s = np.maximum(occupancy.edges_s[first:], window.start_s).tolist()
    for lane in LANES:
        before = 0.0
        for time_s, on_lane in zip(times_s, [*occupancy.on_lane(lane, sms)[first:].tolist(), 0.0], strict=True):
            if on_lane != before and window.holds(time_s):
                yield _counter(f"{lane} SMs", time_s - origin_s, int(on_lane))
                before = on_lane
