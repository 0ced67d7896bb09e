"""The server's settings."""

import math
from dataclasses import dataclass, field

from bullet_graph.errors import ConfigError

OWNER = "bullet_graph"
"""The model's owner in `/v1/models`; clients know the server by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The server's settings; the engine has its own.

    Attributes:
        port: TCP port; 0 takes a free one.
        api_key: key that every request but ``/health`` must carry; None asks for none.
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
    max_body_bytes: int = 8 * 1024**2
    max_prompt_tokens: int | None = None
    max_queue_len: int = 1024
    request_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0
    watchdog_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        key, prompt = self.api_key, self.max_prompt_tokens
        key_holds = key is None or (key.isascii() and key.isprintable() and key != "")
        shown_key = "one that is empty or has other characters"
        seconds = "a number of seconds above 0"
        for option, value, holds, allowed in (
            ("port", self.port, 0 <= self.port < 2**16, "between 0 and 65535"),
            ("served-model-name", self.served_model_name, self.served_model_name != "", "a name"),
            ("api-key", shown_key, key_holds, "printable ASCII characters, at least one"),
            ("max-body-size", self.max_body_bytes, self.max_body_bytes >= 1, "at least 1 byte"),
            ("max-prompt-tokens", prompt, prompt is None or prompt >= 1, "at least 1"),
            ("max-queue-len", self.max_queue_len, self.max_queue_len >= 1, "at least 1"),
            ("request-timeout", self.request_timeout_s, self.request_timeout_s > 0, seconds),
            ("watchdog-timeout", self.watchdog_timeout_s, self.watchdog_timeout_s > 0, seconds),
            (
                "shutdown-timeout",
                self.shutdown_timeout_s,
                0 <= self.shutdown_timeout_s < math.inf,
                "a number of seconds, at least 0",
            ),
        ):
            if not holds:
                raise ConfigError(f"--{option} must be {allowed}, got {value!r}")
