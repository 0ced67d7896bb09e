"""From an engine to a server that listens, and to its end: drained, or cut short."""

import asyncio
import gc
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.errors import ConfigError
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.serve.app import create_app
from bullet_graph.serve.limits import Gate
from bullet_graph.serve.metrics import EnergyMeter
from bullet_graph.serve.settings import ServeSettings

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
_LAST_WORDS_S = 10
"""After the drain, for answers to reach their clients; then connections are cut."""
_ENGINE_STOP_S = 30.0
"""For the engine's thread to end; one that is stuck never does."""

_WARMUP_PROMPT_TOKENS = (4, 300, 2000)
_WARMUP_OUTPUT_TOKENS = 4

logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Ends in two stages: new requests are refused, and those under way have some time; then they are aborted.

    Args:
        config: of uvicorn.
        engine: its requests are failed when their time is over.
        gate: closed at once.
        drain_s: the time they have.
        on_started: told when the server listens.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: AsyncEngine,
        gate: Gate,
        *,
        drain_s: float,
        on_started: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._gate = gate
        self._drain_s = drain_s
        self._on_started = on_started
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on SIGTERM and SIGINT, give up on the second; only the main thread gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begin to drain, or, told again, end at once; from any thread, once it has started."""
        if self._loop is not None:
            # Raised where the loop is closed: it has stopped already.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is not None:
            self._abort("the server was told to stop at once")
            return
        logger.info("shutting down: requests under way have %g s", self._drain_s)
        self._gate.closed = True
        self.should_exit = True
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._gate.wait_until_empty(), self._drain_s)
        except TimeoutError:
            self._abort(
                f"the server was shut down, and the request had not ended within {self._drain_s:g} s "
                "(--shutdown-timeout): send it to another"
            )

    def _abort(self, reason: str) -> None:
        self._engine.fail(reason)


def bind(settings: ServeSettings) -> socket.socket:
    """Take the address, before anything that takes long; nothing is accepted on it yet.

    Raises:
        ConfigError: it cannot be had.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--host and --port must name an address of this machine that is free, but {where} cannot be had "
            f"({error.strerror or error}): give another --port (0 takes a free one) or --host"
        ) from error
    return listener


def make_server(
    engine: AsyncEngine,
    settings: ServeSettings,
    *,
    energy: EnergyMeter,
    on_started: Callable[[], object],
) -> DrainingServer:
    """A server, to be run.

    Args:
        engine: serves the requests; the caller shuts it down.
        settings: of the server.
        energy: of the engine's GPU.
        on_started: told when requests are served.
    """
    app = create_app(engine, settings, energy)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout_s) + _LAST_WORDS_S,
    )
    return DrainingServer(
        config, engine, app.state.gate, drain_s=settings.shutdown_timeout_s, on_started=on_started
    )


def run_server(
    engine: AsyncEngine,
    settings: ServeSettings,
    listener: socket.socket,
    *,
    energy: EnergyMeter,
    on_started: Callable[[str], object],
) -> bool:
    """Serve until a signal says to stop; the engine is shut down afterwards.

    Args:
        engine: owned from now on.
        settings: of the server.
        listener: from :func:`bind`.
        energy: of the engine's GPU.
        on_started: told the URL once requests are served.

    Returns:
        Whether the engine's thread has ended, and its memory is free; one that is stuck in the device never does.
    """
    server = make_server(engine, settings, energy=energy, on_started=lambda: on_started(url_of(listener)))
    try:
        # Weights, graphs and modules stay: looking through them again and again would stop every stream for long.
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])
    finally:
        ended = engine.shutdown(_ENGINE_STOP_S)
        energy.close()
        listener.close()
    return ended


def url_of(listener: socket.socket) -> str:
    """Where a server is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family is socket.AF_INET6 else f"http://{host}:{port}"


async def warm_up(engine: AsyncEngine) -> None:
    """Serve a few requests and forget about them, so that kernels made on first use are there before clients are.

    Raises:
        EngineDeadError: the engine failed.
    """
    limit = engine.engine.max_model_len
    params = SamplingParams(temperature=0, max_tokens=_WARMUP_OUTPUT_TOKENS, ignore_eos=True)
    lengths = [tokens for tokens in _WARMUP_PROMPT_TOKENS if tokens + _WARMUP_OUTPUT_TOKENS <= limit]

    async def serve(num_tokens: int) -> None:
        async for _ in engine.generate([1] * num_tokens, params):
            pass

    await asyncio.gather(*map(serve, lengths))
