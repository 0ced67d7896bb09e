"""Several engines on one host behind one port: each request goes to the one that holds most of its prompt.

Each engine's server is a process that listens on a Unix socket. One that dies or hangs gets no requests; others go on.
"""

import asyncio
import logging
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from urllib.parse import parse_qs

import aiohttp
import yarl
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Scope

from bullet_graph.routing import PrefixHolders, ranked
from bullet_graph.serve.access_log import AccessLog
from bullet_graph.serve.errors import ApiError, shutting_down
from bullet_graph.serve.forward import EngineGoneError, Forwarder
from bullet_graph.serve.limits import Drained, LimitMiddleware
from bullet_graph.serve.metrics import PREFIX
from bullet_graph.serve.settings import ServeSettings

_SLACK_REQUESTS = 16
"""By which an engine that holds a prompt may be ahead of the one with the fewest."""
_CHECK_INTERVAL_S, _CHECK_TIMEOUT_S = 1.0, 5.0
_OF_ONE_HOP = frozenset(b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split())
_NOT_SENT = _OF_ONE_HOP | {b"host", b"content-length", b"authorization", b"expect"}
_NOT_RETURNED = _OF_ONE_HOP | {b"date", b"server"}

logger = logging.getLogger(__name__)


@dataclass
class Replica:
    """An engine's server in another process, which listens on a Unix socket at ``path``."""

    number: int
    process: "subprocess.Popen[bytes]"
    path: str
    is_alive: bool = True
    _session: aiohttp.ClientSession | None = None
    _running: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def open(self) -> None:
        """Be ready for requests; in the event loop that makes them."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self.path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            read_bufsize=1 << 20,
            max_field_size=1 << 30,  # a redirect repeats the query
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        """Send a request; yields the answer's ASGI messages. EngineGoneError where there is none, or it breaks off."""
        assert self._session is not None
        asked = scope["raw_path"] + b"?" + scope["query_string"]
        url = yarl.URL("http://engine" + asked.decode("latin-1"), encoded=True)
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in _NOT_SENT]
        headers.append(("Host", Request(scope).url.netloc))  # redirects name it
        if scope.get("client"):
            headers.append(("X-Forwarded-For", scope["client"][0]))
        async with self._asked():
            request = self._session.request
            async with request(scope["method"], url, data=body, headers=headers, allow_redirects=False) as answer:
                refusal = await answer.read() if answer.status == 503 else b""
                if b'"engine_dead"' in refusal:
                    raise EngineGoneError(f"engine {self.number} is dead, but its process lives")
                returned = [(k.lower(), v) for k, v in answer.raw_headers if k.lower() not in _NOT_RETURNED]
                yield {"type": "http.response.start", "status": answer.status, "headers": returned}
                if refusal:
                    yield {"type": "http.response.body", "body": refusal, "more_body": True}
                async for part in answer.content.iter_any():
                    yield {"type": "http.response.body", "body": part, "more_body": True}
                yield {"type": "http.response.body", "body": b"", "more_body": False}

    async def get(self, path: str) -> bytes | None:
        """What is there; None where the answer is no 200, or comes not in time.

        If it comes not in time, everything else that waits for the engine ends with EngineGoneError too.
        """
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=_CHECK_TIMEOUT_S)
        with suppress(EngineGoneError):
            async with self._asked():
                try:
                    async with self._session.get(f"http://engine{path}", timeout=timeout) as answer:
                        return await answer.read() if answer.ok else None
                except TimeoutError:
                    for limit in self._running:
                        if limit.when() is None:
                            limit.reschedule(0)
                    raise
        return None

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        """It is asked something inside; what says that it is gone becomes an EngineGoneError."""
        limit = asyncio.timeout(None)
        self._running.add(limit)
        try:
            async with limit:
                yield
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineGoneError(f"engine {self.number}: {str(error) or type(error).__name__}") from error
        finally:
            self._running.discard(limit)


