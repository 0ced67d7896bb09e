"""A line of log for each request, and the id by which clients and log name it."""

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLLED = (b"/health", b"/live", b"/metrics")
"""Asked every few seconds: their successes are logged at DEBUG."""
_CLIENT_LEFT = 499
"""nginx's status for a request without an answer, as its client did not wait for it."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """A request's id, and its tokens so far; a request's ASGI scope holds it as ``tally``.

    ``cached_tokens`` of each of its prompts, by index, came from the prefix cache.
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens, as answers give them."""
        given, made = self.prompt_tokens, self.output_tokens
        cached = {"cached_tokens": sum(self.cached_tokens.values())}
        whole = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        return whole | {"prompt_tokens_details": cached}

    def log(self, level: int, client: Any, method: str, url: bytes, status: int, seconds: float) -> None:
        """Write the request's line, with its URL as it was sent, for a decoded path could hold line breaks."""
        form = "%s %s %s %d %.1f ms prompt_tokens=%d output_tokens=%d request_id=%s"
        # Without the query, which may hold secrets.
        path = url.partition(b"?")[0][:200].decode("ascii", "backslashreplace")
        ended = status, seconds * 1e3, self.prompt_tokens, self.output_tokens, self.request_id
        logger.log(level, form, (client or "-")[0], method, path, *ended)


class AccessLog:
    """Gives each request a :class:`Tally`, answers with its id as ``X-Request-Id``, and logs its end at INFO."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s, status, is_passed_on = time.monotonic(), _CLIENT_LEFT, False
        tally = scope["tally"] = Tally()

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_passed_on
            if message["type"] == "http.response.start":
                status, own = message["status"], (b"x-request-id", tally.request_id.encode())
                is_passed_on = own[0] in dict(message["headers"])  # by an engine, which has logged it
                message = message if is_passed_on else {**message, "headers": [*message["headers"], own]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500
            raise
        finally:
            url, seconds = scope["raw_path"], time.monotonic() - begin_s
            is_poll = url.partition(b"?")[0] in _POLLED and status < 400
            level = logging.DEBUG if is_passed_on or is_poll else logging.INFO
            tally.log(level, scope["client"], scope["method"], url, status, seconds)


def log_requests() -> None:
    """Write the lines to stderr."""
    lines = logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    logger.propagate = False
