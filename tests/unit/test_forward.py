"""What a front does when the engine that answers goes away, before and after its answer; and the keys of prompts."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from starlette.types import Message, Scope

from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.forward import EngineGoneError, Forwarder, prompt_keys

JSON, STREAM = b"application/json", b"text/event-stream; charset=utf-8"
Answer = Callable[[], AsyncGenerator[Message, None]]
LONG = "a" * 200


def start(content_type: bytes = STREAM) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def answering(*messages: Message, error: Exception | None = None) -> Answer:
    async def answer() -> AsyncGenerator[Message, None]:
        for message in messages:
            yield message
        if error is not None:
            raise error

    return answer


GONE = EngineGoneError("engine 0")
whole = answering(start(), part(b"answer", more=False))
gone = answering(error=GONE)
none_there = answering(error=ApiError(503, "none of 2 engines answers"))


class Scripted(Forwarder):
    """Its engines answer as they are told, one after the other."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self.answers = list(answers)
        self.keys: list[Sequence[bytes]] = []

    def answer(self, scope: Scope, body: bytes, keys: Sequence[bytes]) -> AsyncGenerator[Message, None]:
        del scope, body
        self.keys.append(keys)
        return self.answers.pop(0)()


async def ask(forwarder: Forwarder, *, leaves: asyncio.Event | None = None, body: bytes = b"{}") -> list[Message]:
    """What a client gets, which leaves when it is told to."""
    sent: list[Message] = []
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await forwarder({"type": "http", "method": "POST", "path": "/v1/completions"}, receive, send)
    return sent


def body_of(sent: Sequence[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_until_an_answer_begins_another_engine_takes_the_request(failures: int) -> None:
    forwarder = Scripted(*[gone] * failures, whole)
    assert body_of(asyncio.run(ask(forwarder, body=b'{"prompt": "%s"}' % (b"a" * 130)))) == b"answer"
    assert [len(keys) for keys in forwarder.keys] == [2] * (failures + 1)
    assert not forwarder._running


@pytest.mark.parametrize(("answer", "told"), [(gone, "send it again"), (none_there, "none of 2 engines answers")])
def test_a_request_that_no_engine_takes_gets_an_error(answer: Answer, told: str) -> None:
    forwarder = Scripted(*[answer] * 3, whole)
    sent = asyncio.run(ask(forwarder))
    assert sent[0]["status"] == 503
    assert told in body_of(sent).decode()
    assert forwarder.answers


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    sent = asyncio.run(ask(Scripted(answering(start(), part(b"data: 1\n\n"), error=GONE), whole)))
    first, error, done = body_of(sent).split(b"\n\n")[:3]
    assert (first, done) == (b"data: 1", b"data: [DONE]")
    assert b"engine_gone" in error
    assert not sent[-1]["more_body"]


def test_an_answer_that_is_no_stream_breaks_off() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(ask(Scripted(answering(start(JSON), error=GONE))))
    assert raised.group_contains(ApiError)


@pytest.mark.parametrize("reason", ["leaves", "abort"])
def test_a_request_ends_when_its_client_leaves_or_the_server_stops(reason: str) -> None:
    ended: list[Any] = []

    async def answer() -> AsyncGenerator[Message, None]:
        try:
            yield start()
            await asyncio.Future()
        finally:
            ended.append(True)

    async def run() -> list[Message]:
        forwarder, leaves = Scripted(answer), asyncio.Event()
        asked = asyncio.create_task(ask(forwarder, leaves=leaves))
        await asyncio.sleep(0.01)
        if reason == "leaves":
            leaves.set()
        else:
            forwarder.abort(ApiError(503, "the server was shut down"))
        return await asyncio.wait_for(asked, 5)

    sent = asyncio.run(run())
    assert ended
    assert (b"shut down" in body_of(sent)) == (reason == "abort")


def test_prompts_share_the_keys_of_what_they_share() -> None:
    system = "You answer briefly. " * 20
    first, second = (json.dumps({"messages": [{"role": "user", "content": system + end}]}).encode() for end in "ab")
    keys, others = prompt_keys(first), prompt_keys(second)
    assert len(keys) == 6
    assert keys == others, "they differ in the last characters, which fill no block"
    assert prompt_keys(first.replace(b"{", b'{"cache_salt": "x", ', 1)) != keys
    assert prompt_keys(b'{"prompt": [1, 2]}') == prompt_keys(b"no JSON") == prompt_keys(b"[]") == []
    assert len(prompt_keys(json.dumps({"prompt": list(range(40))}).encode())) == 2


def chat_of(*texts: object, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for text in texts], **more}


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (chat_of(LONG, LONG), chat_of(LONG, "b" * 200), False),
        (chat_of(LONG), chat_of(LONG, role="tool"), False),
        (chat_of(LONG), chat_of(LONG, chat_template_kwargs={"enable_thinking": False}), False),
        (chat_of(LONG), chat_of([{"type": "text", "text": LONG}]), True),
        ({"prompt": LONG}, {"prompt": [LONG, "another"]}, True),
    ],
)
def test_keys_are_of_the_whole_prompt(one: dict[str, Any], other: dict[str, Any], alike: bool) -> None:
    keys, others = (prompt_keys(json.dumps(body).encode()) for body in (one, other))
    assert keys
    assert (keys == others) is alike


def test_a_conversation_shares_no_keys_with_the_same_text_as_a_prompt() -> None:
    chat_keys, keys = (prompt_keys(json.dumps(o).encode()) for o in (chat_of(LONG), {"prompt": "[user]" + LONG}))
    assert len(chat_keys) == len(keys) > 0
    assert chat_keys[0] != keys[0]
