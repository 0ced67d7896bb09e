"""Decision traces worked by hand."""

import json
from pathlib import Path
from typing import Any

from bullet_graph.perf.trace import Trace, read_trace

Record = dict[str, Any]

HEADER: Record = json.loads("""{
    "type": "header", "format": "bullet-graph decision trace", "format_version": 2, "model": "tiny",
    "device": "H200", "num_sms": 132, "num_layers": 4, "policy": "auto", "slo": "ttft:500ms tpot:15ms",
    "version": "1.0"
}""")


def decision(number: int, time_s: float, policy: str, bound: str = "nothing", **other: Any) -> Record:
    """Two sequences decode and a prompt waits."""
    return {
        "type": "decision",
        "decision": number,
        "time_s": time_s,
        "running": 2,
        "waiting": 1,
        "kv_tokens": 100,
        "queued_tokens": 50,
        "budget_ms": None,
        "slack_ms": None,
        "policy": policy,
        "decode": True,
        "chunk_tokens": 0,
        "slice_layers": 0,
        "decode_sms": None,
        "prefill_sms": None,
        "bound": bound,
        "options": [],
    } | other


def launch(ticket: int, lane: str, time_s: float, policy: str, number: int, **other: Any) -> Record:
    """Two rows of decode, or 512 of a prompt; a split has 32 SMs and 100."""
    return {
        "type": "launch",
        "ticket": ticket,
        "lane": lane,
        "decision": number,
        "time_s": time_s,
        "policy": policy,
        "decode_rows": 2 if lane == "decode" else 0,
        "prefill_rows": 0 if lane == "decode" else 512,
        "layers": 4,
        "decode_sms": 32 if policy == "split" else None,
        "prefill_sms": 100 if policy == "split" else None,
        "predicted_ms": None,
    } | other


def retire(ticket: int, time_s: float, device_ms: float) -> Record:
    """The end of a launch."""
    return {"type": "retire", "ticket": ticket, "time_s": time_s, "device_ms": device_ms}


def request(request_id: str, token_ms: list[float], **other: Any) -> Record:
    """Arrived at 100 s, with tokens so many milliseconds later."""
    return {
        "type": "request",
        "request_id": request_id,
        "reason": "stop",
        "prompt_tokens": 10,
        "output_tokens": len(token_ms),
        "arrival_s": 100.0,
        "first_scheduled_s": 100.0,
        "token_us": [round(ms * 1000) for ms in token_ms],
        "ttft_limit_ms": None,
        "tpot_limit_ms": None,
    } | other


# Decode alone for 100 ms, 50 ms of nothing, both lanes for 100 ms with prefill going on for 100 ms more,
# and a mixed forward of 50 ms: 400 ms in all.
RUN: list[Record] = [
    HEADER,
    decision(0, 100.0, "solo"),
    launch(1, "decode", 100.0, "solo", 0, predicted_ms=110.0),
    retire(1, 100.1, 100.0),
    decision(1, 100.15, "split", "tpot", options=[{"holds_tpot": False}, {"holds_tpot": True}]),
    launch(2, "decode", 100.15, "split", 1, predicted_ms=90.0),
    launch(3, "prefill", 100.15, "split", 1, predicted_ms=240.0),
    {"type": "repeat", "decision": 1, "count": 3, "time_s": 100.16},
    retire(2, 100.25, 100.0),
    retire(3, 100.35, 200.0),
    decision(2, 100.35, "mixed", "ttft", options=[{"holds_tpot": False}]),
    launch(4, "decode", 100.35, "mixed", 2, prefill_rows=64),
    retire(4, 100.4, 50.0),
]


def write(path: Path, records: list[Record]) -> Path:
    """A trace file of these lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def read_run(folder: Path, *records: Record) -> Trace:
    """A trace of ``RUN`` and of what follows it, by way of a file in the folder."""
    return read_trace(write(folder / "trace.jsonl", [*RUN, *records]))
