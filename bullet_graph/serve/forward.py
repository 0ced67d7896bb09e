"""Requests that are answered by an engine in another process: what every front does, whatever carries them there."""

import asyncio
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import Message, Receive, Scope, Send

from bullet_graph.serve.answers import EVENT_STREAM, call_when_gone, last_event
from bullet_graph.serve.errors import ApiError

_MOST_TRIES = 3
_CHARACTERS, _TOKENS = 64, 16
"""Of one block of a prefix: about a KV block of 16 tokens."""
_MOST_BLOCKS = 2048
"""Of a request: later ones decide nothing."""

logger = logging.getLogger(__name__)


class EngineGoneError(Exception):
    """The engine that had a request is gone, or does not answer any more."""


class Forwarder(ABC):
    """An ASGI app that has engines elsewhere answer. Until an answer begins, another engine can take the request.

    Something before it has read the body, which comes as one message.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._told: ApiError | None = None

    @abstractmethod
    def answer(self, scope: Scope, body: bytes, keys: Sequence[bytes]) -> AsyncGenerator[Message, None]:
        """The ASGI messages of an engine's answer; ``keys`` are of the prompt.

        Whoever closes it aborts the request. Raises EngineGoneError, and ApiError where no engine can be asked.
        """

    def abort(self, told: ApiError) -> None:
        """End all requests with an error."""
        self._told = told
        for task in self._running:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        async with asyncio.TaskGroup() as tasks:
            forward = tasks.create_task(self._forward(scope, body, send))
            self._running.add(forward)
            forward.add_done_callback(self._running.discard)
            watch = tasks.create_task(call_when_gone(receive, forward.cancel))
            with suppress(asyncio.CancelledError):
                await asyncio.wait([forward])
            watch.cancel()

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        keys = prompt_keys(body) if scope["method"] == "POST" else []
        start: Message | None = None
        told = ApiError(503, "the engine that served the request is gone: send it again", code="engine_gone")
        for attempt in range(1, _MOST_TRIES + 1):
            try:
                async with aclosing(self.answer(scope, body, keys)) as messages:
                    async for message in messages:
                        start = start or message
                        await send(message)
                return
            except EngineGoneError as error:
                logger.warning("an engine failed on a request, attempt %d: %s", attempt, error)
            except ApiError as error:
                told = error
                break
            except asyncio.CancelledError:
                if self._told is None:
                    raise  # the client has left
                told = self._told
                break
            if start is not None:
                break
        if start is None:
            await told.response()(scope, _nothing, send)
        elif EVENT_STREAM in start["headers"]:
            await send(last_event(told))
        else:
            raise told  # which closes the connection


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


# ---- which engine holds the beginning of a prompt ----


def prompt_keys(body: bytes) -> list[bytes]:
    """A key for each block of a request's prompt, which stands for the prompt up to its end; none for other bodies.

    The first follows ``cache_salt``, tools and template variables, as requests that differ there share no KV blocks.
    """
    try:
        request = from_json(body)
    except ValueError:
        return []
    if not isinstance(request, dict):
        return []
    prompt, messages = request.get("prompt"), request.get("messages")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list):
        parts = [to_json(prompt[i : i + _TOKENS]) for i in range(0, len(prompt) - _TOKENS + 1, _TOKENS)]
    else:
        text = prompt if isinstance(prompt, str) else ""
        if isinstance(messages, list):
            said = (each if isinstance(each, dict) else {} for each in messages)
            text = "".join(f"[{each.get('role')}]{_text(each.get('content'))}" for each in said)
        ends = range(0, min(len(text), _MOST_BLOCKS * _CHARACTERS) - _CHARACTERS + 1, _CHARACTERS)
        parts = [text[i : i + _CHARACTERS].encode("utf-8", "surrogatepass") for i in ends]
    shared = [request.get(name) for name in ("cache_salt", "tools", "chat_template_kwargs")]
    key, keys = to_json([*shared, prompt is None]), list[bytes]()
    for part in parts[:_MOST_BLOCKS]:
        keys.append(key := hashlib.blake2b(key + part, digest_size=16).digest())
    return keys


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
