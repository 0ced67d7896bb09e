"""Summing up decision traces, and turning them into Chrome's format."""

import dataclasses
from pathlib import Path

import pytest
from traces import HEADER, RUN, launch, read_run, request, retire, write

from bullet_graph.perf.explain import Miss, Occupancy, PolicyShare, Window, summarize_trace, to_chrome_trace
from bullet_graph.perf.trace import Launch, read_trace


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


def test_a_window_sums_up_what_is_in_it(tmp_path: Path) -> None:
    # The last 50 ms of the split, prefill alone, and the mixed forward.
    summary = summarize_trace(read_run(tmp_path), Window(100.3, 100.4))
    assert {share.policy: round(share.wall_share, 6) for share in summary.policies} == {
        "split": 0.5,
        "mixed": 0.5,
        "solo": 0.0,
    }
    assert summary.lanes["idle"] == pytest.approx(0.0)
    assert (summary.num_launches, summary.bounds) == (2, {"ttft": 1})


def test_prediction_errors(tmp_path: Path) -> None:
    # Solo, decode lane: +10 % of 100 ms, −20 % of 50 ms and −50 % of 10 ms.
    trace = read_run(
        tmp_path,
        launch(5, "decode", 100.4, "solo", 0, predicted_ms=40.0),
        retire(5, 100.45, 50.0),
        launch(6, "decode", 100.45, "solo", 0, predicted_ms=5.0),
        retire(6, 100.46, 10.0),
        launch(7, "decode", 100.46, "solo", 0, predicted_ms=5.0),
    )
    errors = {(error.policy, error.lane): error for error in summarize_trace(trace).errors}
    # Mixed was launched without a prediction.
    assert set(errors) == {("solo", "decode"), ("split", "decode"), ("split", "prefill")}
    solo = errors["solo", "decode"]
    assert solo.num_launches == 3
    assert solo.median_percent == pytest.approx(20.0)
    assert solo.p90_percent == pytest.approx(20.0 + 0.8 * 30.0)
    assert solo.bias_percent == pytest.approx((155 / 160 - 1) * 100)
    split = errors["split", "prefill"]
    assert (split.median_percent, split.bias_percent) == pytest.approx((20.0, 20.0))


def test_why_the_first_token_was_late(tmp_path: Path) -> None:
    trace = read_run(
        tmp_path,
        request("waited", [300.0], first_scheduled_s=100.225, ttft_limit_ms=100.0),
        request("prefilled", [300.0], first_scheduled_s=100.03, ttft_limit_ms=150.0),
        request("in time", [300.0], ttft_limit_ms=300.0),
    )
    summary = summarize_trace(trace)
    assert [(m.request_id, m.target, m.cause) for m in summary.misses] == [
        ("waited", "ttft", "queued"),
        ("prefilled", "ttft", "prefill"),
    ]
    assert summary.misses[0].shares == pytest.approx({"queued": 0.75, "prefill": 0.25})
    assert list(summary.misses[1].shares) == ["prefill", "queued"]
    assert summary.misses[1].shares == pytest.approx({"prefill": 0.9, "queued": 0.1})
    assert summary.causes == {"ttft: queued": 1, "ttft: prefill": 1}


def test_why_tokens_were_slow(tmp_path: Path) -> None:
    # Gaps of 50, 100, 200 and 20 ms. The first and the last held the target; in the others there were 50 ms of
    # solo and 50 of nothing, then 200 of split.
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
    assert summary.requests == {
        "completed": 6,
        "cut_off": 2,
        "without_targets": 1,
        "met": 2,
        "missed_ttft": 2,
        "missed_tpot": 2,
    }
    # The worst first, as a multiple of the target.
    assert [(m.request_id, m.target) for m in summary.misses] == [
        ("again", "tpot"),
        ("again", "ttft"),
        ("slow", "tpot"),
        ("again", "ttft"),
    ]
    assert isinstance(summary.misses[0], Miss)


def test_a_trace_in_which_nothing_happened(tmp_path: Path) -> None:
    summary = summarize_trace(read_trace(write(tmp_path / "t.jsonl", [HEADER])))
    assert (summary.duration_s, summary.num_launches, summary.policies, summary.errors) == (0.0, 0, (), ())
    assert set(summary.requests.values()) == {0}


def test_launches_seen_late_do_not_overlap() -> None:
    # Both were seen to end at the same time, though the first must have ended before.
    def step(ticket: int, device_ms: float) -> Launch:
        return Launch(ticket, "decode", 0, 0.0, "solo", 1, 0, 4, None, None, None, 1.0, device_ms)

    occupancy = Occupancy.of([step(1, 300.0), step(2, 200.0)])
    assert occupancy.start_s == pytest.approx([0.5, 0.8])
    assert occupancy.end_s == pytest.approx([0.8, 1.0])


# ---- Chrome's format ----

ALL = Window(0.0, 1e6)


def test_chrome_trace(tmp_path: Path) -> None:
    events = to_chrome_trace(read_run(tmp_path), ALL)["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    launches = [e for e in events if e["ph"] == "X"]
    lanes = ("decode", "decode", "prefill", "decode")
    assert [threads[e["tid"]] for e in launches] == [f"{lane} lane" for lane in lanes]
    prefill = launches[2]
    assert (prefill["ts"], prefill["dur"]) == pytest.approx((150_000, 200_000))
    assert prefill["args"] == {
        "policy": "split",
        "decision": 1,
        "decode_rows": 0,
        "prefill_rows": 512,
        "layers": 4,
        "decode_sms": 32,
        "prefill_sms": 100,
        "predicted_ms": 240.0,
        "measured_ms": 200.0,
    }
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


def test_chrome_trace_of_a_window_where_there_are_no_sms(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [HEADER | {"num_sms": None}, *RUN[1:]])
    events = to_chrome_trace(read_trace(path), Window(100.12, 100.3))["traceEvents"]
    assert [e["args"]["policy"] for e in events if e["ph"] == "X"] == ["split", "split"]
    assert [e["args"]["decision"] for e in events if e["ph"] == "i"] == [1]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"running", "waiting"}
