"""The server as OpenAI's own client sees it, and as the engine itself would have answered."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import jinja2
import openai
import pytest
from checkpoints import BOS_TOKEN_ID, write_checkpoint
from engines import Model, make_engine
from servers import MODEL, Served, serving

from bullet_graph import Engine, RequestOutput, SamplingParams

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sea salt?"}]
SERVER = {"max_model_len": 256}
Create = Callable[..., Any]


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    """The same engine, without a server."""
    with make_engine(**SERVER) as engine:
        yield engine


@pytest.fixture
def complete(client: openai.OpenAI) -> Create:
    return partial(client.completions.create, model=MODEL)


@pytest.fixture
def chat(client: openai.OpenAI) -> Create:
    return partial(client.chat.completions.create, model=MODEL, messages=MESSAGES)


def answer(engine: Engine, prompt: str | list[int], **params: object) -> RequestOutput:
    (output,) = engine.generate(prompt, SamplingParams(**({"temperature": 0} | params)), use_tqdm=False)
    return output


# ---- completions ----


@pytest.mark.parametrize("prompt", ["The sea", [5, 17, 300, 8]], ids=["text", "ids"])
def test_a_completion_is_the_engines(complete: Create, alone: Engine, prompt: str | list[int]) -> None:
    ask = partial(complete, prompt=prompt, max_tokens=12, temperature=0, extra_body={"return_token_ids": True})
    completion = ask()
    (choice,) = completion.choices
    expected = answer(alone, prompt, max_tokens=12)
    assert choice.text == expected.outputs[0].text
    assert tuple(choice.token_ids) == expected.outputs[0].token_ids
    assert tuple(choice.prompt_token_ids) == expected.prompt_token_ids
    assert (choice.finish_reason, completion.model) == ("length", MODEL)
    assert completion.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert completion.usage.total_tokens == len(expected.prompt_token_ids) + 12
    for echo in (False, True):
        first, *others = [event.choices[0].model_extra.get("prompt_token_ids") for event in ask(stream=True, echo=echo)]
        assert (first, set(others)) == (choice.prompt_token_ids, {None})


def test_without_max_tokens_a_completion_has_sixteen_or_ends_at_the_models_limit(served: Served) -> None:
    for given, made in ((2, 16), (250, 6)):
        assert served.complete(prompt=[1] * given, temperature=0)["usage"]["completion_tokens"] == made


def test_several_prompts_and_samples_are_numbered_in_order(complete: Create, alone: Engine) -> None:
    prompts, sampling = ["The sea", "A dog", "Nobody"], {"max_tokens": 5, "n": 2, "seed": 4, "temperature": 1}
    expected = [sample.text for prompt in prompts for sample in answer(alone, prompt, **sampling).outputs]
    whole = complete(prompt=prompts, **sampling)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(expected))
    assert whole.usage.completion_tokens == 6 * 5
    pieces = dict.fromkeys(range(6), "")
    reasons = []
    for chunk in complete(prompt=prompts, **sampling, stream=True):
        (choice,) = chunk.choices
        pieces[choice.index] += choice.text
        reasons += [choice.index] * (choice.finish_reason is not None)
    assert list(pieces.values()) == expected
    assert sorted(reasons) == list(range(6))


def test_a_stream_has_an_event_a_token_and_its_usage(served: Served, complete: Create, alone: Engine) -> None:
    options = {"include_usage": True}
    *tokens, last = complete(prompt="The sea", max_tokens=9, temperature=0, stream=True, stream_options=options)
    choices = [choice for chunk in tokens for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == answer(alone, "The sea", max_tokens=9).outputs[0].text
    assert [choice.finish_reason for choice in choices] == [None] * 8 + ["length"]
    assert [(len(chunk.choices), chunk.usage) for chunk in tokens] == [(1, None)] * 9
    assert (last.choices, last.usage.completion_tokens) == ([], 9)
    assert {chunk.id for chunk in tokens} == {last.id}
    body = {"prompt": [1, 2], "max_tokens": 3, "stream": True}
    for included, counts in ((options, [1, 2, 3, 3]), ({}, [None] * 3)):
        body["stream_options"] = included | {"continuous_usage_stats": True, "include_obfuscation": False}
        lines = served.post("/v1/completions", **body).text.splitlines()
        *events, done = (line.removeprefix("data: ") for line in lines if line)
        usages = [json.loads(event).get("usage", {"completion_tokens": None}) for event in events]
        assert ([usage["completion_tokens"] for usage in usages], done) == (counts, "[DONE]")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(complete: Create, alone: Engine, stream: bool) -> None:
    whole = answer(alone, "The sea", max_tokens=30).outputs[0].text
    stop = [whole[10:12], "\x00never"]
    result = complete(prompt="The sea", max_tokens=30, temperature=0, stop=stop, stream=stream)
    chunks = list(result) if stream else [result]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop[0])]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_of_a_completion(complete: Create, alone: Engine) -> None:
    told = complete(prompt="The sea", max_tokens=4, temperature=0, logprobs=3).choices[0].logprobs
    expected = answer(alone, "The sea", max_tokens=4, logprobs=3).outputs[0]
    assert expected.logprobs is not None
    assert alone.tokenizer is not None
    assert told.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs])
    # A token may be a part of a character, which alone is shown as a replacement character.
    assert told.tokens == [alone.tokenizer.decode([i]) for i in expected.token_ids]
    # Such a part adds nothing to the text before the character is whole.
    stream = alone.tokenizer.stream()
    assert told.text_offset == [0, *accumulate(len(stream.push(i)) for i in expected.token_ids[:-1])]
    for token, chosen, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[token] == max(top.values()) == chosen  # greedy
        assert len(top) <= 3


# ---- chats ----


def test_a_chat_is_put_into_the_template(chat: Create, alone: Engine) -> None:
    found = chat(temperature=0, max_completion_tokens=12)
    tokenizer = alone.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), add_special_tokens=False)
    message, text = found.choices[0].message, answer(alone, ids, max_tokens=12).outputs[0].text
    assert (message.role, message.content) == ("assistant", text)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), 12)
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    in_parts = [{"role": "developer", "content": parts}, MESSAGES[1]]
    assert chat(temperature=0, messages=in_parts, max_tokens=12).choices[0].message.content == text
    texts: list[Any] = ["No.", [{"type": "refusal", "refusal": "No."}]]
    refusals = [[*MESSAGES, {"role": "assistant", "content": text}, MESSAGES[1]] for text in texts]
    one, other = (chat(messages=said, max_tokens=12, temperature=0).model_dump() for said in refusals)
    assert one["choices"] == other["choices"]
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    # Without max_tokens, a chat goes on to the model's limit.
    assert chat(temperature=0).usage.total_tokens == 256


def test_a_template_is_compiled_once_and_rendered_off_the_loop(chat: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_template, render, threads = jinja2.Environment.from_string, jinja2.Template.generate, []

    def compiled(*args: Any, **options: Any) -> jinja2.Template:
        threads.append("compiled")
        return compile_template(*args, **options)

    def rendered(*args: Any, **options: Any) -> Iterator[str]:
        threads.append(threading.current_thread().name.rstrip("_01"))
        return render(*args, **options)

    chat(max_tokens=1)
    monkeypatch.setattr(jinja2.Environment, "from_string", compiled)
    monkeypatch.setattr(jinja2.Template, "generate", rendered)
    for _ in range(2):
        chat(max_tokens=1)
    assert threads == ["bullet-graph-tokenizer"] * 2


def test_a_chat_streams(chat: Create) -> None:
    options = {"max_completion_tokens": 8, "n": 2, "seed": 6, "extra_body": {"return_token_ids": True}}
    pieces, roles, whole = {0: "", 1: ""}, [], chat(**options)
    for chunk in chat(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            roles += [(choice.delta.role, chunk.prompt_token_ids)] if choice.delta.role else []
    assert roles == [("assistant", whole.prompt_token_ids)] * 2
    assert list(pieces.values()) == [choice.message.content for choice in whole.choices]
    assert chunk.usage.completion_tokens == 16


def test_log_probabilities_of_a_chat(chat: Create) -> None:
    create = partial(chat, max_completion_tokens=3, temperature=0, logprobs=True)
    entries = create(top_logprobs=2).choices[0].logprobs.content
    assert len(entries) == 3
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
    assert [entry.top_logprobs for entry in create().choices[0].logprobs.content] == [[]] * 3


def test_end_of_sequence_ends_a_chat_unless_ignored(model: Model) -> None:
    """Id 1 ends a sequence; all 320 are equally probable. Each text begins with id 0, written by the template alone."""
    with serving(model.folder, max_model_len=512) as served:
        ask = {"max_tokens": 1, "return_token_ids": True}
        answer = served.post("/v1/chat/completions", messages=MESSAGES, **ask).json()
        assert answer["prompt_token_ids"].count(BOS_TOKEN_ID) == 1
        ask["chat_template_kwargs"] = {"speaker": "dog"}
        ids = served.post("/v1/chat/completions", messages=MESSAGES, **ask).json()["prompt_token_ids"]
        tokenizer = served.engine.engine.tokenizer
        assert tokenizer is not None
        assert tokenizer.decode(ids).endswith("[dog] ")
        ask["chat_template_kwargs"] = {"messages": []}
        refused = served.post("/v1/chat/completions", messages=MESSAGES, **ask)
        assert refused.status_code == 400
        assert "`chat_template_kwargs` must name variables" in refused.text
        del ask["chat_template_kwargs"]
        (choice,) = served.complete(prompt="The sea", **ask)["choices"]
        assert choice["prompt_token_ids"].count(BOS_TOKEN_ID) == 1
        ends = []
        for ignore_eos in (False, True):
            options = {"max_tokens": 400, "seed": 6, "temperature": 1000, "ignore_eos": ignore_eos}
            answer = served.post("/v1/chat/completions", messages=MESSAGES, **options).json()
            ends.append((answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]))
        (ended, num_tokens), whole = ends
        assert ended == "stop"
        assert num_tokens < 400
        assert whole == ("length", 400)


# ---- other paths ----


def test_models_health_and_version(served: Served, client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.owned_by) == (MODEL, "bullet_graph")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")

    assert served.http.get("/health").json() == {"status": "ok"}
    assert (served.http.head("/health").status_code, served.http.head("/health").content) == (200, b"")
    assert served.http.get("/version").json()["version"]


def test_targets_of_a_request_reach_the_engine(served: Served) -> None:
    before = served.metrics()
    served.complete(prompt=[1], max_tokens=3, slo={"ttft_ms": 1e6, "tpot_ms": 1e6})
    served.complete(prompt=[1], max_tokens=3, slo={"ttft_ms_per_token": 1e-6})
    after = served.metrics()
    for name, grown in (("slo_requests_total", 2), ("slo_requests_met_total", 1)):
        assert after[name] - before[name] == grown


def test_metrics_have_vllms_names_and_count(served: Served) -> None:
    before, begin_s = served.metrics(), time.monotonic()
    served.complete(prompt=[1] * 7, max_tokens=5)
    list(served.client().completions.create(model=MODEL, prompt=[1] * 3, max_tokens=4, stream=True))
    served.wait_until_idle()
    after = served.metrics()
    grown = {name: value - before[name] for name, value in after.items() if name in before}
    expected = {
        "prompt_tokens_total": 10,
        "generation_tokens_total": 9,
        'request_success_total{finished_reason="length"}': 2,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 4 + 3,
        "e2e_request_latency_seconds_count": 2,
    }
    assert grown | expected == grown
    # The two requests came one after the other.
    whole_s = grown["e2e_request_latency_seconds_sum"]
    for name in ("inter_token_latency", "time_to_first_token"):
        assert 0 < grown[f"{name}_seconds_sum"] < whole_s < time.monotonic() - begin_s
    assert after['time_to_first_token_seconds_bucket{le="+Inf"}'] == after["time_to_first_token_seconds_count"]
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0
    assert sum(v for name, v in after.items() if name.startswith("policy_time_share")) == pytest.approx(1)
    assert grown['lane_seconds_total{lane="decode"}'] > 0


def test_several_samples_have_one_prompt_and_the_latency_of_the_last_to_end(served: Served) -> None:
    two = {"prompt": [1], "n": 2, "best_of": 2, "seed": 3, "return_token_ids": True}
    (stop, *_), _ = (choice["token_ids"] for choice in served.complete(**two, max_tokens=1)["choices"])
    before = served.metrics()
    choices = served.complete(**two, max_tokens=20, stop_token_ids=[stop])["choices"]
    assert len(choices[0]["token_ids"]) == 1 < len(choices[1]["token_ids"])
    after = served.metrics()
    names = ("prompt_tokens_total", "time_to_first_token_seconds_sum", "e2e_request_latency_seconds_sum")
    prompt_tokens, first_s, whole_s = (after[name] - before[name] for name in names)
    assert (prompt_tokens, whole_s > first_s) == (1, True)


def test_cached_prefixes_are_told_and_kept_apart_by_salts(served: Served, complete: Create) -> None:
    before = served.metrics()
    prompts = [[*range(40, 80), 1], [*range(40, 80), 2]]

    def cached(salt: str | None, **more: Any) -> int:
        usage = complete(prompt=prompts, max_tokens=2, extra_body={"cache_salt": salt}, **more).usage
        return usage.prompt_tokens_details.cached_tokens  # type: ignore[no-any-return]

    # The second prompt awaits no prefix as short as two blocks.
    assert [cached(None), cached(None), cached("a"), cached("a", n=2)] == [0, 64, 0, 64]
    *_, last = complete(prompt=prompts, max_tokens=2, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == 64
    served.wait_until_idle()
    after = served.metrics()
    grown = [after[name] - before[name] for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")]
    assert grown == [41 * 12, 32 * 8]
    assert served.http.get("/live").json()["prefix_cache_hits"] == after["prefix_cache_hits_total"]


# ---- errors, as the client raises them ----


def test_another_model_is_not_served(complete: Create) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here") as missing:
        complete(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"


def test_a_model_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", vocab_size=64, num_layers=1, tokenizer=False)
    with serving(tmp_path, max_model_len=64) as served:
        answer = served.complete(prompt=[5, 6], max_tokens=3, logprobs=1, return_token_ids=True, ignore_eos=True)
        (choice,) = answer["choices"]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        for path, body, message in (
            ("/v1/completions", {"prompt": "text"}, "needs a tokenizer"),
            ("/v1/completions", {"prompt": [5], "stop": "x"}, "stop strings need a tokenizer"),
            ("/v1/chat/completions", {"messages": MESSAGES}, "the model has no tokenizer, which a chat needs"),
            ("/tokenize", {"prompt": "x"}, "tokenizer"),
            ("/detokenize", {"tokens": [1]}, "tokenizer"),
        ):
            response = served.post(path, **body)
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
