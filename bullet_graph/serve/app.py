"""The server's paths for one engine, and the watchdog that runs beside them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from bullet_graph._version import __version__
from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.serve.answers import Answers
from bullet_graph.serve.errors import ApiError, http_error, validation_error
from bullet_graph.serve.formats import TokenTexts
from bullet_graph.serve.generation import Generation
from bullet_graph.serve.limits import Gate, LimitMiddleware
from bullet_graph.serve.metrics import EnergyMeter, ServerMetrics
from bullet_graph.serve.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    Health,
    Model,
    ModelList,
    Version,
    answers,
)
from bullet_graph.serve.settings import OWNER, ServeSettings

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_MOST_S_BETWEEN_LOOKS = 1.0

logger = logging.getLogger(__name__)


class Watchdog:
    """Gives the engine up when a lane makes no progress, even if the engine's thread is stuck.

    Args:
        engine: the engine to watch.
        limit_s: longest time without progress; must exceed the longest step and what is compiled during it.
    """

    def __init__(self, engine: AsyncEngine, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s

    async def run(self) -> None:
        """Check again and again until the engine is dead."""
        while self._engine.failure is None:
            await asyncio.sleep(min(self._limit_s / 4, _MOST_S_BETWEEN_LOOKS))
            self.look()

    def look(self) -> None:
        """Fail all requests if there was no progress for too long."""
        stalled = self._engine.stalled(self._limit_s)
        if stalled is None or self._engine.failure is not None:
            return
        limit = f"{self._limit_s:g} s (--watchdog-timeout)"
        reason = f"the engine made no progress for {limit}: {stalled}; restart the server"
        logger.error(reason)
        self._engine.fail(reason)


def create_app(engine: AsyncEngine, settings: ServeSettings, energy: EnergyMeter) -> FastAPI:
    """Build the ASGI application; its lifespan runs the watchdog.

    Args:
        engine: serves the requests; the caller shuts it down.
        settings: the server's settings.
        energy: measures the engine's GPU.

    Returns:
        An application; ``state.gate`` is the :class:`~bullet_graph.serve.limits.Gate` of its requests.
    """
    model_name = settings.served_model_name
    created_s = int(time.time())
    gate = Gate(
        settings.max_queue_len,
        num_running=engine.engine.num_running,
        failure=lambda: engine.failure,
        clock=time.monotonic,
    )
    metrics = ServerMetrics(model_name, engine, num_waiting=lambda: gate.num_waiting, energy=energy)
    registry = CollectorRegistry()
    registry.register(metrics)
    generation = Generation(engine, settings, gate, metrics)
    replies = Answers(
        generation,
        model_name=model_name,
        texts=TokenTexts(engine.engine.tokenizer),
        timeout_s=settings.request_timeout_s,
    )
    page = (resources.files("bullet_graph.serve") / "page.html").read_text(encoding="utf-8")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watchdog = asyncio.create_task(Watchdog(engine, settings.watchdog_timeout_s).run())
        yield
        watchdog.cancel()
        with suppress(asyncio.CancelledError):
            await watchdog
        generation.close()

    # The framework's documentation pages would load scripts from other hosts.
    app = FastAPI(title="bullet-graph", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.gate = gate
    app.add_middleware(
        LimitMiddleware,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.request_timeout_s,
    )

    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> Response:
        return validation_error(error).response()

    @app.exception_handler(HTTPException)
    async def framework_error(_: Request, error: HTTPException) -> Response:
        return http_error(error.status_code, error.detail, error.headers).response()

    @app.exception_handler(Exception)
    @app.exception_handler(ApiError)
    async def fail(_: Request, error: Exception) -> Response:
        return ApiError.of(error).response()

    @app.post("/v1/completions", responses=answers(Completion, streams=True), response_model=None)
    async def completions(body: CompletionRequest) -> Response:
        """Continue one prompt or several."""
        return replies.completion(body)

    @app.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True), response_model=None)
    async def chat_completions(body: ChatCompletionRequest) -> Response:
        """Continue a conversation, formatted by the model's chat template."""
        return replies.chat(body)

    served = Model(
        id=model_name,
        object="model",
        created=created_s,
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
        if model != model_name:
            raise ApiError(
                404,
                f"the model {model!r:.200} is not served here: /v1/models lists {model_name!r}",
                code="model_not_found",
            )
        return served

    @app.get("/health", responses=answers(Health))
    async def health() -> Health:
        """200 while the engine lives; 503 when it is dead or the server shuts down."""
        if engine.failure is not None:
            raise ApiError.of(engine.failure)
        if gate.closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return Health(status="ok")

    @app.get("/version", responses=answers(Version))
    async def version() -> Version:
        """The program's version."""
        return Version(version=__version__)

    @app.get("/metrics", include_in_schema=False)
    async def metrics_text() -> Response:
        await energy.read()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live", include_in_schema=False)
    async def live() -> dict[str, Any]:
        await energy.read()
        return metrics.live()

    @app.get("/", include_in_schema=False)
    async def live_page() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    return app
