"""Latency targets (SLOs) of an engine or of one request."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields

from bullet_graph.errors import ConfigError

_FORMS = "ttft:500, ttft:500ms, ttft:0.2ms/token, tpot:15 or tpot:15ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets; None is no target, and what is not a positive number raises ConfigError.

    Attributes:
        ttft_ms: most time from arrival to the first token.
        ttft_ms_per_token: more time to the first token for each token of the prompt; adds to ``ttft_ms``.
        tpot_ms: most time per output token after the first, on average over the request.
    """

    ttft_ms: float | None = None
    ttft_ms_per_token: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (
                isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            ):
                raise ConfigError(f"the target {field.name} must be a positive number of milliseconds, got {value!r}")

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Slo":
        """Read targets such as ``("ttft:500", "tpot:15")``, in milliseconds; ConfigError for another form."""
        targets: dict[str, float] = {}
        for text in texts:
            match = re.fullmatch(r"(ttft|tpot):(\d+(?:\.\d+)?)(ms)?(/token)?", text)
            if match is None or (match[4] and (match[1] == "tpot" or not match[3])):
                raise ConfigError(f"{text!r} is no latency target: write {_FORMS}")
            name = f"{match[1]}_ms_per_token" if match[4] else f"{match[1]}_ms"
            if name in targets:
                raise ConfigError(f"the target {name} is given twice, the second time as {text!r}: give it once")
            targets[name] = float(match[2])
        return cls(**targets)

    def __str__(self) -> str:
        units = {"ttft_ms": "ttft:{:.15g}ms", "ttft_ms_per_token": "ttft:{:.15g}ms/token", "tpot_ms": "tpot:{:.15g}ms"}
        given = ((form, getattr(self, name)) for name, form in units.items())
        return " ".join(form.format(value) for form, value in given if value is not None) or "no targets"

    def or_else(self, default: "Slo") -> "Slo":
        """These targets, with those of ``default`` for the phases that have none (TTFT's two go together)."""
        ttft = self if self.has_ttft else default
        return Slo(
            ttft_ms=ttft.ttft_ms,
            ttft_ms_per_token=ttft.ttft_ms_per_token,
            tpot_ms=default.tpot_ms if self.tpot_ms is None else self.tpot_ms,
        )

    @property
    def has_ttft(self) -> bool:
        return self.ttft_ms is not None or self.ttft_ms_per_token is not None

    def ttft_limit_ms(self, prompt_tokens: int) -> float:
        """Most time to the first token for a prompt of this length; infinite without a target."""
        if not self.has_ttft:
            return math.inf
        return (self.ttft_ms or 0.0) + (self.ttft_ms_per_token or 0.0) * prompt_tokens


NO_TARGETS = Slo()
"""No targets: serve as fast as the device can."""
