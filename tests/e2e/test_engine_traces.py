"""Decision traces of an engine."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from engines import EASY, GREEDY, LENGTHS, PROMPTS, Launches, Model, fail_launches, make, run_to_end

from bullet_graph import ConfigError, EngineDeadError, RequestError, Slo
from bullet_graph.perf.trace import read_trace
from bullet_graph.runtime.cpu import CpuExecutor

# ---- decision traces ----


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("policy", ["mixed", "auto"])
def test_a_trace_holds_all_that_happened(model: Model, launches: Launches, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "trace.jsonl"
    slo = Slo(ttft_ms=1e6, tpot_ms=1e-6)
    with make(model, policy, slo=slo, trace_decisions=path) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY, slo=Slo(ttft_ms=5) if i == 4 else None)
        engine.abort("1")
        for _ in range(5):
            engine.step()
        engine.abort("2")
        run_to_end(engine)
        num_steps, seconds = engine.stats().num_steps, dict(engine.stats().policy_seconds)
        with pytest.raises(RequestError):
            engine.add_request("refused", [])
    trace = read_trace(path)
    assert trace.notes == ()
    assert (trace.header.policy, trace.header.slo) == (policy, str(slo))
    assert (trace.header.device, trace.header.num_sms, trace.header.num_layers) == ("cpu", None, 2)
    reasons = {request.request_id: request.reason for request in trace.requests}
    assert reasons == {"0": "length", "1": "abort", "2": "abort", "3": "length", "4": "length", "5": "length"}
    requests = {request.request_id: request for request in trace.requests}
    assert len(trace.requests) == 6
    assert (requests["1"].output_tokens, requests["1"].first_scheduled_s) == (0, None)
    assert [requests[str(i)].prompt_tokens for i in range(6)] == list(LENGTHS)
    assert requests["3"].output_tokens == len(requests["3"].token_us) == 12
    assert (requests["3"].ttft_limit_ms, requests["3"].tpot_limit_ms) == (1e6, 1e-6)
    assert (requests["4"].ttft_limit_ms, requests["4"].tpot_limit_ms) == (5, 1e-6)
    assert [(launch.lane, launch.decode_rows, launch.prefill_rows) for launch in trace.launches] == [
        (
            placement.lane,
            0 if step.decode is None else len(step.decode.slots),
            0 if step.prefill is None else len(step.prefill.token_ids),
        )
        for step, placement in launches
    ]
    assert all(launch.retired_s is not None for launch in trace.launches)
    assert sum(launch.layers for launch in trace.launches) == 2 * num_steps
    measured: dict[str, float] = {}
    for launch in trace.launches:
        measured[launch.policy] = measured.get(launch.policy, 0.0) + (launch.device_ms or 0.0) / 1e3
    assert measured == pytest.approx(seconds)


def test_a_trace_goes_on_under_another_policy_and_after_an_interrupt(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    with make(model, trace_decisions=path) as engine:
        engine.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
        engine.set_policy("mixed", EASY)
        engine.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
        with monkeypatch.context() as patch:
            fail_launches(patch, 3, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
        engine.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    trace = read_trace(path)
    assert [request.prompt_tokens for request in trace.requests if request.reason == "length"] == [4, 1, 90]
    assert {decision.policy for decision in trace.decisions} == {"solo"}


def test_a_trace_file_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutdown = Mock(wraps=CpuExecutor.shutdown)
    monkeypatch.setattr(CpuExecutor, "shutdown", lambda executor: shutdown(executor))
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"trace\.jsonl exists"):
        make(trace_decisions=path)
    assert path.read_text() == "precious"
    assert not shutdown.called, "known before the engine is built"
    with pytest.raises(ConfigError, match="cannot be made"):
        make(trace_decisions=tmp_path / "no-such-folder" / "trace.jsonl")
    assert shutdown.call_count == 1, "the memory is given back"


def test_a_trace_of_a_failed_engine_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = make(trace_decisions=path)
    engine.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    fail_launches(monkeypatch, 2, RuntimeError("on fire"))
    with pytest.raises(EngineDeadError):
        engine.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    engine.shutdown()
    assert read_trace(path).requests[0].reason == "length"
