"""Writing decision traces, and reading back what was written."""

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from traces import HEADER as RUN_HEADER
from traces import RUN, Record, decision, read_run, request, retire, write
from traces import launch as launched

from bullet_graph.engine.in_flight import Launch
from bullet_graph.engine.output import CompletionOutput, FinishReason, RequestOutput
from bullet_graph.engine.trace import DecisionTrace
from bullet_graph.errors import TraceError
from bullet_graph.partition.masks import SmPartition
from bullet_graph.perf.explain import Miss, Occupancy, PolicyShare, Window, summarize_trace, to_chrome_trace
from bullet_graph.perf.metrics import RequestMetrics
from bullet_graph.perf.trace import Decision, Trace, TracedRequest, TraceHeader, read_trace
from bullet_graph.perf.trace import Launch as TracedLaunch
from bullet_graph.planner.plan import DecodeLoad, Load, Option, Plan, PromptLoad
from bullet_graph.runtime.step import Placement
from bullet_graph.slo import NO_TARGETS, Slo

HEADER = TraceHeader("tiny", "cpu", 132, 4, "auto", "tpot:15ms", "1.0")
DECODE = DecodeLoad(batch_size=3, kv_tokens=300, budget_ms=12.5, slack_ms=math.inf, target_ms=15.0)
LOAD = Load(7.0, DECODE, (PromptLoad(100, 0, math.inf), PromptLoad(50, 16, 9.0)), 150, None)
OPTION = Option("split", 32, 2048, 4, 11.5, math.inf, 1.2, True, True)
PLAN = Plan(
    "split",
    decode=True,
    prefill_lane="prefill",
    chunk_tokens=2048,
    slice_layers=4,
    partition=SmPartition(16, 50),
    bound="tpot",
    options=(OPTION,),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


def begin(path: Path, *, overwrite: bool = False) -> DecisionTrace:
    return DecisionTrace(path, header=HEADER, overwrite=overwrite)


def launch(trace: DecisionTrace, ticket: int, *, predicted_ms: float | None = 9.0) -> None:
    scheduled = SimpleNamespace(step=SimpleNamespace(decode_rows=3, prefill_rows=0))
    placement = Placement(partition=SmPartition(16, None))
    trace.launched(Launch(ticket, scheduled, placement, "split", predicted_ms, beside=False), 7.25)  # type: ignore[arg-type]


def finish(
    trace: DecisionTrace,
    metrics: RequestMetrics,
    slo: Slo = NO_TARGETS,
    reason: FinishReason = "abort",
    request_id: str = "r",
) -> None:
    output = CompletionOutput(0, "", (), None, reason)
    trace.finished(RequestOutput(request_id, (1,) * 10, (output,), True, metrics, slo=slo))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_is_written_is_read_back(path: Path) -> None:
    trace = begin(path)
    trace.decided(LOAD, PLAN)
    launch(trace, 5)
    trace.retired(5, 7.5, 8.5)
    finish(trace, RequestMetrics(6.0, 6.5, (7.0, 7.25)), Slo(ttft_ms=100, ttft_ms_per_token=2), "stop")
    trace.close()
    option = json.loads("""{
        "policy": "split", "decode_sms": 32, "chunk_tokens": 2048, "slice_layers": 4, "interval_ms": 11.5,
        "prefill_tokens_per_s": null, "throughput": 1.2, "measured": true, "holds_tpot": true
    }""")
    # What has no limit is null, as JSON has no infinity. A lane that is not confined has all SMs.
    decided = Decision(0, 7.0, 3, 2, 300, 150, 12.5, None, "split", True, 2048, 4, 32, 100, "tpot", (option,), 1)
    step = TracedLaunch(5, "decode", 0, 7.25, "split", 3, 0, 4, 32, 132, 9.0, 7.5, 8.5)
    asked = TracedRequest("r", "stop", 10, 2, 6.0, 6.5, (1_000_000, 1_250_000), 120.0, None)
    assert read_trace(path) == Trace(HEADER, (decided,), (step,), (asked,), (), 6.0, 7.5)
    assert (asked.ttft_ms, asked.tpot_ms) == (1000.0, 250.0)


def test_decisions_that_say_the_same_are_counted(path: Path) -> None:
    trace = begin(path)
    longer = replace(DECODE, kv_tokens=303, budget_ms=12.0)
    trace.decided(LOAD, PLAN)
    trace.decided(replace(LOAD, now_s=7.1, decode=longer), replace(PLAN, decode_ms=9.5))
    trace.decided(replace(LOAD, now_s=7.2), PLAN)
    launch(trace, 1)
    trace.decided(replace(LOAD, now_s=7.3), replace(PLAN, policy="mixed"))
    launch(trace, 2)
    trace.decided(replace(LOAD, now_s=7.4), PLAN)
    trace.decided(replace(LOAD, now_s=7.5), PLAN)
    launch(trace, 3)
    trace.close()
    read = read_trace(path)
    assert [launched.decision for launched in read.launches] == [0, 1, 2]
    assert [(d.policy, d.count) for d in read.decisions] == [("split", 3), ("mixed", 1), ("split", 2)]
    assert read.end_s == 7.5


@pytest.mark.parametrize(
    ("load", "plan"),
    [
        *(
            (LOAD, replace(PLAN, **{name: value}))
            for name, value in (
                ("policy", "mixed"),
                ("decode", False),
                ("partition", SmPartition(17, 49)),
                ("chunk_tokens", 1024),
                ("slice_layers", 2),
                ("bound", "ttft"),
            )
        ),
        (replace(LOAD, decode=None), PLAN),
        (replace(LOAD, prompts=LOAD.prompts[:1]), PLAN),
    ],
)
def test_every_change_of_the_plan_or_of_what_there_is_to_do_is_a_decision(path: Path, load: Load, plan: Plan) -> None:
    trace = begin(path)
    trace.decided(LOAD, PLAN)
    trace.decided(load, plan)
    trace.close()
    assert len(read_trace(path).decisions) == 2


def test_nothing_to_decode_no_targets_and_any_request_id(path: Path) -> None:
    trace = begin(path)
    trace.decided(replace(LOAD, decode=None), PLAN)
    launch(trace, 1, predicted_ms=math.inf)
    request_id = 'é "quoted"\n\ud800'
    finish(trace, RequestMetrics(1.0, None, ()), request_id=request_id)
    trace.close()
    read = read_trace(path)
    assert read.requests[0].request_id == request_id
    assert (read.decisions[0].running, read.decisions[0].budget_ms) == (0, None)
    assert read.launches[0].predicted_ms is None
    assert read.launches[0].device_ms is None
    assert read.notes == ("launches that were never seen to end, and are left out: 1",)
    assert (read.requests[0].ttft_ms, read.requests[0].tpot_ms) == (None, None)
    assert (read.requests[0].ttft_limit_ms, read.requests[0].tpot_limit_ms) == (None, None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told() -> None:
    with pytest.raises(TraceError, match=r"/dev/full: .* cannot be written \(No space left"):
        begin(Path("/dev/full"), overwrite=True)


def test_only_whole_lines_reach_the_file_before_it_is_closed(path: Path) -> None:
    trace = begin(path)
    written = 0
    for number in range(3000):
        trace.decided(LOAD, PLAN)
        launch(trace, number)
        if number % 100 == 0:
            text = path.read_text(encoding="utf-8")
            assert text.endswith("}\n")
            written = len(text)
    # It is not all kept back until the end.
    assert written > 100_000
    trace.close()
    trace.close()
    assert len(read_trace(path).launches) == 3000


def test_a_run_that_ends_without_closing_loses_nothing(path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from pathlib import Path
from test_trace import LOAD, PLAN, begin, launch
trace = begin(Path({str(path)!r}))
trace.decided(LOAD, PLAN)
launch(trace, 1)
raise RuntimeError("the engine failed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "the engine failed" in done.stderr
    assert len(read_trace(path).launches) == 1


# ---- reading what is damaged, or no trace ----


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    run_file = write(tmp_path / "run.jsonl", RUN)
    for cut in (2, 10):
        (tmp_path / "cut.jsonl").write_bytes(run_file.read_bytes()[:-cut])
        trace = read_trace(tmp_path / "cut.jsonl")
        assert trace.notes == (
            "line 13, the last, was cut short and is left out",
            "launches that were never seen to end, and are left out: 1",
        )
        assert summarize_trace(trace).notes == trace.notes
        assert summarize_trace(trace).num_launches == 3
    (tmp_path / "cut.jsonl").write_bytes(run_file.read_bytes()[:-1])
    assert read_trace(tmp_path / "cut.jsonl") == read_trace(run_file), "it lacks the line's end alone"


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no\.jsonl: cannot be read \(No such file"):
        read_trace(tmp_path / "no.jsonl")
    with pytest.raises(TraceError, match=r"cannot be read \(Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"timestamp,tokens\n1,2\n", "line 1: must hold one JSON object"),
        (b"\x00\xff\xfe", "line 1: must hold one JSON object"),
        (b"[" * 100_000, "line 1: must hold one JSON object"),
        (b'{"timestamp": 1}\n', "line 1: does not begin a decision trace"),
        (b"[]\n", "line 1: does not begin a decision trace"),
        (
            json.dumps(RUN_HEADER | {"format_version": 1, "version": "9.9"}).encode(),
            r"line 1: format version 2 is required, but the trace has 1.*9\.9",
        ),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=rf"t\.jsonl.*{message}"):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize("line", [b'{"type": "retire", "tick\n', b"\n", b"\xff\n", b'{"a": NaN}\n'])
def test_a_broken_line_in_the_middle(tmp_path: Path, line: bytes) -> None:
    written = [json.dumps(record).encode() + b"\n" for record in RUN]
    (tmp_path / "t.jsonl").write_bytes(b"".join([*written[:5], line, *written[5:]]))
    with pytest.raises(TraceError, match=r"t\.jsonl, line 6: must hold one JSON object"):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"type": "guess"}, "must have a type among .* but has 'guess'"),
        ({"type": ["launch"]}, "must have a type among"),
        ({}, "must have a type among .* but has None"),
        (retire(9, 101.0, 1.0), "retire refers to 9, which is on no line before"),
        ({"type": "repeat", "decision": 7, "count": 1, "time_s": 101.0}, "repeat refers to 7"),
        *(
            (
                launched(9, "decode", 101.0, "solo", 0) | {name: value},
                rf"{name}: Input should be .*, found {value!r:.9}",
            )
            for name, value in (
                ("lane", "fast"),
                ("layers", 1.5),
                ("layers", True),
                ("layers", 10**400),
                ("predicted_ms", "1"),
                ("time_s", None),
            )
        ),
        (decision(9, 101.0, "solo", options=[1]), r"options\.0: Input should be a valid dictionary, found 1"),
        (decision(9, 101.0, "solo", decode=1), r"decode: Input should be a valid boolean, found 1"),
        (request("r", []) | {"token_us": [1, 2.5]}, r"token_us\.1: .* a valid integer, found 2.5"),
        (request("r", []) | {"request_id": 5}, "request_id: Input should be a valid string, found 5"),
    ],
)
def test_broken_records(tmp_path: Path, record: Record, message: str) -> None:
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 14: {message}"):
        read_run(tmp_path, record)


def test_tickets_may_come_again_and_a_trace_ends_with_its_last_token(tmp_path: Path) -> None:
    again = (launched(1, "decode", 100.5, "solo", 0), retire(1, 100.6, 10.0))
    trace = read_run(tmp_path, *again, request("r", [100.0, 900.0]))
    assert [step.device_ms for step in trace.launches] == [100.0, 100.0, 200.0, 50.0, 10.0]
    assert trace.end_s == pytest.approx(100.9)


# ---- summing up decision traces, and turning them into Chrome's format ----


def test_shares_of_time_and_decisions_by_bound(tmp_path: Path) -> None:
    summary = summarize_trace(read_run(tmp_path))
    assert summary.duration_s == pytest.approx(0.4)
    assert summary.num_launches == 4
    expected = [
        PolicyShare("split", 2, 300 / 450, 0.5),
        PolicyShare("solo", 1, 100 / 450, 0.25),
        PolicyShare("mixed", 1, 50 / 450, 0.125),
    ]
    for share, want in zip(summary.policies, expected, strict=True):
        assert dataclasses.astuple(share) == pytest.approx(dataclasses.astuple(want))
    lanes = {"decode": 250 / 400, "prefill": 200 / 400, "both": 100 / 400, "idle": 50 / 400}
    assert summary.lanes == pytest.approx(lanes)
    # Decisions by bound, with their repeats.
    assert summary.bounds == {"tpot": 4, "nothing": 1, "ttft": 1}
    assert next(iter(summary.bounds)) == "tpot"
    assert summary.num_decisions == 6
    assert summary.num_infeasible == 1
    again = {"type": "repeat", "decision": 2, "count": 3, "time_s": 100.39}
    summary = summarize_trace(read_run(tmp_path, again, request("cut", [5.0], reason="abort", cached_tokens=4)))
    assert (summary.num_infeasible, summary.prompt_tokens, summary.cached_tokens) == (4, 10, 4)


def test_a_window_sums_up_what_is_in_it(tmp_path: Path) -> None:
    # The last 50 ms of the split, prefill alone, and the mixed forward.
    summary = summarize_trace(read_run(tmp_path), Window(100.3, 100.4))
    shares = {share.policy: round(share.wall_share, 6) for share in summary.policies}
    assert shares == {"split": 0.5, "mixed": 0.5, "solo": 0.0}
    assert summary.lanes["idle"] == pytest.approx(0.0)
    assert (summary.num_launches, summary.bounds) == (2, {"ttft": 1})


def test_prediction_errors(tmp_path: Path) -> None:
    # Solo, decode lane: +10 % of 100 ms, −20 % of 50 ms and −50 % of 10 ms.
    trace = read_run(
        tmp_path,
        launched(5, "decode", 100.4, "solo", 0, predicted_ms=40.0),
        retire(5, 100.45, 50.0),
        launched(6, "decode", 100.45, "solo", 0, predicted_ms=5.0),
        retire(6, 100.46, 10.0),
        launched(7, "decode", 100.46, "solo", 0, predicted_ms=5.0),
    )
    errors = {(error.policy, error.lane, error.most_rows): error for error in summarize_trace(trace).errors}
    # Mixed was launched without a prediction.
    assert set(errors) == {("solo", "decode", 64), ("split", "decode", 64), ("split", "prefill", 512)}
    solo = errors["solo", "decode", 64]
    assert solo.num_launches == 3
    assert solo.median_percent == pytest.approx(20.0)
    assert solo.p90_percent == pytest.approx(20.0 + 0.8 * 30.0)
    assert solo.bias_percent == pytest.approx((155 / 160 - 1) * 100)
    split = errors["split", "prefill", 512]
    assert (split.median_percent, split.bias_percent) == pytest.approx((20.0, 20.0))


def test_why_the_first_token_was_late(tmp_path: Path) -> None:
    trace = read_run(
        tmp_path,
        request("waited", [300.0], first_scheduled_s=100.225, ttft_limit_ms=100.0),
        request("prefilled", [300.0], first_scheduled_s=100.03, ttft_limit_ms=150.0),
        request("in time", [300.0], ttft_limit_ms=300.0),
    )
    summary = summarize_trace(trace)
    causes = [(m.request_id, m.target, m.cause) for m in summary.misses]
    assert causes == [("waited", "ttft", "queued"), ("prefilled", "ttft", "prefill")]
    assert summary.misses[0].shares == pytest.approx({"queued": 0.75, "prefill": 0.25})
    assert list(summary.misses[1].shares) == ["prefill", "queued"]
    assert summary.misses[1].shares == pytest.approx({"prefill": 0.9, "queued": 0.1})
    assert summary.causes == {"ttft: queued": 1, "ttft: prefill": 1}


def test_why_tokens_were_slow(tmp_path: Path) -> None:
    # Gaps of 50, 100 (50 of solo, 50 of nothing), 200 (of split) and 20 ms. The first and the last held the target.
    slow = request("slow", [0.0, 50.0, 150.0, 350.0, 370.0], tpot_limit_ms=60.0)
    # This one waited for no launch.
    idle = request("idle", [100.0, 150.0], tpot_limit_ms=10.0)
    waited, miss = summarize_trace(read_run(tmp_path, slow, idle)).misses
    assert (waited.cause, waited.shares) == ("idle", pytest.approx({"idle": 1.0}))
    assert (miss.target, miss.cause, miss.measured_ms, miss.limit_ms) == ("tpot", "split", 92.5, 60.0)
    assert miss.shares == pytest.approx({"split": 200 / 300, "solo": 50 / 300, "idle": 50 / 300})


def test_requests_are_counted_once_each(tmp_path: Path) -> None:
    both = {"ttft_limit_ms": 100.0, "tpot_limit_ms": 20.0}
    trace = read_run(
        tmp_path,
        request("met", [90.0, 110.0], **both),
        request("met", [100.0], **both),
        # Ids may come again once their request has ended.
        request("again", [101.0, 121.0], **both),
        request("again", [150.0, 200.0], **both),
        request("slow", [90.0, 111.0], **both),
        request("free", [390.0]),
        request("aborted", [390.0], reason="abort", **both),
        request("failed", [], reason="error", **both),
    )
    summary = summarize_trace(trace)
    counts = {"completed": 6, "cut_off": 2, "without_targets": 1, "met": 2, "missed_ttft": 2, "missed_tpot": 2}
    assert summary.requests == counts
    # The worst first, as a multiple of the target.
    worst = [(m.request_id, m.target) for m in summary.misses]
    assert worst == [("again", "tpot"), ("again", "ttft"), ("slow", "tpot"), ("again", "ttft")]
    assert isinstance(summary.misses[0], Miss)


def test_the_warm_up_is_left_out(tmp_path: Path) -> None:
    steps = (decision(9, 50.0, "solo"), launched(9, "decode", 50.0, "solo", 9), retire(9, 50.1, 100.0))
    warm_up, asked = [*steps, request("warmup-0", [100.0], arrival_s=50.0)], request("0", [300.0])
    path = write(tmp_path / "t.jsonl", [RUN_HEADER, *warm_up, *RUN[1:], asked])
    note = "requests of the warm-up, left out with all that came before: 1"
    assert read_trace(path) == replace(read_run(tmp_path, asked), notes=(note,))
    assert len(read_trace(write(path, [RUN_HEADER, *warm_up])).requests) == 1, "nothing else was asked for"
    later = read_trace(write(path, [RUN_HEADER, *warm_up, *RUN[1:], request("1", [1.0], arrival_s=100.39)]))
    assert (later.start_s, len(later.launches)) == (100.0, 4), "another came first, and has not ended"


def test_a_trace_in_which_nothing_happened(tmp_path: Path) -> None:
    summary = summarize_trace(read_trace(write(tmp_path / "t.jsonl", [RUN_HEADER])))
    assert (summary.duration_s, summary.num_launches, summary.policies, summary.errors) == (0.0, 0, (), ())
    assert set(summary.requests.values()) == {0}


def test_launches_seen_late_do_not_overlap() -> None:
    # Both were seen to end at the same time, though the first must have ended before.
    def step(ticket: int, device_ms: float) -> Launch:
        return TracedLaunch(ticket, "decode", 0, 0.0, "solo", 1, 0, 4, None, None, None, 1.0, device_ms)

    occupancy = Occupancy.of([step(1, 300.0), step(2, 200.0)])
    assert occupancy.start_s == pytest.approx([0.5, 0.8])
    assert occupancy.end_s == pytest.approx([0.8, 1.0])


# ---- Chrome's format ----


def test_chrome_trace(tmp_path: Path) -> None:
    events = to_chrome_trace(read_run(tmp_path), Window(0.0, 1e6))["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    launches = [e for e in events if e["ph"] == "X"]
    lanes = ("decode", "decode", "prefill", "decode")
    assert [threads[e["tid"]] for e in launches] == [f"{lane} lane" for lane in lanes]
    prefill = launches[2]
    assert (prefill["ts"], prefill["dur"]) == pytest.approx((150_000, 200_000))
    assert prefill["args"] == json.loads("""{
        "policy": "split", "decision": 1, "decode_rows": 0, "prefill_rows": 512, "layers": 4, "decode_sms": 32,
        "prefill_sms": 100, "predicted_ms": 240.0, "measured_ms": 200.0
    }""")
    counters = {
        name: [(round(e["ts"] / 1e3), e["args"][name]) for e in events if e["ph"] == "C" and e["name"] == name]
        for name in ("running", "waiting", "decode SMs", "prefill SMs")
    }
    assert counters["running"] == [(0, 2), (150, 2), (350, 2)]
    assert counters["waiting"] == [(0, 1), (150, 1), (350, 1)]
    assert counters["decode SMs"] == [(0, 132), (100, 0), (150, 32), (250, 0), (350, 132), (400, 0)]
    assert counters["prefill SMs"] == [(150, 100), (350, 0)]
    decisions = [e for e in events if e["ph"] == "i"]
    assert [threads[e["tid"]] for e in decisions] == ["planner"] * 3
    assert decisions[1]["args"]["ticks"] == 4
    assert decisions[1]["args"]["options"] == [{"holds_tpot": False}, {"holds_tpot": True}]


def test_chrome_trace_of_a_window_begins_with_the_sms_in_force_if_there_are_any(tmp_path: Path) -> None:
    events = to_chrome_trace(read_run(tmp_path), Window(100.2, 100.24))["traceEvents"]
    counters = [(round(e["ts"] / 1e3), e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [(200, {"decode SMs": 32}), (200, {"prefill SMs": 100})]
    path = write(tmp_path / "t.jsonl", [RUN_HEADER | {"num_sms": None}, *RUN[1:]])
    events = to_chrome_trace(read_trace(path), Window(100.12, 100.3))["traceEvents"]
    assert [e["args"]["policy"] for e in events if e["ph"] == "X"] == ["split", "split"]
    assert [e["args"]["decision"] for e in events if e["ph"] == "i"] == [1]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"running", "waiting"}
