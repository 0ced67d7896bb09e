"""A decision trace in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bullet_graph.perf.explain import Occupancy, Window
from bullet_graph.perf.trace import LANES, Decision, LaneName, Launch, Trace

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
    time = {} if time_s is None else {"ts": time_s * 1e6}
    return {"name": name, "ph": phase, "pid": 1} | time | other


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
    """The SMs that each lane's launch may use, wherever they change; 0 while the lane is idle."""
    sms = occupancy.sms(num_sms)
    for lane in LANES:
        before = 0.0
        values = [*occupancy.on_lane(lane, sms).tolist(), 0.0]
        for time_s, on_lane in zip(occupancy.edges_s.tolist(), values, strict=True):
            if on_lane != before and window.holds(time_s):
                yield _counter(f"{lane} SMs", time_s - origin_s, int(on_lane))
                before = on_lane
