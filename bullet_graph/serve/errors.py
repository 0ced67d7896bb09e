"""Errors in OpenAI's format: a status, and a body that says what was wrong and what to do."""

import itertools
import json
import math
import re
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from bullet_graph.errors import BulletGraphError, EngineDeadError, LateError, PromptError, SamplingParamsError

M = TypeVar("M", bound=BaseModel)

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
    "messages": "a list of messages, each with role and content",
    "messages.*.content": 'a text, or a list of {"type": "text", "text": …} (no images, audio or files)',
    "tool_choice": '"none", "auto", "required", or {"type": "function", "function": {"name": …}}',
}
"""Fields of several types, ``*`` for an index; a complaint about each type alone would not help."""

_OBJECT = "a JSON object is required as the body, with Content-Type: application/json"
_SHOWN_CHARACTERS = 80
_REASON_CHARACTERS = 300
_MOST_RETRY_S = 60
_MOST_ERRORS, _MOST_REASONS = 20, 3
"""Errors that are looked at, and reasons that are told."""


class ApiError(Exception):
    """An error as the answer to a request; ``param`` is by default the field in backticks that it begins with."""

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
                "param": param or _field(message),
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
            if error.status_code == 400:  # the framework's own, of a body
                return cls(400, "the body cannot be read: JSON in UTF-8, not compressed or nested deeply, is required")
            phrase = HTTPStatus(error.status_code).phrase
            return cls(error.status_code, f"{phrase}: {error.detail}", headers=error.headers)
        if isinstance(error, LateError):
            retry_s = str(min(math.ceil(error.wait_s), _MOST_RETRY_S))
            return cls(429, str(error), code="too_late", headers={"Retry-After": retry_s})
        if isinstance(error, EngineDeadError):
            return cls(503, str(error), code="engine_dead")
        if isinstance(error, SamplingParamsError):
            # Python's users read these without backticks.
            return cls(400, str(error), param=_field(str(error), "`?"))
        if isinstance(error, PromptError):
            return cls(400, str(error), param=_field(str(error)) or "prompt")
        if isinstance(error, BulletGraphError) and isinstance(error, ValueError):
            return cls(400, str(error))
        if isinstance(error, TimeoutError):
            return cls(504, "the request took longer than the server's --request-timeout", code="timeout")
        return cls(500, "the server failed on this request; its log tells why", code="internal_error")


def shutting_down(message: str = "the server is shutting down: ask another") -> ApiError:
    """What a server says that drains."""
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": "5"})


def read_request(kind: type[M], body: object) -> M:
    """A request from its body, a value of JSON; ApiError 400, as the server answers, if it is none."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise _validation_error(RequestValidationError(found, body=body)) from None


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first few reasons why a request's body is invalid; their number and length do not grow with the body."""
    told = [_reason(found, error.body) for found in error.errors()[:_MOST_ERRORS]]
    reasons = list(dict.fromkeys(_cut(reason, _REASON_CHARACTERS) for reason in told))
    more = len(reasons) - _MOST_REASONS
    return ApiError(400, "; ".join(reasons[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else ""))


def _reason(found: Mapping[str, Any], body: Any) -> str:
    kind, message, path = found["type"], found["msg"], found["loc"][1:]
    if kind == "json_invalid":
        return f"the body is no JSON: {found.get('ctx', {}).get('error', message)}"
    # What the body does not have is pydantic's own, such as the types of a union; or it is missing.
    depth = 0
    with suppress(LookupError, TypeError):
        for part in path:
            body, depth = body[part], depth + 1
    is_missing = kind == "missing" and len(path) <= depth + 1
    where = ".".join(_cut(str(part), _SHOWN_CHARACTERS) for part in path[: depth + is_missing])
    if is_missing:
        return f"`{where}` is required" if where else _OBJECT
    if kind == "extra_forbidden":
        return f"`{where}` is no field of this request: leave it out, or correct its name"
    if kind == "string_unicode" and not where:
        return f"names of fields must be valid Unicode, found {_shown(found.get('input'))}"
    if kind == "value_error":
        return (f"`{where}`: " if where else "") + str(found["ctx"]["error"])
    if not where:
        return f"{_OBJECT}; found {_shown(found.get('input'))}"
    types = _UNIONS.get(".".join("*" if isinstance(part, int) else part for part in path[:depth]))
    if types is not None:
        return f"`{where}` must be {types}; found {_shown(body)}"
    message = re.sub(" or (instance|object) .*", "", message[:1].lower() + message[1:])
    return f"`{where}`: {message}, found {_shown(found.get('input'))}"


def _field(message: str, mark: str = "`") -> str | None:
    named = re.match(rf"{mark}([\w-]+)", message)
    return named and named[1]


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
