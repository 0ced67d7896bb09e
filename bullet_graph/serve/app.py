"""The server's paths for one engine, and the watchdog beside them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from bullet_graph._version import __version__
from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.errors import BulletGraphError
from bullet_graph.perf.energy import open_probe
from bullet_graph.serve.access_log import AccessLog
from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.generation import Generation
from bullet_graph.serve.limits import Gate, LimitMiddleware
from bullet_graph.serve.metrics import ServerMetrics
from bullet_graph.serve.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from bullet_graph.serve.schemas import ChatCompletion, Completion, Model, ModelList, Text, Tokens, answers
from bullet_graph.serve.settings import OWNER, ServeSettings

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_WATCH_INTERVAL_S, _JITTER_S = 1.0, 0.05

logger = logging.getLogger(__name__)


async def watch(engine: AsyncEngine, gate: Gate, limit_s: float) -> None:
    """Fail all requests when a lane makes no progress for ``limit_s``, even if the engine's thread is stuck.

    The limit must exceed the longest step and what is compiled during it.
    """
    interval_s = min(limit_s / 4, _WATCH_INTERVAL_S)
    while engine.failure is None:
        began_s = time.monotonic()
        await asyncio.sleep(interval_s)
        if time.monotonic() - began_s > interval_s + max(limit_s / 4, _JITTER_S):
            continue  # the whole process stood still, such as in a container that was paused
        stalled = engine.stalled(limit_s)
        if stalled is not None and engine.failure is None:
            limit = f"{limit_s:g} s (--watchdog-timeout)"
            engine.fail(f"the engine made no progress for {limit}: {stalled}; restart the server")
    # While the server shuts down, it ends the requests itself.
    logger.log(logging.WARNING if gate.closed else logging.ERROR, "%s", engine.failure)


def create_app(engine: AsyncEngine, settings: ServeSettings) -> FastAPI:
    """Build the ASGI application for an engine, which the caller shuts down; its lifespan runs the watchdog.

    Its ``state.gate`` is the :class:`~bullet_graph.serve.limits.Gate` of its requests.
    """
    gate = Gate(engine, settings.max_queue_len)
    probe = open_probe(engine.engine.device, engine.engine.config.tensor_parallel_size)
    metrics = ServerMetrics(settings.served_model_name, engine, gate, probe)
    registry = CollectorRegistry()
    registry.register(metrics)
    generation = Generation(engine, settings, gate, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watchdog = asyncio.create_task(watch(engine, gate, settings.watchdog_timeout_s))
        yield
        watchdog.cancel()
        with suppress(asyncio.CancelledError):
            await watchdog
        generation.close()
        if probe is not None:
            probe.close()

    # The framework's documentation pages would load scripts from other hosts.
    app = FastAPI(title="bullet-graph", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.gate = gate
    app.add_middleware(LimitMiddleware, settings=settings, gate=gate)
    app.add_middleware(AccessLog)

    async def fail(request: Request, error: Exception) -> Response:
        told = ApiError.of(error)
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            asked = f"{request.method} {request.url.path:.100}"
            told = ApiError(
                error.status_code, f"{asked} is not served here: ask for {_paths(app)}", headers=error.headers
            )
        return told.response()

    # The framework closes the connection after those that only Exception stands for.
    for kind in (ApiError, RequestValidationError, HTTPException, BulletGraphError, Exception):
        app.add_exception_handler(kind, fail)

    @app.post("/v1/completions", responses=answers(Completion, streams=True), response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        return generation.answer(body, request.scope["tally"])

    @app.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True), response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation, formatted by the model's chat template."""
        return generation.answer(body, request.scope["tally"])

    @app.post("/tokenize", responses=answers(Tokens), response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text or a conversation."""
        return Response(await generation.tokenize(body), media_type="application/json")

    @app.post("/detokenize", responses=answers(Text), response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return Response(await generation.detokenize(body), media_type="application/json")

    served = Model(
        id=settings.served_model_name,
        object="model",
        created=int(time.time()),
        owned_by=OWNER,
        max_model_len=engine.engine.max_model_len,
        vocab_size=engine.engine.model_config.vocab_size,
    )

    @app.get("/v1/models", responses=answers(ModelList))
    async def models() -> ModelList:
        """The served model, as a list."""
        return ModelList(object="list", data=[served])

    @app.get("/v1/models/{model:path}", responses=answers(Model))
    async def model(model: str) -> Model:
        """The served model, by its name."""
        generation.check_model(model)
        return served

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=answers(dict[Literal["status"], Literal["ok"]]))
    async def health() -> dict[str, str]:
        """200 while the engine lives; 503 when it is dead or the server shuts down."""
        gate.check_open()
        return {"status": "ok"}

    @app.get("/version", responses=answers(dict[Literal["version"], str]))
    async def version() -> dict[str, str]:
        """The program's version."""
        return {"version": __version__}

    @app.get("/metrics", include_in_schema=False)
    async def metrics_text() -> Response:
        await metrics.read_energy()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live", include_in_schema=False)
    async def live() -> dict[str, Any]:
        await metrics.read_energy()
        return metrics.live()

    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        html = (resources.files("bullet_graph.serve") / name).read_text(encoding="utf-8")
        page = HTMLResponse(html, headers={"Content-Security-Policy": _PAGE_POLICY})
        app.router.routes.append(Route(path, page, methods=["GET"]))
    return app


def _paths(app: FastAPI) -> str:
    routes = [route for route in app.routes if isinstance(route, Route)]
    return "; ".join(
        f"{method} {', '.join(route.path_format for route in routes if method in (route.methods or ()))}"
        for method in ("POST", "GET")
    )
