"""The systems of a comparison: a candidate is a system and one setting of it."""

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast, get_args

from bullet_graph.config import DeviceName, DtypeName, KvCacheDtypeName, LoadFormat, Policy, PromptOrder
from bullet_graph.engine.replay import TimedRequest
from bullet_graph.errors import ConfigError
from bullet_graph.perf.provenance import installed_version
from bullet_graph.slo import Slo

Kind = Literal["own", "vllm", "sglang", "openai"]
OPTION_EXAMPLES: Mapping[Kind, str] = MappingProxyType(
    {"vllm": "max_cudagraph_capture_size=1024", "sglang": "cuda_graph_max_bs_decode=1024"}
)
"""The peers that take further arguments, with an example of each."""
PD_MULTIPLEXING = "pdmux"
"""The setting of SGLang with prefill and decode on SM partitions side by side."""
_FORMS = "own:POLICY, own:POLICY/ORDER, vllm, vllm:CHUNK, sglang, sglang:CHUNK, sglang:pdmux or openai:URL"


class System(Protocol):
    """A system that is up, under one of its settings at a time."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting of its start that its figures may depend on, in values that JSON has."""

    async def configure(self, setting: str, slo: Slo) -> None:
        """Serve under a setting and targets from now on, with no request under way; ConfigError if it cannot be had."""

    def generate(self, request: TimedRequest) -> AsyncGenerator[Sequence[int], None]:
        """Serve a request, yielding the new tokens of each output.

        Raises EngineDeadError where the system has failed as a whole; any other error is the request's alone.
        """

    def counters(self) -> Mapping[str, Any]:
        """Figures of its own since it was last configured, in values that JSON has."""

    async def close(self) -> None:
        """Give its memory back."""


@dataclass(frozen=True, slots=True)
class OwnSetting:
    """A policy of this engine's, and the order of prompts without targets."""

    policy: Policy
    prompt_order: PromptOrder = "arrival"

    @classmethod
    def parse(cls, text: str) -> "OwnSetting":
        """Read ``POLICY`` or ``POLICY/ORDER``; ConfigError for any other text."""
        policy, slash, order = text.partition("/")
        if slash and order not in get_args(PromptOrder):
            raise ConfigError(f"{order!r} is no order of prompts: write {' or '.join(get_args(PromptOrder))}")
        return cls(Policy.parse(policy), cast(PromptOrder, order or "arrival"))

    def __str__(self) -> str:
        return str(self.policy) if self.prompt_order == "arrival" else f"{self.policy}/{self.prompt_order}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system and a setting.

    Attributes:
        kind: of system.
        setting: an :class:`OwnSetting` of this engine's; a peer's largest number of prompt tokens in a step, or empty
            for the engine's, or SGLang's ``pdmux``; empty for a server.
        url: of a server, up to ``/v1``; else empty.
    """

    kind: Kind
    setting: str = ""
    url: str = ""

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        """Read a system as the command line names it; ConfigError, with the forms allowed, for any other text."""
        kind, _, rest = text.partition(":")
        has_chunk = rest.isdecimal() and int(rest) > 0
        good = {
            "own": bool(rest),
            "vllm": has_chunk or text == "vllm",
            "sglang": has_chunk or text in ("sglang", f"sglang:{PD_MULTIPLEXING}"),
            "openai": rest.startswith(("http://", "https://")),
        }
        if kind not in get_args(Kind) or not good[kind]:
            raise ConfigError(f"{text!r} is no system: write {_FORMS}")
        if kind == "openai":
            return cls("openai", url=rest.rstrip("/"))
        return cls(cast(Kind, kind), str(OwnSetting.parse(rest)) if kind == "own" else rest)

    @property
    def resident(self) -> tuple[Kind, str]:
        """The process or server that it needs: candidates that share it take turns. SGLang's setting cannot change."""
        return self.kind, self.setting if self.kind == "sglang" else self.url

    @property
    def peer(self) -> tuple[Kind, str]:
        """What it is a setting of."""
        return self.kind, self.url

    @property
    def label(self) -> str:
        """Its name in results."""
        if self.kind == "own":
            return f"bullet_graph {self.setting}"
        if self.kind == "openai":
            return self.url
        named = f"{self.kind} {installed_version(self.kind) or '(not installed)'}"
        return f"{named} chunk {self.setting}" if self.setting.isdecimal() else f"{named} {self.setting}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings that all systems of this process share; names and units are the engine's.

    Attributes:
        load_format: ``auto`` is dummy for a preset.
        kv_cache_bytes: of this project's engine alone.
        perf_table: likewise.
        shares_prefixes: prompts begin alike by design, so peers run with their prefix cache on.
    """

    model: str
    load_format: LoadFormat = "auto"
    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    max_model_len: int
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.45
    kv_cache_bytes: int | None = None
    kv_cache_dtype: KvCacheDtypeName = "auto"
    tensor_parallel_size: int = 1
    seed: int = 0
    perf_table: str | None = None
    shares_prefixes: bool = False


def peer_versions() -> dict[str, str | None]:
    """Versions of the peers' libraries; None: not installed."""
    names = ("vllm", "sglang", "sglang-kernel", "transformers", "flashinfer-python", "flashinfer-cubin", "aiohttp")
    return {name: installed_version(name) for name in (*names, "nvidia-cudnn-cu13", "nvidia-cublas", "uvloop")}


def log(message: str) -> None:
    """Write a line to stderr."""
    print(message, file=sys.stderr, flush=True)
