"""The front of the replicas on Ray Serve. It imports no torch: a front needs no GPU and little memory."""

import asyncio
import logging
from contextlib import suppress

from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send

from bullet_graph.ray.replicas import prefix_keys
from bullet_graph.serve.errors import ApiError

_PARTS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
_MOST_TRIES = 3

logger = logging.getLogger(__name__)


class Front:
    """Takes requests for the replicas: Serve's router sees a request's prompt only behind the first deployment."""

    def __init__(self, engines: DeploymentHandle, max_body_bytes: int) -> None:
        self._app = _Forwarder(engines, max_body_bytes)

    def __serve_build_asgi_app__(self) -> "_Forwarder":
        return self._app


class _Forwarder:
    """The front's ASGI app."""

    def __init__(self, engines: DeploymentHandle, max_body_bytes: int) -> None:
        self._engines = engines.options(method_name="asgi", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = await self._body(receive)
        if body is None:
            return
        asked = {name: scope[name] for name in _PARTS if name in scope}
        asked.setdefault("raw_path", scope["path"].encode())
        async with asyncio.TaskGroup() as tasks:
            forward = tasks.create_task(self._forward(asked, body, send))
            watch = tasks.create_task(self._until_gone(receive, forward))
            with suppress(asyncio.CancelledError):
                await asyncio.wait([forward])
            watch.cancel()

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, cut where the app refuses it; None if the client has left."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")[: self._max_body_bytes + 1 - size]
            parts.append(part)
            size += len(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send a replica's answer. Until it begins, another replica can take the request of one that dies."""
        keys, begun = prefix_keys(body) if scope["method"] == "POST" else [], False
        for attempt in range(1, _MOST_TRIES + 1):
            answer = self._engines.remote(scope, body, keys)
            try:
                async for messages in answer:
                    for message in messages:
                        begun = True
                        await send(message)
                return
            except RayTaskError:
                raise  # not of the replica: of the request
            except RayError as error:
                logger.warning("a replica failed on a request, attempt %d: %s", attempt, error)
                told = ApiError(503, "the replica that served the request is gone: send it again", code="replica_gone")
                if begun:
                    event = b"data: " + told.json() + b"\n\ndata: [DONE]\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": False})
                    return
            except asyncio.CancelledError:
                answer.cancel()
                raise
        await told.response()(scope, _nothing, send)

    @staticmethod
    async def _until_gone(receive: Receive, forward: asyncio.Task[None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        forward.cancel()


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
