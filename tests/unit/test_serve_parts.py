"""Parts of the server on their own: the gate, histograms, percentiles, formats, errors."""

import asyncio
import json
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from core_loop import CoreLoop
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bullet_graph import CompletionOutput, ConfigError, EngineDeadError, LateError, PromptError, TokenLogprobs
from bullet_graph.serve.app import watch
from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.formats import ChatFormat, CompletionFormat, token_texts
from bullet_graph.serve.generation import Generation
from bullet_graph.serve.limits import Drained, Gate, LimitMiddleware
from bullet_graph.serve.metrics import LIVE_WINDOW_S, ServerMetrics
from bullet_graph.serve.protocol import _HARMLESS, ChatCompletionRequest, CompletionRequest
from bullet_graph.serve.settings import ServeSettings
from bullet_graph.serve.tools import FORMATS, ToolCallParser
from bullet_graph.slo import NO_TARGETS, Slo


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def gate(max_queue_len: int, *, waiting: int = 0, clock: Clock | None = None, dead: bool = False) -> Gate:
    engine = SimpleNamespace(failure=EngineDeadError("the device is gone") if dead else None, num_waiting=waiting)
    return Gate(engine, max_queue_len, clock=clock or Clock())  # type: ignore[arg-type]


# ---- the gate ----


def test_the_gate_counts_sequences_until_the_engine_has_them_and_while_they_wait_there() -> None:
    full = gate(9, waiting=1)
    with full.enter(2) as hand_over, full.enter(7):  # the queue has room for one more request, however large
        assert (full.num_inside, full.num_waiting) == (2, 10)
        hand_over(1)
        assert full.num_waiting == 9
        with pytest.raises(ApiError) as refused, full.enter(1):
            pass
        assert refused.value.status == 429
        assert (full.num_inside, full.num_waiting) == (2, 9)
    assert (full.num_inside, full.num_waiting) == (0, 1)


def test_when_to_come_back_follows_the_requests_that_ended_lately() -> None:
    clock = Clock()
    busy = gate(1, clock=clock)
    assert busy.retry_after_s() == 1
    for _ in range(10):
        with busy.enter(1):
            clock.now_s += 4.4
    assert busy.retry_after_s() == 4
    clock.now_s += 10_000
    assert busy.retry_after_s() == 60
    assert ApiError.of(LateError("too late", 10_000)).headers == {"Retry-After": "60"}


def test_a_dead_engine_and_a_closed_gate_let_nobody_in() -> None:
    for dead, closed in ((True, False), (False, True), (True, True)):
        house, text = gate(1, dead=dead), "shutting down" if closed else "the device is gone"
        house.closed = closed
        with pytest.raises(ApiError, match=text) as refused, house.enter(1):
            pass
        assert refused.value.status == 503
        assert refused.value.headers == ({"Retry-After": "5"} if closed else {})


async def test_waiting_until_the_last_has_gone() -> None:
    house = gate(9)
    await house.empty.wait()
    with house.enter(1):
        with house.enter(1):
            assert not house.empty.is_set()
        assert not house.empty.is_set()
    await house.empty.wait()


# ---- the watchdog ----


async def test_the_watchdog_allows_for_a_process_that_was_paused(caplog: pytest.LogCaptureFixture) -> None:
    engine = Mock(failure=None)
    progress_s = time.monotonic()
    engine.stalled = lambda limit_s: "a step" if time.monotonic() - progress_s > limit_s else None
    engine.fail = lambda reason: setattr(engine, "failure", reason)
    task = asyncio.create_task(watch(engine, Mock(closed=False), 0.4))
    await asyncio.sleep(0)
    time.sleep(0.6)  # all stands still
    await asyncio.sleep(0.02)
    assert engine.failure is None
    progress_s = time.monotonic()
    await asyncio.wait_for(task, 10)
    assert "no progress for 0.4 s (--watchdog-timeout): a step" in engine.failure
    await watch(engine, Mock(closed=True), 0.4)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"], "what a shutdown ends is no error"


# ---- figures ----


