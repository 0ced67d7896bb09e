"""The API key, the limits of a body's size and time, and the limit of the queue."""

import asyncio
import base64
import binascii
import hmac
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.errors import EngineDeadError
from bullet_graph.serve.answers import after_body
from bullet_graph.serve.errors import ApiError, shutting_down
from bullet_graph.serve.settings import ServeSettings

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST_BODIES = 32
"""Bodies of the largest size that may be held at once, all requests together; smaller ones are that many more."""

_BROWSER_PATHS = ("/", "/docs", "/live", "/metrics", "/openapi.json")
"""Paths where HTTP basic authentication may carry the key as the password (for browsers; any user name)."""


class LimitMiddleware:
    """Checks the API key and reads the whole body before anything else sees the request."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, gate: "Drained") -> None:
        self._app = app
        self._gate = gate
        self._api_key = None if settings.api_key is None else settings.api_key.encode()
        self._max_body_bytes = settings.max_body_bytes
        self._held_bytes = 0  # of bodies that are being read, all together
        # Without a key, a page on the Internet whose name leads to this machine could ask through the user's browser.
        self._hosts = _LOOPBACK if settings.api_key is None and settings.host in _LOOPBACK else ()
        self._timeout_s = settings.request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_host(scope)
            self._check_key(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return  # the client has left
        await self._app(scope, after_body(body, receive), send)

    def _check_host(self, scope: Scope) -> None:
        host = Headers(scope=scope).get("host", "")
        name = None
        # Such as "[localhost", which is no address.
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname if host.isprintable() else None
        if self._hosts and host and name not in self._hosts:
            raise ApiError(
                403,
                f"a server without --api-key on this machine alone takes requests for {', '.join(self._hosts)}, found "
                f"Host: {host:.80}: ask for one of these, or start the server with --api-key or another --host",
                code="wrong_host",
            )

    def _check_key(self, scope: Scope) -> None:
        if self._api_key is None or scope["path"] == "/health":
            return
        header = Headers(scope=scope).get("authorization", "").encode("latin-1")
        in_browser = scope["path"] in _BROWSER_PATHS and scope["method"] in ("GET", "HEAD")
        kind, _, credentials = header.partition(b" ")
        found = b""
        if kind.lower() == b"bearer":
            found = credentials.strip()
        elif kind.lower() == b"basic" and in_browser:
            with suppress(binascii.Error):
                found = base64.b64decode(credentials, validate=True).partition(b":")[2]
        if not hmac.compare_digest(found, self._api_key):
            raise ApiError(
                401,
                "this server's API key is required as `Authorization: Bearer KEY`; "
                + ("found another" if header else "found none"),
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="bullet-graph"' if in_browser else "Bearer"},
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            raise self._too_large(f"{int(declared):,} bytes")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s if math.isfinite(self._timeout_s) else None):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held_bytes += len(parts[-1])
                    if self._held_bytes > _MOST_BODIES * self._max_body_bytes:
                        raise ApiError(
                            503,
                            f"the server already reads bodies of {_MOST_BODIES} × {self._max_body_bytes:,} bytes "
                            "(--max-body-size): try again later",
                            headers={"Retry-After": "1", "Connection": "close"},
                        )
                    if size > self._max_body_bytes:
                        raise self._too_large(f"more than {self._max_body_bytes:,} bytes")
                    if not message.get("more_body", False):
                        return b"".join(parts)
                    if self._gate.closed:  # it would be refused, and a slow one would hold up the end
                        raise shutting_down()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body must be sent within {self._timeout_s:g} s (--request-timeout), and "
                f"{size:,} bytes have come: send it faster",
                code="timeout",
                headers={"Connection": "close"},
            ) from None
        finally:
            self._held_bytes -= size

    def _too_large(self, found: str) -> ApiError:
        return ApiError(
            413,
            f"a body may have at most {self._max_body_bytes:,} bytes (--max-body-size), found {found}: send a "
            "shorter prompt",
            code="body_too_large",
            headers={"Connection": "close"},
        )


class Drained:
    """Knows the requests inside.

    Attributes:
        num_inside: admitted requests that have not ended.
        empty: set while no request is inside.
        closed: the server shuts down, and new requests are refused.
    """

    def __init__(self) -> None:
        self.num_inside = 0
        self.empty = asyncio.Event()
        self.empty.set()
        self.closed = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A request is inside during the block."""
        self.num_inside += 1
        self.empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self.empty.set()


class Gate(Drained):
    """Admits requests while fewer than ``max_queue_len`` sequences wait."""

    def __init__(self, engine: AsyncEngine, max_queue_len: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._engine = engine
        self._max_queue_len = max_queue_len
        self._clock = clock
        self._ended_s: deque[float] = deque(maxlen=32)
        self._num_prepared = 0

    @property
    def num_waiting(self) -> int:
        """Admitted sequences that wait for KV blocks. One that the engine is done with does not, read or not."""
        return self._num_prepared + self._engine.num_waiting

    def check_open(self) -> None:
        """Raise ApiError 503 if the server shuts down or the engine is dead."""
        if self.closed:
            raise shutting_down()
        if self._engine.failure is not None:
            raise ApiError.of(self._engine.failure)

    @contextmanager
    def enter(self, num_sequences: int) -> Iterator[Callable[[int], None]]:
        """Let a request in; ApiError 503 as :meth:`check_open`, 429 if too many sequences wait.

        Yields what must be called with the number of sequences that the engine is about to take over.
        """
        self.check_open()
        if self.num_waiting >= self._max_queue_len:
            raise ApiError(
                429,
                f"{self.num_waiting} sequences wait already, and at most {self._max_queue_len} may (--max-queue-len): "
                "try again later",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after_s())},
            )
        left = 0

        def prepare(number: int) -> None:
            nonlocal left
            left += number
            self._num_prepared += number

        prepare(num_sequences)
        try:
            with self.inside():
                yield lambda number: prepare(-number)
        except EngineDeadError as error:
            if not self.closed:
                raise
            raise shutting_down(str(error)) from error
        finally:
            prepare(-left)
            self._ended_s.append(self._clock())

    def retry_after_s(self) -> int:
        """Expected time until a place in the queue is free: the mean time between the last requests' ends."""
        ended = self._ended_s
        return 1 if len(ended) < 2 else min(max(math.ceil((self._clock() - ended[0]) / len(ended)), 1), 60)
