"""Structured outputs over the server: with OpenAI's client, in streams, and while a grammar is compiled."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pydantic
import pytest
from engines import GREEDY, collect, make_engine
from servers import MODEL, Served, serving

from bullet_graph import AsyncEngine, SamplingParams, StructuredOutputs
from bullet_graph.engine.structured import Grammars, Matcher
from bullet_graph.errors import SamplingParamsError

MESSAGES: Any = [{"role": "user", "content": "Name a fish."}]


class Fish(pydantic.BaseModel):
    name: Literal["eel", "pike"]
    length_cm: int = pydantic.Field(ge=1, le=300)
    lakes: list[Literal["Como", "Garda"]] = pydantic.Field(max_length=2)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "fish", "schema": Fish.model_json_schema(), "strict": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_model_len=512) as served:
        yield served


def test_the_client_parses_a_model(client: openai.OpenAI) -> None:
    answer = client.beta.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Fish, n=3, seed=1)
    fishes = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(fish, Fish) for fish in fishes)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_stream_is_the_same_document(client: openai.OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": MESSAGES, "response_format": SCHEMA, "seed": 5}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].finish_reason == "stop"
    assert len(chunks) > 10
    Fish.model_validate_json(whole)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_json": Fish.model_json_schema()}, r"\{.*\}"),
        ({"guided_json": json.dumps(Fish.model_json_schema())}, r"\{.*\}"),
        ({"guided_regex": "[a-f]{3}"}, "[a-f]{3}"),
        ({"guided_choice": ["yes", 'é "😀"\n']}, 'yes|é "😀"\n'),
        ({"guided_grammar": 'root ::= "x" [0-9]{2}'}, "x[0-9]{2}"),
        ({"structured_outputs": {"json": Fish.model_json_schema()}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "[a-f]{3}"}}, "[a-f]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/ ("+" start)~0..1'}}, r"x[0-9]{2}(\+x[0-9]{2})*"),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 9, "min_tokens": 9}, r"\{.*"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 9}, r"\{.*"),
        ({"response_format": {"type": "text"}, "max_tokens": 9}, ".*"),
        ({"response_format": SCHEMA | {}}, r"\{.*\}"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["e"],
                    "structures": [{"begin": "e", "schema": {"const": 7}, "end": ";"}],
                },
                "max_tokens": 60,
            },
            "([^e]|e7;)*(e7?)?",
        ),
    ],
    ids=lambda value: str(value)[:48],
)
def test_every_spelling(served: Served, extra: dict[str, Any], pattern: str) -> None:
    found = served.complete(prompt="A", seed=2, **({"max_tokens": 300} | extra))["choices"][0]
    assert re.fullmatch(pattern, found["text"], re.DOTALL)
    if "max_tokens" not in extra:
        assert found["finish_reason"] == "stop"


def test_what_cannot_be_followed_is_a_400_that_names_it(client: openai.OpenAI, served: Served) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"response_format.*Unimplemented keys: \[.*not") as refusal:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form, stream=stream)
        assert refusal.value.status_code == 400
    impossible = {"prompt": "A", "guided_regex": "a[0-9]", "bad_words": list("0123456789")}
    before = served.metrics()
    assert "could not go on" in served.post("/v1/completions", **impossible).json()["error"]["message"]
    text = served.post("/v1/completions", **impossible, stream=True).text
    assert "could not go on" in text
    assert '"finish_reason":"error"' not in text
    more = {name: value - before[name] for name, value in served.metrics().items() if "request_success_total" in name}
    assert {name: value for name, value in more.items() if value} == {
        'request_success_total{finished_reason="error"}': 2
    }


# ---- compiling ----


class SlowGrammars:
    """Lets compilations wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self.threads: list[str] = []
        whole = Grammars._compile

        def slow(grammars: Grammars, structured: StructuredOutputs) -> Matcher | str:
            self.threads.append(threading.current_thread().name)
            self.begun.release()
            assert self.may_end.wait(30)
            return whole(grammars, structured)

        monkeypatch.setattr(Grammars, "_compile", slow)


def test_others_are_served_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowGrammars(monkeypatch)
    with serving() as served, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(served.complete, prompt="A", guided_regex="[w]{9}", max_tokens=20)
        assert slow.begun.acquire(timeout=30)
        assert served.complete(prompt="A", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert served.http.get("/health").status_code == 200
        assert not waiting.done()
        slow.may_end.set()
        assert waiting.result(30)["choices"][0]["text"] == "w" * 9
    assert all("grammars" in name for name in slow.threads)


async def test_an_abort_while_a_grammar_is_compiled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowGrammars(monkeypatch)
    async with AsyncEngine(make_engine()) as engine:
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="[v]{9}"), n=2)
        task = asyncio.create_task(collect(engine, [1, 2], params))
        assert await asyncio.to_thread(slow.begun.acquire, True, 30)
        assert engine.num_waiting == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slow.may_end.set()
        wrong = SamplingParams(structured_outputs=StructuredOutputs(regex="[v"))
        with pytest.raises(SamplingParamsError, match="unclosed character class"):
            await collect(engine, [1, 2], wrong)
        assert len((await collect(engine, [1, 2], GREEDY))[-1].outputs[0].token_ids) == GREEDY.max_tokens
        assert engine.num_waiting == 0
    # Each is compiled once, in a thread of its own.
    assert [("grammars" in name) for name in slow.threads] == [True, True]
