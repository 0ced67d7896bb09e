"""The front of the replicas on Ray Serve. It imports no torch: a front needs no GPU and little memory."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send

from bullet_graph.serve.answers import after_body
from bullet_graph.serve.forward import EngineGoneError, Forwarder

_PARTS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")


class Front:
    """Takes requests for the replicas: Serve's router sees a request's prompt only behind the first deployment."""

    def __init__(self, engines: DeploymentHandle, max_body_bytes: int) -> None:
        self._app = _RayForwarder(engines, max_body_bytes)

    def __serve_build_asgi_app__(self) -> "_RayForwarder":
        return self._app


class _RayForwarder(Forwarder):
    def __init__(self, engines: DeploymentHandle, max_body_bytes: int) -> None:
        super().__init__()
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
        await super().__call__(asked, after_body(body, receive), send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, cut where the app refuses it; None if the client has left."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")[: self._max_body_bytes + 1 - len(body)]
            more = message.get("more_body", False)
        return bytes(body)

    async def answer(self, scope: Scope, body: bytes, keys: Sequence[bytes]) -> AsyncGenerator[Message, None]:
        answer = self._engines.remote(scope, body, keys)
        try:
            async for messages in answer:
                for message in messages:
                    yield message
        except RayTaskError:
            raise  # not of the replica: of the request
        except RayError as error:
            raise EngineGoneError(f"a replica: {error}") from error
        except (asyncio.CancelledError, GeneratorExit):
            answer.cancel()
            raise