async def test_energy_is_what_was_used_since_the_start() -> None:
    probe = Mock()
    # The last: the driver failed for once.
    probe.total_energy_mj.side_effect = [5_000, 7_500, None]
    metrics = ServerMetrics("m", Mock(), Mock(), probe)
    assert metrics.energy_joules == 0
    for _ in range(2):
        await metrics.read_energy()
        assert metrics.energy_joules == 2.5
    nothing = ServerMetrics("m", Mock(), Mock(), None)
    await nothing.read_energy()
    assert nothing.energy_joules is None


# ---- requests ----


def test_seeds_of_any_sign_and_size_are_kept_apart() -> None:
    seeds = [-(2**31) - 1, -2, -1, 0, 1, 2, 2**31 - 1, 2**31 + 1]
    found = [CompletionRequest(prompt=[1], seed=seed).sampling_params(5, {}).seed for seed in seeds]
    assert len(set(found)) == len(seeds)
    assert found[3:] == seeds[3:]
    assert CompletionRequest(prompt=[1]).sampling_params(5, {}).seed is None


VLLMS_DEFAULTS: dict[str, object] = json.loads(
    """{"allowed_token_ids": null, "bad_words": [], "cache_salt": null, "ec_transfer_params": null, "echo": false,
    "frequency_penalty": null, "ignore_eos": false, "include_stop_str_in_output": false, "kv_transfer_params": null,
    "length_penalty": 1.0, "logit_bias": null, "logprob_token_ids": null, "max_tokens": null, "min_p": null,
    "min_tokens": 0, "model": null, "n": 1, "presence_penalty": null, "priority": 0, "prompt_logprobs": null,
    "repetition_detection": null, "repetition_penalty": null, "response_format": null, "return_mm_kwargs": true,
    "return_token_ids": null, "return_token_offsets": false, "return_tokens_as_token_ids": null, "seed": null,
    "routed_experts_prompt_start": 0, "session_id": null, "skip_special_tokens": true, "stop": [],
    "spaces_between_special_tokens": true, "stop_token_ids": [], "stream": false, "stream_interval": null,
    "stream_options": null, "structured_outputs": null, "temperature": null, "thinking_token_budget": null,
    "top_k": null, "top_p": null, "truncate_prompt_tokens": null, "truncation_side": null, "user": null,
    "use_beam_search": false, "vllm_xargs": null, "watermarking": null}"""
)
OF_A_CHAT: dict[str, object] = json.loads(
    """{"add_generation_prompt": true, "add_special_tokens": false, "chat_template": null, "top_logprobs": 0,
    "chat_template_kwargs": null, "continue_final_message": false, "documents": null, "include_reasoning": true,
    "logprobs": false, "max_completion_tokens": null, "media_io_kwargs": null, "mm_processor_kwargs": null,
    "tool_choice": "none", "parallel_tool_calls": true, "reasoning_effort": null, "return_prompt_text": null,
    "tools": null, "messages": [{"role": "user", "content": "x"}]}"""
)
OF_A_COMPLETION: dict[str, object] = json.loads(
    '{"add_special_tokens": true, "logprobs": null, "prompt": "x", "prompt_embeds": null, "suffix": null}'
)


@pytest.mark.parametrize(("kind", "own"), [(ChatCompletionRequest, OF_A_CHAT), (CompletionRequest, OF_A_COMPLETION)])
def test_vllms_fields_at_their_defaults_ask_for_nothing(
    kind: type[ChatCompletionRequest | CompletionRequest], own: dict[str, object]
) -> None:
    assert kind.model_validate(VLLMS_DEFAULTS | own | dict.fromkeys(_HARMLESS, "anything"))
    assert not kind.neutral.keys() & kind.model_fields.keys()
    needed = {name: own[name] for name in ("messages", "prompt") if name in own}
    for name in (VLLMS_DEFAULTS | own).keys() - kind.model_fields.keys() - _HARMLESS:
        with pytest.raises(ValidationError, match=f"`{name}` is not supported by this server"):
            kind.model_validate(needed | {name: "something else"})


