"""The server's settings."""

import math
from dataclasses import dataclass, field

from bullet_graph.errors import ConfigError

DEFAULT_MAX_BODY_BYTES = 8 * 1024**2

OWNER = "bullet_graph"
"""The owner of the model in `/v1/models`; clients know the server by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The server's settings; the engine has its own.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        served_model_name: the model's name in requests.
        api_key: key that every request but ``/health`` must carry; None asks for none.
        max_body_bytes: largest body of a request.
        max_prompt_tokens: longest prompt; None takes the model's limit.
        max_queue_len: requests are refused while this many sequences wait for KV blocks.
        request_timeout_s: longest time to send the body, and from a request's arrival to its last token.
        shutdown_timeout_s: time for running requests to end at shutdown.
        watchdog_timeout_s: time without progress on a lane after which the engine counts as dead.

    Raises:
        ConfigError: a setting is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_prompt_tokens: int | None = None
    max_queue_len: int = 1024
    request_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0
    watchdog_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _require(0 <= self.port < 2**16, "port", self.port, "between 0 and 65535")
        _require(bool(self.served_model_name), "served-model-name", self.served_model_name, "a name")
        _require(
            self.api_key is None
            or (self.api_key.isascii() and self.api_key.isprintable() and self.api_key != ""),
            "api-key",
            "one that is empty or has other characters",
            "printable ASCII characters, at least one",
        )
        _require(self.max_body_bytes >= 1, "max-body-size", self.max_body_bytes, "at least 1 byte")
        _require(
            self.max_prompt_tokens is None or self.max_prompt_tokens >= 1,
            "max-prompt-tokens",
            self.max_prompt_tokens,
            "at least 1",
        )
        _require(self.max_queue_len >= 1, "max-queue-len", self.max_queue_len, "at least 1")
        for name in ("request_timeout_s", "watchdog_timeout_s"):
            value = getattr(self, name)
            option = name.removesuffix("_s").replace("_", "-")
            _require(value > 0 and not math.isnan(value), option, value, "a number of seconds above 0")
        _require(
            0 <= self.shutdown_timeout_s < math.inf,
            "shutdown-timeout",
            self.shutdown_timeout_s,
            "a number of seconds, at least 0",
        )


def _require(condition: bool, option: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"--{option} must be {allowed}, got {value!r}")
