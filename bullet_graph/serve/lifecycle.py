"""A server's life: it binds, warms up, listens, drains and stops."""

import asyncio
import gc
import logging
import math
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.errors import ConfigError, SamplingParamsError
from bullet_graph.perf.trace import WARMUP_PREFIX
from bullet_graph.sampling_params import SamplingParams, StructuredOutputs
from bullet_graph.serve.app import create_app
from bullet_graph.serve.connection import LimitedConnection
from bullet_graph.serve.limits import Drained
from bullet_graph.serve.settings import ServeSettings
from bullet_graph.slo import Slo

LAST_WORDS_S = 10
"""After the drain, for answers to reach their clients; then connections are cut."""
ENGINE_STOP_S = 30.0
"""For the engine's thread to end; a stuck thread never does."""

_COLLECT_EVERY = 100_000
"""New objects between collections of garbage: with Python's 700, a body of many small lists took five times as long."""

_WARMUP_PROMPT_TOKENS = (4, 300, 2000)
_WARMUP_OUTPUT_TOKENS = 4

logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """An HTTP server; ``on_started`` is called when it listens, on a Unix socket if that is given.

    It stops in two stages: it refuses new requests and waits for running ones; then it calls ``abort`` with the reason.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: Drained,
        settings: ServeSettings,
        *,
        abort: Callable[[str], object],
        on_started: Callable[[], object],
        unix_socket: Path | None = None,
    ) -> None:
        self.gate = gate
        self._abort = abort
        self._drain_s = settings.shutdown_timeout_s
        self._on_started = on_started
        self._draining: asyncio.Task[None] | None = None
        super().__init__(
            uvicorn.Config(
                app,
                uds=None if unix_socket is None else str(unix_socket),
                # Only a front asks there.
                forwarded_allow_ips=None if unix_socket is None else "*",
                # The type that uvicorn asks for is a class; it calls it with keywords.
                http=partial(LimitedConnection, settings),  # type: ignore[arg-type]
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="on",
                backlog=2048,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=math.ceil(self._drain_s) + LAST_WORDS_S,
            )
        )

    @classmethod
    def of_engine(cls, engine: AsyncEngine, settings: ServeSettings, **details: Any) -> "DrainingServer":
        """The server of an engine, which the caller shuts down."""
        app = create_app(engine, settings)
        return cls(app, app.state.gate, settings, abort=engine.fail, **details)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at SIGTERM or SIGINT."""
        del sig, frame
        asyncio.get_running_loop().call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to drain; a second call aborts all requests. Called in the event loop."""
        if self._draining is not None:
            self._abort("the server was told to stop at once")
            return
        logger.warning("shutting down: requests under way have %g s", self._drain_s)
        self.gate.closed = True
        self.should_exit = True
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self.gate.empty.wait(), self._drain_s)
        except TimeoutError:
            self._abort(
                f"the server was shut down, and the request had not ended within {self._drain_s:g} s "
                "(--shutdown-timeout): send it to another"
            )


def bind(settings: ServeSettings) -> socket.socket:
    """Bind the address, without accepting connections yet; ConfigError if it is not available."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. It also holds where an answer lies in the system's buffer, and for a lost peer.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(settings.write_timeout_s * 1000))
            listener.bind(address)
            undo.pop_all()
            return listener
    except OSError as error:
        raise ConfigError(
            f"--host and --port must name an address of this machine that is free, but {where} cannot be had "
            f"({error.strerror or error}): give another --port (0 takes a free one) or --host"
        ) from error


def run_server(
    engine: AsyncEngine, settings: ServeSettings, listener: socket.socket | Path, on_started: Callable[[], object]
) -> bool:
    """Serve until a signal stops the server, then shut the engine down; ``listener`` may be a Unix socket's path.

    Returns whether the engine's thread has ended; a thread that is stuck in the device never does.
    """
    path = listener if isinstance(listener, Path) else None
    thresholds = gc.get_threshold()

    def started() -> None:
        # Scans of objects that stay pause streams. Not before the server handles signals: gc may swallow a Ctrl-C.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_COLLECT_EVERY, *thresholds[1:])
        on_started()

    server = DrainingServer.of_engine(engine, settings, on_started=started, unix_socket=path)
    try:
        server.run(sockets=[listener] if isinstance(listener, socket.socket) else None)
    finally:
        gc.set_threshold(*thresholds)
        ended = engine.shutdown(ENGINE_STOP_S)
    return ended


def url_of(listener: socket.socket) -> str:
    """The server's URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family is socket.AF_INET6 else f"http://{host}:{port}"


async def warm_up(engine: AsyncEngine) -> None:
    """Serve a few requests, so that kernels compiled on first use are ready before clients come."""
    params = SamplingParams(temperature=0, max_tokens=_WARMUP_OUTPUT_TOKENS, ignore_eos=True)
    lengths = [n for n in _WARMUP_PROMPT_TOKENS if n + _WARMUP_OUTPUT_TOKENS <= engine.engine.max_model_len]

    async def serve(num_tokens: int) -> None:
        request_id, unhurried = f"{WARMUP_PREFIX}{num_tokens}", Slo(ttft_ms=1e9)  # which reject_late never refuses
        async for _ in engine.generate([1] * num_tokens, params, request_id=request_id, slo=unhurried):
            pass

    # The first structured output makes its library read the tokenizer, which would stall all others for up to a second.
    structured = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    with suppress(SamplingParamsError):  # without a tokenizer, there are none
        await asyncio.to_thread(engine.engine.compile_structured_outputs, structured)
    await asyncio.gather(*map(serve, lengths))
