"""Limits of a connection that hold before a request and its key are known."""

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bullet_graph.serve.access_log import Tally
from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.settings import ServeSettings

_MOST_AHEAD = 8
"""Requests of one connection that wait for the answer of an earlier one; a packet could hold thousands."""
_PROBE_S, _MOST_PROBE_S = 0.2, 5.0


class LimitedConnection(HttpToolsProtocol):
    """A connection of uvicorn's on httptools, neither of which limits headers or idle connections."""

    def __init__(self, settings: ServeSettings, **of_server: Any) -> None:
        super().__init__(**of_server)
        self._settings = settings
        self._refusal: ApiError | None = None
        self._in_head = False
        self._unanswered: list[RequestResponseCycle] = []
        self._parsed_bytes = self._unparsed_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self._settings.max_connections
        if len(self.connections) > most:
            text = f"the server has {most} open connections, and may not have more (--max-connections): try again later"
            self._refuse(ApiError(503, text, code="too_many_connections", headers={"Retry-After": "1"}))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        for cycle in self._unanswered:  # uvicorn tells the last one alone, which may not have begun
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        if self.cycle is not None:
            self.cycle.message_event.set()  # a request that waits for its body sees that the server closes

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has closed its sending side, but end a request of one that is gone altogether.

        The two look alike until something is sent twice: the first is answered with a reset, which the second meets.
        """
        if not self._answering() or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._probe(_PROBE_S)
        return True

    def _probe(self, again_s: float) -> None:
        """Send an interim response, which clients skip (RFC 9110, section 15.2), now and ever less often."""
        waits = self._answering() and not self.cycle.response_started
        if waits and self.scope["http_version"] == "1.1" and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(again_s, self._probe, min(2 * again_s, _MOST_PROBE_S))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._answering():
            self._await_head()
        self._unparsed_bytes = len(data) + (self._unparsed_bytes if self._in_head else 0)
        super().data_received(data)
        # The parser keeps a header to itself until it is complete.
        if self._in_head and self._unparsed_bytes > self._settings.max_header_bytes:
            self._refuse(self._too_large())

    # ---- callbacks of the parser, which it stops by an exception ----

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._parsed_bytes = 0
        if self._answering():  # what came before in these bytes is another request's
            self._unparsed_bytes = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)
        most = self._settings.max_headers
        if len(self.headers) > most:
            self._refusal = ApiError(431, f"a request may have at most {most} headers (--max-headers): send fewer")
            raise self._refusal

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_wait()
        if len(self.pipeline) >= _MOST_AHEAD:
            self._refusal = ApiError(429, f"at most {_MOST_AHEAD} requests may be sent ahead of an answer: wait for it")
            raise self._refusal
        super().on_headers_complete()
        self._unanswered = [*(cycle for cycle in self._unanswered if not cycle.response_complete), self.cycle]

    def send_400_response(self, msg: str) -> None:
        """Answer what has stopped the parser."""
        self._refuse(self._refusal or ApiError(400, f"a request of HTTP/1.1 is required: {msg}"))

    # ----

    def _count(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > self._settings.max_header_bytes:
            self._refusal = self._too_large()
            raise self._refusal

    def _too_large(self) -> ApiError:
        most = self._settings.max_header_bytes
        return ApiError(431, f"URL and headers may have at most {most:,} bytes (--max-header-size): send less")

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._settings.header_timeout_s, self._give_up)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._answering():
            self._await_head()  # the next request, which waits for this answer
        elif self._in_head:
            limit = f"{self._settings.header_timeout_s:g} s (--header-timeout)"
            text = f"a request's headers must come within {limit}: send them faster"
            self._refuse(ApiError(408, text, code="timeout"))
        else:
            self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Send an error, unless it would end up inside another answer, and close the connection."""
        if not (self._answering() or self.transport.is_closing()):
            body, tally = error.json(), Tally()
            head = error.headers | {"Content-Type": "application/json", "Content-Length": str(len(body))}
            head |= {"Connection": "close", "X-Request-Id": tally.request_id}
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *map(": ".join, head.items())]
            self.transport.write("\r\n".join([*lines, "\r\n"]).encode() + body)
            method, url = (self.parser.get_method().decode(), self.url) if self._in_head and self.url else ("-", b"-")
            tally.log(logging.INFO, self.client, method, url, error.status, 0.0)
        self.transport.close()