def test_messages_may_carry_what_servers_have_added_to_them() -> None:
    extras = {"refusal": None, "annotations": [], "audio": {"id": "a"}, "function_call": None, "reasoning_content": "…"}
    answer = {"role": "assistant", "content": "Yes.", "provider_specific_fields": {"x": 1}, **extras}
    part = {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}}
    asked = {"role": "user", "content": [part], "name": None}
    silent = {"role": "assistant", "content": None}
    named = {"type": "function", "function": {"name": "f"}}
    forced = {"messages": [asked], "tools": [named], "tool_choice": named}
    assert '"maxItems": 1' in str(ChatCompletionRequest.model_validate(forced).wanted_structure)
    request = ChatCompletionRequest.model_validate({"messages": [asked, answer, silent]})
    assert [message.for_template() for message in request.messages] == [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "assistant", "content": ""},
    ]


# ---- formats ----


@given(st.text(), st.text())
def test_whatever_the_text_an_event_is_json(text: str, model: str) -> None:
    for written in (CompletionFormat, ChatFormat):
        form = written(model, token_texts(None), with_token_ids=True, request_id="7")
        event = form.event(3, CompletionOutput(0, text, (5,), None, None), {"usage": {"total_tokens": 3}})
        assert (event[-2:], event.count(b"\n")) == (b"\n\n", 2)
        fields = json.loads(event.removeprefix(b"data: "))
        (choice,) = fields["choices"]
        assert (choice["index"], choice["token_ids"], fields["model"]) == (3, [5], model)
        assert (choice["delta"]["content"] if "delta" in choice else choice["text"]) == text
        assert fields["usage"]["total_tokens"] == 3


def test_log_probabilities_that_json_cannot_say_and_tokens_of_one_text() -> None:
    entry = TokenLogprobs(7, float("-inf"), ((1, -0.5), (2, -0.7)))
    form = CompletionFormat("m", lambda _: "ab", with_token_ids=False, request_id="7")
    for offsets in ([0, 2], [4, 6]):
        event = form.event(0, CompletionOutput(0, "", (7, 7), (entry, entry), None), {})
        logprobs = json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-9999.0] * 2
        assert logprobs["top_logprobs"] == [{"ab": -0.5}] * 2
        assert logprobs["text_offset"] == offsets


def test_bytes_of_a_token_are_told_unless_it_is_part_of_a_character() -> None:
    entry = TokenLogprobs(1, -0.5, ((1, -0.5), (2, -0.7)))
    form = ChatFormat("m", {1: "é", 2: "\ufffd"}.__getitem__, with_token_ids=False, request_id="7")
    event = form.event(0, CompletionOutput(0, "", (1,), (entry,), None), {})
    (first,) = json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]["content"]
    assert bytes(first["bytes"]).decode() == "é"
    assert [top["bytes"] for top in first["top_logprobs"]] == [first["bytes"], None]


@pytest.mark.parametrize(("end", "reason"), [("}}", "tool_calls"), ("}", "tool_calls"), ("", "stop")])
def test_arguments_that_a_stop_string_cuts_are_no_whole_call(end: str, reason: str) -> None:
    form = ChatFormat("m", str, "7", call_parser=lambda: ToolCallParser(FORMATS["llama3_json"]))
    event = form.event(0, CompletionOutput(0, '{"name": "f", "parameters": {"a": 1' + end, (1,), None, "stop"), {})
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["finish_reason"] == reason


# ---- errors ----


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PromptError("p"), 400),
        (ConfigError("c"), 400),
        (EngineDeadError("e"), 503),
        (TimeoutError(), 504),
        (ZeroDivisionError("secret"), 500),
        (ApiError(418, "x"), 418),
    ],
)
def test_the_status_of_an_error(error: Exception, status: int) -> None:
    told = ApiError.of(error)
    assert told.status == status
    assert b"secret" not in told.json()
    assert told.body["error"]["param"] == ("prompt" if isinstance(error, PromptError) else None)


