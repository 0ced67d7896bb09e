"""The server's settings: the only place where each is named, described, checked and given its default."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from bullet_graph.errors import ConfigError
from bullet_graph.serve.tools import FORMATS

OWNER = "bullet_graph"
"""The model's owner in `/v1/models`; clients know the server by it."""


class _Range(NamedTuple):
    """The values of a setting: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


_COUNT = _Range("at least 1", lambda n: n is None or n >= 1)
_PORT = _Range("between 0 and 65535", lambda port: 0 <= port < 2**16)
_TIME = _Range("a number of seconds above 0", lambda s: s > 0)
_FINITE_TIME = _Range("a number of seconds, at least 0", lambda s: 0 <= s < math.inf)
_WRITE_TIME = _Range("a number of seconds from 0 to 86400", lambda s: 0 <= s <= 86400)
_PARSER = _Range(f"auto, {', '.join(FORMATS)}", lambda name: name in ("auto", *FORMATS))
_TEXT = _Range("a text that is not empty", bool)
_KEY = _Range(
    "printable ASCII characters, at least one",
    lambda key: key is None or (key.isascii() and key.isprintable() and key != ""),
)


class ServeOption(NamedTuple):
    """Describes a field of :class:`ServeSettings`: its option on the command line."""

    flag: str
    default: Any
    range: _Range
    help: str


def _setting(default: Any, values: _Range, text: str) -> Any:
    return field(default=default, metadata={"described": (default, values, text)}, repr=values is not _KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The server's settings; the engine has its own. A wrong one raises ConfigError, at construction."""

    served_model_name: str
    host: str = _setting("127.0.0.1", _TEXT, "Address to listen on; 0.0.0.0: all.")
    port: int = _setting(8000, _PORT, "TCP port; 0: a free one.")
    api_key: str | None = _setting(
        None, _KEY, "Key that every request but /health must carry, as `Authorization: Bearer KEY`."
    )
    max_connections: int = _setting(
        4096, _COUNT, "Most open connections; one more gets 503. Each needs a file descriptor."
    )
    max_headers: int = _setting(100, _COUNT, "Most headers of a request; one with more gets 431.")
    max_header_bytes: int = _setting(
        64 << 10, _COUNT, "Largest URL and headers of a request; larger ones get 431."
    )
    header_timeout_s: float = _setting(
        10.0, _TIME, "Longest time to send a request's headers, from the connection on."
    )
    write_timeout_s: float = _setting(
        60.0,
        _WRITE_TIME,
        "A client that takes nothing of what it is sent for this long is cut off; 0: the system decides.",
    )
    max_body_bytes: int = _setting(1 << 20, _COUNT, "Largest body of a request; larger ones get 413.")
    max_prompt_tokens: int | None = _setting(
        None, _COUNT, "Most tokens of a prompt.  [default: what the model has room for]"
    )
    max_queue_len: int = _setting(
        1024, _COUNT, "Requests get 429 while this many sequences wait for KV blocks."
    )
    request_timeout_s: float = _setting(
        600.0, _TIME, "Longest time to send the body, and from a request's arrival to its last token."
    )
    shutdown_timeout_s: float = _setting(
        30.0,
        _FINITE_TIME,
        "After SIGTERM, time for requests in progress; then they are aborted. A second signal aborts them at once.",
    )
    tool_call_parser: str = _setting(
        "auto", _PARSER, f"Format of tool calls: {_PARSER.words}. `auto` takes that of the chat template."
    )
    watchdog_timeout_s: float = _setting(
        60.0, _TIME, "After this long without progress on a lane, all requests fail and /health is 503."
    )

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ConfigError("--served-model-name must be a name, got ''")
        for name, option in SERVE_OPTIONS.items():
            value = getattr(self, name)
            if not option.range.holds(value):
                found = "one that is empty or has other characters" if name == "api_key" else repr(value)
                raise ConfigError(f"{option.flag} must be {option.range.words}, got {found}")


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_s').replace('_bytes', '_size').replace('_', '-')}"


SERVE_OPTIONS: dict[str, ServeOption] = {
    each.name: ServeOption(_flag(each.name), *each.metadata["described"])
    for each in fields(ServeSettings)
    if each.metadata
}
"""The description of each setting that has an option of its own."""
