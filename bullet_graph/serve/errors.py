"""Errors in OpenAI's format: a status, and a body that says what was wrong and what to do."""

import itertools
import json
import re
import reprlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from bullet_graph.errors import BulletGraphError, EngineDeadError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_UNIONS = {
    "prompt": "a text, token ids (integers from 0 to 2**31 - 1), or a list of up to 128 of either; none of them empty",
    "stop": "a text, or a list of up to 16, each of 1 to 1,000 characters",
    "messages": "a list of messages, each with role (system, developer, user, assistant or tool) and content (a "
    'text, or a list of {"type": "text", "text": …})',
}
"""Fields of several types; a complaint about each type alone would not help."""

_OBJECT = "a JSON object is required as the body, with Content-Type: application/json"
_SHOWN_CHARACTERS = 80
_REASON_CHARACTERS = 300
_MOST_ERRORS, _MOST_REASONS = 20, 3
"""Errors that are looked at, and reasons that are told."""


class ApiError(Exception):
    """An error as the answer to a request; ``code`` is for programs, ``param`` the wrong field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
                "param": param,
                "code": code,
            }
        }
        self.headers = dict(headers or {})

    def json(self) -> bytes:
        """The body, in ASCII because the request may hold half a surrogate pair."""
        return json.dumps(self.body, separators=(",", ":")).encode()

    def response(self) -> Response:
        return Response(self.json(), self.status, self.headers, "application/json")

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """The client's view of an error; an unexpected one shows no details."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestValidationError):
            return _validation_error(error)
        if isinstance(error, HTTPException):
            phrase = HTTPStatus(error.status_code).phrase
            return cls(error.status_code, f"{phrase}: {error.detail}", headers=error.headers)
        if isinstance(error, EngineDeadError):
            return cls(503, str(error), code="engine_dead")
        if isinstance(error, BulletGraphError) and isinstance(error, ValueError):
            return cls(400, str(error))
        if isinstance(error, TimeoutError):
            return cls(504, "the request took longer than the server's --request-timeout", code="timeout")
        return cls(500, "the server failed on this request; its log tells why", code="internal_error")


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first few reasons why a request's body is invalid; their number and length do not grow with the body."""
    reasons: dict[str, None] = {}
    param: str | None = None
    body = error.body
    for found in error.errors()[:_MOST_ERRORS]:
        path = [_cut(str(part), _SHOWN_CHARACTERS) for part in found["loc"] if part != "body"]
        first = path[0] if path and found["type"] != "json_invalid" else ""
        is_union = first in _UNIONS and found["type"] != "extra_forbidden"
        if is_union and isinstance(body, dict) and first in body:
            reason = f"`{first}` must be {_UNIONS[first]}; found {_shown(body[first])}"
        else:
            reason = _reason(found, ".".join(path))
        # A validator's own sentence begins with the field that it is about.
        named = re.match(r"`(\w+)`", reason)
        param = param or first or (named[1] if named else None)
        reasons[_cut(reason, _REASON_CHARACTERS)] = None
    more = len(reasons) - _MOST_REASONS
    text = "; ".join(list(reasons)[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
    return ApiError(400, text, param=param)


def _reason(found: Mapping[str, Any], where: str) -> str:
    kind, message = found["type"], found["msg"]
    if kind == "json_invalid":
        return f"the body is no JSON: {found.get('ctx', {}).get('error', message)}"
    if kind == "extra_forbidden":
        return f"`{where}` is no field of this request: leave it out, or correct its name"
    if kind == "missing":
        return f"`{where}` is required" if where else _OBJECT
    if kind == "string_unicode" and not where:
        return f"names of fields must be valid Unicode, found {_shown(found.get('input'))}"
    if kind == "value_error":
        return str(found["ctx"]["error"])
    if not where:
        return f"{_OBJECT}; found {_shown(found.get('input'))}"
    return f"`{where}`: {message[:1].lower()}{message[1:]}, found {_shown(found.get('input'))}"


class _Repr(reprlib.Repr):
    """Short forms of values, in constant time; those of the standard library sort a whole dict."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(itertools.islice(x.items(), self.maxdict + 1)), level)


_REPR = _Repr()
_REPR.maxlevel, _REPR.maxstring = 3, _SHOWN_CHARACTERS


def _shown(value: object) -> str:
    return _cut(_REPR.repr(value), _SHOWN_CHARACTERS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
