"""A decision trace in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bullet_graph.perf.explain import Occupancy, Window
from bullet_graph.perf.trace import LANES, Decision, LaneName, Launch, Trace

_PROCESS = 1
_PLANNER_THREAD = 0
_LANE_THREADS: dict[LaneName, int] = {"decode": 1, "prefill": 2}


def to_chrome_trace(trace: Trace, window: Window | None = None) -> dict[str, Any]:
    """The trace as an object to be written as JSON; times in microseconds from the trace's start.

    Each lane is a thread of launches, the planner one of decisions; counters tell the sequences that run and wait
    and the SMs that each lane has.

    Args:
        window: take the decisions made, and the launches that began, in it alone; None takes all.
    """
    window = window or Window(-math.inf, math.inf)
    occupancy = Occupancy.of(trace.launches)
    header = trace.header
    events = [
        _name("process_name", _PLANNER_THREAD, f"bullet-graph: {header.model} on {header.device}"),
        _name("thread_name", _PLANNER_THREAD, "planner"),
        *(_name("thread_name", thread, f"{lane} lane") for lane, thread in _LANE_THREADS.items()),
    ]
    for decision in trace.decisions:
        if window.holds(decision.time_s):
            events.extend(_decision_events(decision, decision.time_s - trace.start_s))
    for launch, start_s in zip(occupancy.launches, occupancy.start_s.tolist(), strict=True):
        if window.holds(start_s):
            events.append(_launch_event(launch, start_s - trace.start_s))
    if header.num_sms is not None:
        events.extend(_sm_events(occupancy, header.num_sms, window, trace.start_s))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": asdict(header),
    }


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _decision_events(decision: Decision, time_s: float) -> Iterator[dict[str, Any]]:
    yield {
        "name": f"{decision.policy} ({decision.bound})",
        "cat": "decision",
        "ph": "i",
        "s": "t",
        "pid": _PROCESS,
        "tid": _PLANNER_THREAD,
        "ts": time_s * 1e6,
        "args": {
            "decision": decision.decision,
            "ticks": decision.count,
            "bound": decision.bound,
            "budget_ms": decision.budget_ms,
            "slack_ms": decision.slack_ms,
            "kv_tokens": decision.kv_tokens,
            "queued_tokens": decision.queued_tokens,
            "chunk_tokens": decision.chunk_tokens,
            "slice_layers": decision.slice_layers,
            "decode_sms": decision.decode_sms,
            "prefill_sms": decision.prefill_sms,
            "options": list(decision.options),
        },
    }
    yield _counter("running", time_s, decision.running)
    yield _counter("waiting", time_s, decision.waiting)


def _launch_event(launch: Launch, start_s: float) -> dict[str, Any]:
    rows = []
    if launch.decode_rows:
        rows.append(f"{launch.decode_rows} decoding")
    if launch.prefill_rows:
        rows.append(f"{launch.prefill_rows} prompt tokens × {launch.layers} layers")
    return {
        "name": f"{launch.policy}: {', '.join(rows)}",
        "cat": launch.policy,
        "ph": "X",
        "pid": _PROCESS,
        "tid": _LANE_THREADS[launch.lane],
        "ts": start_s * 1e6,
        "dur": (launch.device_ms or 0.0) * 1e3,
        "args": {
            "policy": launch.policy,
            "decision": launch.decision,
            "decode_rows": launch.decode_rows,
            "prefill_rows": launch.prefill_rows,
            "layers": launch.layers,
            "decode_sms": launch.decode_sms,
            "prefill_sms": launch.prefill_sms,
            "predicted_ms": launch.predicted_ms,
            "measured_ms": launch.device_ms,
        },
    }


def _sm_events(
    occupancy: Occupancy, num_sms: int, window: Window, origin_s: float
) -> Iterator[dict[str, Any]]:
    """The SMs that each lane's launch may use, wherever they change; 0 while the lane is idle."""
    sms = occupancy.sms(num_sms)
    for lane in LANES:
        before = 0
        for time_s, on_lane in zip(
            occupancy.edges_s.tolist(), [*occupancy.on_lane(lane, sms).tolist(), 0.0], strict=True
        ):
            value = int(on_lane)
            if value != before and window.holds(time_s):
                yield _counter(f"{lane} SMs", time_s - origin_s, value)
                before = value


def _counter(name: str, time_s: float, value: int) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "C",
        "pid": _PROCESS,
        "ts": time_s * 1e6,
        "args": {name: value},
    }
