"""Limits at the door: the API key, the size and time of a body, and the length of the queue."""

import asyncio
import base64
import binascii
import hmac
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bullet_graph.errors import EngineDeadError
from bullet_graph.serve.errors import ApiError

_OPEN_PATHS = ("/health",)
_BROWSER_PATHS = ("/", "/live", "/metrics")
"""Paths where HTTP basic authentication may carry the key as the password (for browsers; any user name)."""


class LimitMiddleware:
    """Checks the key and reads the whole body before anything else sees the request.

    Args:
        app: the next ASGI application.
        api_key: the key that requests must carry, or None.
        max_body_bytes: largest body.
        body_timeout_s: longest time to send the body.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int, body_timeout_s: float
    ) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return  # the client has left
        first: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal first
            message, first = first, None
            return await receive() if message is None else message

        await self._app(scope, replay, send)

    def _check_key(self, scope: Scope) -> None:
        if self._api_key is None or scope["path"] in _OPEN_PATHS:
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        in_browser = scope["path"] in _BROWSER_PATHS and scope["method"] in ("GET", "HEAD")
        kind, _, credentials = header.partition(b" ")
        found = b""
        if kind.lower() == b"bearer":
            found = credentials.strip()
        elif kind.lower() == b"basic" and in_browser:
            try:
                found = base64.b64decode(credentials, validate=True).partition(b":")[2]
            except binascii.Error:
                found = b""
        if not hmac.compare_digest(found, self._api_key):
            raise ApiError(
                401,
                "this server's API key is required as `Authorization: Bearer KEY`; "
                + ("found another" if header else "found none"),
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="bullet-graph"' if in_browser else "Bearer"},
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise self._too_large(f"{int(declared):,} bytes")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s if math.isfinite(self._body_timeout_s) else None):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._max_body_bytes:
                        raise self._too_large(f"more than {self._max_body_bytes:,} bytes")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body must be sent within {self._body_timeout_s:g} s (--request-timeout), and "
                f"{size:,} bytes have come: send it faster",
                code="timeout",
                headers={"Connection": "close"},
            ) from None

    def _too_large(self, found: str) -> ApiError:
        return ApiError(
            413,
            f"a body may have at most {self._max_body_bytes:,} bytes (--max-body-size), found {found}: send a "
            "shorter prompt",
            code="body_too_large",
            headers={"Connection": "close"},
        )


class Gate:
    """Admits requests while the queue has room, and counts the sequences inside.

    Args:
        max_queue_len: requests are refused while this many sequences wait.
        num_running: number of sequences that hold KV blocks.
        failure: why the engine is dead, or None.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        max_queue_len: int,
        *,
        num_running: Callable[[], int],
        failure: Callable[[], EngineDeadError | None],
        clock: Callable[[], float],
    ) -> None:
        self._max_queue_len = max_queue_len
        self._num_running = num_running
        self._failure = failure
        self._clock = clock
        self._sequences = 0
        self._ended_s: deque[float] = deque(maxlen=32)
        self._empty = asyncio.Event()
        self._empty.set()
        self.closed = False

    @property
    def num_inside(self) -> int:
        """Sequences of admitted requests that have not ended."""
        return self._sequences

    @property
    def num_waiting(self) -> int:
        """Admitted sequences without KV blocks."""
        return max(self._sequences - self._num_running(), 0)

    @contextmanager
    def enter(self, num_sequences: int) -> Iterator[None]:
        """Count a request's sequences as inside while the block runs.

        Raises:
            ApiError: 503 if the engine is dead or the server shuts down, 429 if too many sequences wait.
        """
        failure = self._failure()
        if failure is not None:
            raise ApiError.of(failure)
        if self.closed:
            raise ApiError(
                503,
                "the server is shutting down: ask another",
                code="shutting_down",
                headers={"Retry-After": "5"},
            )
        if self.num_waiting >= self._max_queue_len:
            raise ApiError(
                429,
                f"{self.num_waiting} sequences wait already, and at most {self._max_queue_len} may (--max-queue-len): "
                "try again later",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after_s())},
            )
        self._sequences += num_sequences
        self._empty.clear()
        try:
            yield
        finally:
            self._sequences -= num_sequences
            self._ended_s.append(self._clock())
            if not self._sequences:
                self._empty.set()

    def retry_after_s(self) -> int:
        """Expected time until a place in the queue is free: the mean time between the last requests' ends."""
        ended = self._ended_s
        if len(ended) < 2:
            return 1
        return min(max(math.ceil((self._clock() - ended[0]) / len(ended)), 1), 60)

    async def wait_until_empty(self) -> None:
        """Wait until no request is inside."""
        await self._empty.wait()
