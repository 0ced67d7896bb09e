"""The server's settings: the only place where each is named, described, checked and given its default."""

import math
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any, Literal

from bullet_graph.config import parse_bytes, setting, settings_of

OWNER = "bullet_graph"
"""The model's owner in `/v1/models`; clients know the server by it."""


def _time(default: float, flag: str, text: str, **details: Any) -> Any:
    limits = {"wanted": "a number of seconds above 0", "holds": lambda seconds: seconds > 0} | details
    return setting(default, text, flag=flag, metavar="SECONDS", **limits)


_size = partial(setting, metavar="SIZE", minimum=1, parse=parse_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The server's settings; the engine has its own. A wrong one raises ConfigError, at construction."""

    served_model_name: str = setting(MISSING, "The model's name in requests.", wanted="a name that is not empty")
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0: all.", wanted="a name or an address")
    port: int = setting(8000, "TCP port; 0: a free one.", wanted="between 0 and 65535", holds=lambda n: 0 <= n < 2**16)
    api_key: str | None = setting(
        None,
        "Key that every request but /health must carry, as `Authorization: Bearer KEY`.",
        wanted="printable ASCII characters, at least one and no space around them",
        holds=lambda key: key.isascii() and key.isprintable() and key.strip() == key != "",
        secret=True,
    )
    max_connections: int = setting(4096, "Most open connections; more get 503. Each needs a descriptor.", minimum=1)
    max_headers: int = setting(100, "Most headers of a request; one with more gets 431.", minimum=1)
    max_header_bytes: int = _size(
        64 << 10, "Largest URL and headers of a request; larger ones get 431.", flag="--max-header-size"
    )
    header_timeout_s: float = _time(
        10.0, "--header-timeout", "Longest time to send a request's headers, from the connection on."
    )
    write_timeout_s: float = _time(
        60.0,
        "--write-timeout",
        "A client that takes nothing of what it is sent for this long is cut off; 0: the system decides.",
        wanted="a number of seconds from 0 to 86400",
        holds=lambda seconds: 0 <= seconds <= 86400,
    )
    max_body_bytes: int = _size(1 << 20, "Largest body of a request; larger ones get 413.", flag="--max-body-size")
    max_prompt_tokens: int | None = setting(
        None, "Most tokens of a prompt.", no_value="what the model has room for", minimum=1
    )
    max_queue_len: int = setting(1024, "Requests get 429 while this many sequences wait for KV blocks.", minimum=1)
    request_timeout_s: float = _time(
        600.0, "--request-timeout", "Longest time to send the body, and from a request's arrival to its last token."
    )
    shutdown_timeout_s: float = _time(
        30.0,
        "--shutdown-timeout",
        "After SIGTERM, time for requests in progress; then they are aborted. A second signal aborts them at once.",
        wanted="a number of seconds, at least 0",
        holds=lambda seconds: 0 <= seconds < math.inf,
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = setting(
        "auto", "Format of tool calls; auto: that of the chat template."
    )
    watchdog_timeout_s: float = _time(
        60.0, "--watchdog-timeout", "After this long without progress on a lane, all requests fail and /health is 503."
    )

    def __post_init__(self) -> None:
        for name, described in SERVE_SETTINGS.items():
            described.check(getattr(self, name))


SERVE_SETTINGS = settings_of(ServeSettings)
"""The description of each setting."""
