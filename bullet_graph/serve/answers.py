"""HTTP responses that are produced while they are sent, as JSON or as server-sent events."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from bullet_graph.serve.errors import ApiError

_DONE = b"data: [DONE]\n\n"
_LAST_WORDS_S = 5.0
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [EVENT_STREAM, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
}

logger = logging.getLogger(__name__)


def after_body(body: bytes, receive: Receive) -> Receive:
    """As ``receive`` was before the body had been read."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return whole.pop() if whole else await receive()

    return replay


async def call_when_gone(receive: Receive, call: Callable[[], object]) -> None:
    """Call a function once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call()


def last_event(told: ApiError) -> Message:
    """The end of a stream that an error breaks off."""
    return {"type": "http.response.body", "body": b"data: " + told.json() + b"\n\n" + _DONE, "more_body": False}


class Answer(Response):
    """A response with a time limit, which is cancelled when its client leaves.

    An error before the first event is an ordinary error response. A later error is an event. ``events`` makes those
    of a stream; otherwise ``whole`` makes the JSON body.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        events: Callable[[], AsyncGenerator[bytes, None]] | None = None,
        whole: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._events = events
        self._whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_when_gone, receive, tasks.cancel_scope.cancel)
            await self._answer(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with asyncio.timeout(self._timeout_s if math.isfinite(self._timeout_s) else None):
                if self._whole is not None:
                    await Response(await self._whole(), media_type="application/json")(scope, receive, send)
                elif self._events is not None:
                    async with aclosing(self._events()) as events:
                        async for event in events:
                            if not started:
                                started = True
                                await send(_STREAM_START)
                            await send({"type": "http.response.body", "body": event, "more_body": True})
                    await send({"type": "http.response.body", "body": _DONE, "more_body": False})
        except Exception as error:
            told = ApiError.of(error)
            if told.status == 500:
                logger.exception("a request failed")
            # A client that reads nothing would block this for ever.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    if not started:
                        await told.response()(scope, receive, send)
                        return
                    await send(last_event(told))
