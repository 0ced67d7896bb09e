"""The server's settings: the only place where each is named, described, checked and given its default."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from bullet_graph.config import parse_bytes
from bullet_graph.errors import ConfigError

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
_TEXT = _Range("a text that is not empty", bool)
_KEY = _Range(
    "printable ASCII characters, at least one",
    lambda key: key is None or (key.isascii() and key.isprintable() and key != ""),
)


class ServeOption(NamedTuple):
    """Describes a field of :class:`ServeSettings`; ``shown_default`` stands for the default in the help."""

    default: Any
    range: _Range
    flag: str
    help: str
    metavar: str | None = None
    shown_default: str | None = None
    parse: Callable[[str], Any] | None = None


def _option(default: Any, *description: Any, **more: Any) -> Any:
    option = ServeOption(default, *description, **more)
    return field(default=default, metadata={"option": option}, repr=option.range is not _KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The server's settings; the engine has its own. A wrong one raises ConfigError, at construction."""

    served_model_name: str
    host: str = _option("127.0.0.1", _TEXT, "--host", "Address to listen on; 0.0.0.0: all.")
    port: int = _option(8000, _PORT, "--port", "TCP port; 0: a free one.")
    api_key: str | None = _option(
        None,
        _KEY,
        "--api-key",
        "Key that every request but /health must carry, as `Authorization: Bearer KEY`.",
    )
    max_connections: int = _option(
        1000,
        _COUNT,
        "--max-connections",
        "Most open connections; one more gets 503. Each needs a file descriptor.",
    )
    max_headers: int = _option(
        100, _COUNT, "--max-headers", "Most headers of a request; a request with more gets 431."
    )
    max_header_bytes: int = _option(
        64 << 10,
        _COUNT,
        "--max-header-size",
        "Most bytes of a request's URL and headers; larger ones get 431.",
        metavar="SIZE",
        shown_default="64KiB",
        parse=parse_bytes,
    )
    header_timeout_s: float = _option(
        10.0, _TIME, "--header-timeout", "Longest time to send a request's headers, from the connection on."
    )
    write_timeout_s: float = _option(
        60.0,
        _WRITE_TIME,
        "--write-timeout",
        "A client that takes nothing of what it is sent for this long is cut off; 0: the system's own time.",
    )
    max_body_bytes: int = _option(
        8 << 20,
        _COUNT,
        "--max-body-size",
        "Largest body of a request; larger ones get 413.",
        metavar="SIZE",
        shown_default="8MiB",
        parse=parse_bytes,
    )
    max_prompt_tokens: int | None = _option(
        None,
        _COUNT,
        "--max-prompt-tokens",
        "Most tokens of a prompt.",
        shown_default="what the model has room for",
    )
    max_queue_len: int = _option(
        1024, _COUNT, "--max-queue-len", "Requests get 429 while this many sequences wait for KV blocks."
    )
    request_timeout_s: float = _option(
        600.0,
        _TIME,
        "--request-timeout",
        "Longest time to send the body, and from a request's arrival to its last token.",
    )
    shutdown_timeout_s: float = _option(
        30.0,
        _FINITE_TIME,
        "--shutdown-timeout",
        "After SIGTERM, time for requests in progress; then they are aborted. A second signal aborts them at once.",
    )
    watchdog_timeout_s: float = _option(
        60.0,
        _TIME,
        "--watchdog-timeout",
        "After this long without progress on a lane, all requests fail and /health is 503.",
    )

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ConfigError("--served-model-name must be a name, got ''")
        for name, option in SERVE_OPTIONS.items():
            value = getattr(self, name)
            if not option.range.holds(value):
                found = "one that is empty or has other characters" if name == "api_key" else repr(value)
                raise ConfigError(f"{option.flag} must be {option.range.words}, got {found}")


SERVE_OPTIONS: dict[str, ServeOption] = {
    each.name: each.metadata["option"] for each in fields(ServeSettings) if each.metadata
}
"""The description of each setting that has an option of its own."""
