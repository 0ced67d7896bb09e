"""The server on Ray Serve: engines in replicas, each with the FastAPI app as it is, behind a front.

Only the replicas import torch.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send

from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError
from bullet_graph.serve.answers import after_body
from bullet_graph.serve.forward import EngineGoneError, Forwarder
from bullet_graph.serve.settings import SERVE_SETTINGS, ServeSettings

_OF_HTTP = ("host", "port", "max_connections", "max_headers", "max_header_bytes", "header_timeout_s", "write_timeout_s")
"""Settings of the server's own connections: here, Ray Serve has them."""


class EngineReplica:
    """One engine with the server's app. Its replica is healthy while the engine lives."""

    async def __init__(self, engine: Mapping[str, Any], server: Mapping[str, Any]) -> None:  # type: ignore[misc]
        from bullet_graph._imports import load  # noqa: PLC0415

        self._engine = load("bullet_graph.engine.async_engine", "AsyncEngine")(**engine)
        await load("bullet_graph.serve.lifecycle", "warm_up")(self._engine)
        self._app = load("bullet_graph.serve.app", "create_app")(self._engine, ServeSettings(**server))
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()

    async def asgi(self, scope: Scope, body: bytes, keys: list[bytes]) -> AsyncIterator[list[Message]]:
        """Answer a request with the app's messages, as many as there are at once; ``keys`` are for the router.

        A caller that leaves aborts its request.
        """
        del keys
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        # After the body, only a client that leaves would have something to say.
        receive = after_body(body, asyncio.Future)

        async def answer() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(answer())
        try:
            more = True
            while more:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                more = None not in found
                if some := [message for message in found if message is not None]:
                    yield some
            await task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    def check_health(self) -> None:
        """Serve replaces the replica if this raises ApiError: the engine is dead, or makes no progress."""
        self._app.state.gate.check_open()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What :class:`~bullet_graph.ray.replicas.Scaler` decides from: sequences, and predicted TTFT in ms."""
        stats = self._engine.stats
        return {
            "waiting": self._app.state.gate.num_waiting,
            "running": stats.num_running,
            "predicted_ttft_ms": stats.predicted_ttft_ms,
        }

    async def __del__(self) -> None:
        """After the drain, which is Serve's: no new requests, and time for those in progress."""
        await self._life.__aexit__(None, None, None)
        await asyncio.to_thread(self._engine.shutdown, 30.0)


def deployment(
    model: str,
    *,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    num_fronts: int = 1,
    target_queue_len: float = 16,
    target_ttft_ms: float = 1000,
    upscale_delay_s: float = 10,
    downscale_delay_s: float = 300,
    max_surge_percent: int = 0,
    slack: int = 16,
    **settings: Any,
) -> serve.Application:
    """The server as an application for ``serve.run``.

    Args:
        model: a folder, a hub id or a preset.
        min_replicas, max_replicas: replicas of one engine each; without ``max_replicas`` their number is fixed.
        num_fronts: processes that take requests; each learns by itself which replica holds which prefix.
        target_queue_len, target_ttft_ms: waiting sequences per replica, and predicted TTFT; above, replicas are added.
        upscale_delay_s, downscale_delay_s: for how long, before the number changes.
        max_surge_percent: more replicas while a rolling restart runs; 0 stops one before another starts.
        slack: requests by which a replica that holds a prompt may be ahead of the one with the fewest.
        settings: those of :class:`~bullet_graph.engine.engine.Engine`, and those of
            :class:`~bullet_graph.serve.settings.ServeSettings` that are not of connections. A replica asks Ray for
            ``tensor_parallel_size`` GPUs, or for none with ``device="cpu"``.

    Raises ConfigError where a setting is unknown or wrong.
    """
    of_server = {name: settings.pop(name) for name in SERVE_SETTINGS if name in settings and name not in _OF_HTTP}
    engine = EngineConfig.of(model, **({"max_num_seqs": 256} | settings))
    # Serve decides which address listens. With one of all, the app takes any `Host`.
    server = {"served_model_name": model, "host": "0.0.0.0"} | of_server
    checked = ServeSettings(**server)
    number: dict[str, Any] = {"num_replicas": min_replicas}
    if max_replicas not in (None, min_replicas):
        targets = {"target_queue_len": target_queue_len, "target_ttft_ms": target_ttft_ms}
        targets["max_num_seqs"] = engine.max_num_seqs
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=min_replicas,
                max_replicas=max_replicas,
                upscale_delay_s=upscale_delay_s,
                downscale_delay_s=downscale_delay_s,
                policy=AutoscalingPolicy(policy_function="bullet_graph.ray.replicas:Scaler", policy_kwargs=targets),
            )
        }
    engines = serve.deployment(
        EngineReplica,
        name="engine",
        **number,
        ray_actor_options={"num_gpus": 0 if engine.device == "cpu" else engine.tensor_parallel_size, "num_cpus": 1},
        # The app's own limits come first: it answers 429.
        max_ongoing_requests=checked.max_queue_len + engine.max_num_seqs,
        graceful_shutdown_timeout_s=checked.shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=1,
        max_surge_percent=max_surge_percent,
        # It finds a dead replica, and costs a call.
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(
            request_router_class="bullet_graph.ray.replicas:PrefixRouter", request_router_kwargs={"slack": slack}
        ),
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="front",
        num_replicas=num_fronts,
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=checked.shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=1,
        max_surge_percent=100,
    )
    return front.bind(engines.bind(engine.values(), server), checked.max_body_bytes)


def app(args: dict[str, Any]) -> serve.Application:
    """The application of ``serve run bullet_graph.ray:app model=NAME …``; its arguments are those of deployment.

    Raises ConfigError where there is no ``model``, or an argument is unknown or wrong.
    """
    if "model" not in args:
        raise ConfigError("an argument `model` is required: serve run bullet_graph.ray:app model=NAME")
    return deployment(**{name: _value(each) for name, each in args.items()})


def _value(text: Any) -> Any:
    """An argument's value: numbers and true come as texts."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


# ---- the front, which needs no GPU and little memory ----

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