class Front(Forwarder, Drained):
    """Gives each request to one of the replicas, and knows which of them live."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        Forwarder.__init__(self)
        Drained.__init__(self)
        self.replicas = replicas
        self._holders: PrefixHolders[int] = PrefixHolders()

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_alive]

    def check_open(self) -> None:
        """Raise ApiError 503 if the server shuts down, or no engine lives."""
        if self.closed:
            raise shutting_down()
        if not self.alive:
            raise ApiError(503, "no engine answers: restart the server", code="engine_dead")

    async def answer(self, scope: Scope, body: bytes, keys: Sequence[bytes]) -> AsyncGenerator[Message, None]:
        self.check_open()
        left = self._to_ask(scope, keys)
        with self.inside():
            while left:
                replica = left.pop(0)
                self._holders.add(keys, replica.number)
                try:
                    async with aclosing(replica.ask(scope, body)) as messages:
                        async for message in messages:
                            if message.get("status") == 429 and left:
                                break
                            left.clear()
                            yield message
                except EngineGoneError:
                    self._lost(replica)
                    raise

    def _to_ask(self, scope: Scope, keys: Sequence[bytes]) -> list[Replica]:
        """Who is asked in turn: for a page or a figure, ``?replica=1`` or the first; else two, as one may be full."""
        alive = {replica.number: replica for replica in self.alive}
        if scope["method"] == "GET":
            named = parse_qs(scope["query_string"].decode("latin-1")).get("replica", [str(next(iter(alive)))])[0]
            if named not in map(str, alive):
                raise ApiError(404, f"`replica` must be one of {', '.join(map(str, alive))}, found {named:.20}")
            return [alive[int(named)]]
        load = {number: replica.num_running for number, replica in alive.items()}
        # Under a load that fills all engines, to ask each would multiply the refusals.
        return [alive[n] for n in ranked(list(alive), self._holders, keys, load.__getitem__, _SLACK_REQUESTS)[:2]]

    def _lost(self, replica: Replica) -> None:
        if replica.is_alive:
            replica.is_alive = False
            code = replica.process.poll()
            how = "does not answer" if code is None else f"has ended with exit code {code}"
            logger.error("engine %d %s; requests go to the %d others", replica.number, how, len(self.alive))
            self._holders.keep({each.number for each in self.alive})

    async def watch(self) -> None:
        """Find out, every second, which replicas live."""
        while True:
            await asyncio.gather(*map(self._check, self.replicas))
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def _check(self, replica: Replica) -> None:
        if await replica.get("/health") is None:
            self._lost(replica)
        elif not replica.is_alive:
            logger.warning("engine %d answers again", replica.number)
            replica.is_alive = True

    async def metrics(self) -> bytes:
        """The replicas' metrics, with a label that names each, and which of them live."""
        up = GaugeMetricFamily(PREFIX + "replica_up", "1 for an engine that lives.", labels=["replica"])
        families: dict[str, Metric] = {up.name: up}
        for replica in self.replicas:
            up.add_metric([str(replica.number)], float(replica.is_alive))
        alive = self.alive
        texts = await asyncio.gather(*(replica.get("/metrics") for replica in alive))
        for replica, text in zip(alive, texts, strict=True):
            for family in text_string_to_metric_families((text or b"").decode()):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                named = {"replica": str(replica.number)}
                whole.samples += [sample._replace(labels=sample.labels | named) for sample in family.samples]
        return generate_latest(SimpleNamespace(collect=families.values))


def front_app(front: Front, settings: ServeSettings) -> Starlette:
    """The paths of several engines; its lifespan connects to them. All but /health and /metrics are one engine's."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for replica in front.replicas:
            replica.open()
        watch = asyncio.create_task(front.watch())
        yield
        watch.cancel()
        for replica in front.replicas:
            await replica.close()

    async def health(_: Request) -> Response:
        try:
            front.check_open()
        except ApiError as error:
            return error.response()
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(await front.metrics(), media_type=CONTENT_TYPE_LATEST)

    routes = [Route("/health", health), Route("/metrics", metrics), Mount("", app=front)]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.add_middleware(LimitMiddleware, settings=settings, gate=front)
    app.add_middleware(AccessLog)
    return app