UNKNOWN = {f"k{i}": 1 for i in range(16_000)}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [-1] * 8000},
        {"prompt": [10**4000] * 100},
        {"prompt": [[-1] * 8000] * 100},
        {"prompt": UNKNOWN},
        {"prompt": [1]} | UNKNOWN,
        {"prompt": [1], "slo": UNKNOWN},
        {"prompt": [1], "k" * 10**6: 1},
        {"messages": [{}] * 8000},
        {"messages": [USER | UNKNOWN | {"content": 5}] * 9},
        {"messages": [USER | {"content": [{"type": "text"}] * 8000}]},
    ],
    ids=lambda body: str(body)[:30],
)
def test_a_huge_wrong_body_is_refused_in_little_time_and_few_words(body: dict[str, object]) -> None:
    begin_s = time.perf_counter()
    with pytest.raises(ValidationError) as invalid:
        (ChatCompletionRequest if "messages" in body else CompletionRequest).model_validate(body)
    errors = [error | {"loc": ("body", *error["loc"])} for error in invalid.value.errors()]  # as the framework does
    told = ApiError.of(RequestValidationError(errors, body=body))
    assert len(str(told)) < 1000
    assert len(told.json()) < 1500
    assert time.perf_counter() - begin_s < 0.5


async def test_a_body_in_parts_is_held_no_longer_than_its_request() -> None:
    limits = LimitMiddleware(AsyncMock(), ServeSettings(served_model_name="m", max_body_bytes=10), Drained())
    for size in (5, 6):  # the second is refused
        parts = [{"type": "http.request", "body": b"x" * size, "more_body": more} for more in (True, False)]
        await limits({"type": "http", "headers": []}, AsyncMock(side_effect=parts), AsyncMock())
        assert limits._held_bytes == 0


def test_requests_without_targets_say_nothing_of_attainment() -> None:
    metrics, times = ServerMetrics("m", Mock(), Mock(), None), Mock(ttft_ms=1.0, e2e_ms=2.0, tpot_ms=1.0)
    for slo, missed in ((NO_TARGETS, ()), *[(Slo(ttft_ms=9), ())] * 3, (Slo(ttft_ms=0.5), ("ttft",))):
        metrics.finished(Mock(metrics=times, slo=slo, missed_targets=missed))
    assert metrics._slo_attainment == 0.75


def test_figures_leave_out_the_warm_up_and_prometheus_gets_seconds() -> None:
    names = ("num_prompt_tokens", "num_output_tokens", "prefix_cache_queries", "prefix_cache_hits")
    of_warm_up = dict(zip(names, (1, 2, 3, 4), strict=True)) | {"kv_blocks_used": 25, "kv_blocks_total": 100}
    engine = Mock(failure=None, stats=replace(CoreLoop("serial").core.stats(), **of_warm_up))
    metrics = ServerMetrics("m", engine, Mock(num_waiting=5), None)
    counters = dict(zip(names, (11, 22, 33, 44), strict=True))
    engine.stats = replace(engine.stats, predicted_ttft_ms=250.0, kv_blocks_peak=75, **counters)
    metrics._recent.append((time.monotonic() - 1.01 * LIVE_WINDOW_S, 9.0, 9.0))
    metrics.finished(Mock(metrics=Mock(ttft_ms=1.0, e2e_ms=2.0, tpot_ms=1.0), slo=NO_TARGETS))
    live, told = metrics.live(), {s.name[13:]: s.value for family in metrics.collect() for s in family.samples}
    grown = {"prompt_tokens": 10, "generation_tokens": 20, "prefix_cache_queries": 30, "prefix_cache_hits": 40}
    assert told.items() >= {f"{name}_total": value for name, value in grown.items()}.items()
    assert live.items() >= {name: grown[name] for name in list(grown)[1:]}.items()
    shares = live["kv_cache_usage"], told["kv_cache_usage_perc"]
    assert (*shares, told["predicted_time_to_first_token_seconds"]) == (0.25, 0.25, 0.25)
    assert (live["requests"], told["e2e_request_latency_seconds_sum"]) == (1, 0.002)


def test_min_tokens_raises_the_default_limit_of_an_output() -> None:
    found, engine = Generation.__new__(Generation), SimpleNamespace(max_model_len=50)
    found.__dict__.update(_engine=Mock(engine=engine), _settings=Mock(max_prompt_tokens=None), _defaults={})
    limits = [found._max_tokens(CompletionRequest(prompt=[1], min_tokens=least), 10) for least in (None, 5, 30, 45)]
    assert limits == [16, 16, 30, 40]
