"""The server as OpenAI's own client sees it, and as the engine itself would have answered."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from checkpoints import BOS_TOKEN_ID, write_checkpoint
from engines import Model, make_engine
from servers import MODEL, Served, serving

from bullet_graph import Engine, SamplingParams

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sea salt?"},
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_model_len=256) as served:
        yield served


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    """The same engine, without a server."""
    with make_engine(max_model_len=256) as engine:
        yield engine


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def answer(engine: Engine, prompt: str | list[int], **params: object) -> str:
    (output,) = engine.generate(prompt, SamplingParams(**({"temperature": 0} | params)), use_tqdm=False)
    return output.outputs[0].text


# ---- completions ----


@pytest.mark.parametrize("prompt", ["The sea", [5, 17, 300, 8]], ids=["text", "ids"])
def test_a_completion_is_the_engines(client: openai.OpenAI, alone: Engine, prompt: str | list[int]) -> None:
    completion = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
    (choice,) = completion.choices
    assert choice.text == answer(alone, prompt, max_tokens=12)
    assert choice.finish_reason == "length"
    assert completion.model == MODEL
    assert completion.usage is not None
    tokens = alone.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt  # type: ignore[union-attr]
    assert completion.usage.prompt_tokens == len(tokens)
    assert completion.usage.total_tokens == len(tokens) + 12


def test_without_max_tokens_a_completion_has_sixteen_or_ends_at_the_models_limit(served: Served) -> None:
    for prompt_tokens, output_tokens in ((2, 16), (250, 6)):
        usage = served.complete(prompt=[1] * prompt_tokens, temperature=0)["usage"]
        assert usage["completion_tokens"] == output_tokens


def test_several_prompts_and_samples_are_numbered_in_order(client: openai.OpenAI, alone: Engine) -> None:
    prompts = ["The sea", "A dog", "Nobody"]
    whole = client.completions.create(model=MODEL, prompt=prompts, max_tokens=5, n=2, seed=4, temperature=1)
    assert [choice.index for choice in whole.choices] == list(range(6))
    expected = []
    for prompt in prompts:
        (output,) = alone.generate(prompt, SamplingParams(max_tokens=5, n=2, seed=4), use_tqdm=False)
        expected += [sample.text for sample in output.outputs]
    assert [choice.text for choice in whole.choices] == expected
    pieces = dict.fromkeys(range(6), "")
    reasons = []
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=5, n=2, seed=4, temperature=1, stream=True
    ):
        (choice,) = chunk.choices
        pieces[choice.index] += choice.text
        reasons += [choice.index] * (choice.finish_reason is not None)
    assert list(pieces.values()) == expected
    assert sorted(reasons) == list(range(6))


def test_a_stream_has_an_event_a_token_and_its_usage(
    served: Served, client: openai.OpenAI, alone: Engine
) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="The sea", max_tokens=9, temperature=0, stream=True, stream_options=options
        )
    )
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == answer(
        alone, "The sea", max_tokens=9
    )
    assert [len(chunk.choices) for chunk in chunks] == [1] * 9 + [0]
    assert [chunk.usage is None for chunk in chunks] == [True] * 9 + [False]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 8 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    body = {"prompt": [1, 2], "max_tokens": 3, "stream": True}
    body["stream_options"] = options | {"continuous_usage_stats": True}
    text = served.post("/v1/completions", **body).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    assert [json.loads(event)["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, alone: Engine) -> None:
    whole = answer(alone, "The sea", max_tokens=30)
    stop = whole[10:12]
    options = {"model": MODEL, "prompt": "The sea", "max_tokens": 30, "temperature": 0}
    options["stop"] = [stop, "\x00never"]
    for stream in (False, True):
        result = client.completions.create(**options, stream=stream)  # type: ignore[call-overload]
        chunks = list(result) if stream else [result]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return client.completions.create(model=MODEL, prompt="x", max_tokens=12, seed=seed).choices[0].text

    assert text(3) == text(3)
    assert text(3) != text(4)
    assert text(-5)


def test_log_probabilities_of_a_completion(client: openai.OpenAI, alone: Engine) -> None:
    completion = client.completions.create(
        model=MODEL, prompt="The sea", max_tokens=4, temperature=0, logprobs=3
    )
    told = completion.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    (output,) = alone.generate(
        "The sea", SamplingParams(temperature=0, max_tokens=4, logprobs=3), use_tqdm=False
    )
    expected = output.outputs[0].logprobs
    assert expected is not None
    assert told.token_logprobs == pytest.approx([entry.logprob for entry in expected])
    tokenizer = alone.tokenizer
    assert tokenizer is not None
    # A token may be a part of a character, which alone is shown as a replacement character.
    assert told.tokens == [tokenizer.decode([i]) for i in output.outputs[0].token_ids]
    assert told.text_offset == [sum(map(len, told.tokens[:i])) for i in range(4)]
    assert told.top_logprobs is not None
    for token, chosen, top in zip(told.tokens, told.token_logprobs or [], told.top_logprobs, strict=True):
        assert top[token] == max(top.values()) == chosen  # greedy
        assert len(top) <= 3


def test_token_ids_on_request(served: Served, alone: Engine) -> None:
    body = {"prompt": "The sea", "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    (output,) = alone.generate("The sea", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    (choice,) = served.complete(**body)["choices"]
    assert tuple(choice["token_ids"]) == output.outputs[0].token_ids
    assert tuple(choice["prompt_token_ids"]) == output.prompt_token_ids


# ---- chats ----


def test_a_chat_is_put_into_the_template(client: openai.OpenAI, alone: Engine) -> None:
    options = {"model": MODEL, "temperature": 0}
    chat = client.chat.completions.create(**options, messages=MESSAGES, max_completion_tokens=12)  # type: ignore[call-overload]
    tokenizer = alone.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), add_special_tokens=False)
    (choice,) = chat.choices
    assert (choice.message.role, choice.message.content) == ("assistant", answer(alone, ids, max_tokens=12))
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(ids), 12)
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    in_parts = [{"role": "developer", "content": parts}, MESSAGES[1]]
    again = client.chat.completions.create(**options, messages=in_parts, max_tokens=12)  # type: ignore[call-overload]
    assert again.choices[0].message.content == choice.message.content
    # Without max_tokens, a chat goes on to the model's limit.
    longest = client.chat.completions.create(**options, messages=MESSAGES)  # type: ignore[call-overload]
    assert longest.usage.total_tokens == 256


def test_a_chat_streams(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 8, "n": 2, "seed": 6}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    pieces = {0: "", 1: ""}
    roles = []
    with client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ) as stream:  # type: ignore[call-overload]
        for chunk in stream:
            for choice in chunk.choices:
                pieces[choice.index] += choice.delta.content or ""
                roles += [choice.delta.role] if choice.delta.role else []
            usage = chunk.usage
    assert roles == ["assistant"] * 2
    assert list(pieces.values()) == [choice.message.content for choice in whole.choices]
    assert usage.completion_tokens == 16


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 3, "temperature": 0}
    chat = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
    entries = chat.choices[0].logprobs.content
    assert len(entries) == 3
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert bytes(entry.bytes).decode() == entry.token
    none = client.chat.completions.create(**options, logprobs=True)  # type: ignore[call-overload]
    assert [entry.top_logprobs for entry in none.choices[0].logprobs.content] == [[]] * 3


def test_end_of_sequence_ends_a_chat_unless_ignored(model: Model) -> None:
    """The checkpoint's end-of-sequence token is its id 1, one of 320, all equally probable at this temperature.

    Its tokenizer begins each text with id 0, which the chat template writes itself: once is enough.
    """
    with serving(model.folder, max_model_len=512) as served, served.client() as client:
        body = {"messages": MESSAGES, "max_completion_tokens": 1, "return_token_ids": True}
        assert served.post("/v1/chat/completions", **body).json()["prompt_token_ids"].count(BOS_TOKEN_ID) == 1
        plain = served.complete(prompt="The sea", max_tokens=1, return_token_ids=True)
        assert plain["choices"][0]["prompt_token_ids"].count(BOS_TOKEN_ID) == 1
        options = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 400, "seed": 6}
        ended = client.chat.completions.create(**options, temperature=1000)  # type: ignore[call-overload]
        assert ended.choices[0].finish_reason == "stop"
        assert ended.usage.completion_tokens < 400
        extra = {"ignore_eos": True}
        whole = client.chat.completions.create(**options, temperature=1000, extra_body=extra)  # type: ignore[call-overload]
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 400


# ---- other paths ----


def test_models_health_and_version(served: Served, client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.owned_by) == (MODEL, "bullet_graph")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")

    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.http.get("/version").json()["version"]


def test_fields_that_change_nothing_are_accepted(served: Served) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "presence_penalty": 0, "logit_bias": {}}
    neutral = {"echo": False, "best_of": 1, "suffix": None, "temperature": None, "stop": None, "stream": None}
    assert served.complete(prompt=[1], max_tokens=1, **harmless, **neutral)["model"] == MODEL


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
    assert grown["prompt_tokens_total"] == 10
    assert grown["generation_tokens_total"] == 9
    assert grown['request_success_total{finished_reason="length"}'] == 2
    assert grown["time_to_first_token_seconds_count"] == 2
    assert grown["inter_token_latency_seconds_count"] == 4 + 3
    assert grown["e2e_request_latency_seconds_count"] == 2
    assert 0 < grown["inter_token_latency_seconds_sum"] < grown["e2e_request_latency_seconds_sum"]
    # The two requests came one after the other.
    assert 0 < grown["time_to_first_token_seconds_sum"] < grown["e2e_request_latency_seconds_sum"]
    assert grown["e2e_request_latency_seconds_sum"] < time.monotonic() - begin_s
    first_tokens = after["time_to_first_token_seconds_count"]
    assert after['time_to_first_token_seconds_bucket{le="+Inf"}'] == first_tokens
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0
    assert sum(v for name, v in after.items() if name.startswith("policy_time_share")) == pytest.approx(1)
    assert grown['lane_seconds_total{lane="decode"}'] > 0


# ---- errors, as the client raises them ----


def test_errors_have_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here") as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"at most 256 tokens, found 2 \+ 255") as long:
        client.completions.create(model=MODEL, prompt=[1, 2], max_tokens=255)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="`tools` is not supported"):
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,  # type: ignore[arg-type]
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary of 512") as stream:
        list(client.completions.create(model=MODEL, prompt=[600], stream=True))
    assert stream.value.status_code == 400


def test_a_model_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", vocab_size=64, num_layers=1, tokenizer=False)
    with serving(tmp_path, max_model_len=64) as served:
        answer = served.complete(
            prompt=[5, 6], max_tokens=3, logprobs=1, return_token_ids=True, ignore_eos=True
        )
        (choice,) = answer["choices"]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        for path, body, message in (
            ("completions", {"prompt": "text"}, "needs a tokenizer"),
            ("completions", {"prompt": [5], "stop": "x"}, "stop strings need a tokenizer"),
            ("chat/completions", {"messages": MESSAGES}, "the model has no tokenizer, which a chat needs"),
        ):
            response = served.post(f"/v1/{path}", **body)
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
