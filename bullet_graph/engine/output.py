"""The engine's outputs: tokens and text of requests, and its counters."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from bullet_graph.errors import LateError, RequestError
from bullet_graph.partition.masks import Lane
from bullet_graph.perf.metrics import RequestMetrics
from bullet_graph.planner.options import ForwardKind
from bullet_graph.planner.plan import PolicyName
from bullet_graph.slo import NO_TARGETS, Slo

FinishReason = Literal["stop", "length", "abort", "error"]


class OutputKind(Enum):
    """Which outputs a request reports while it runs."""

    CUMULATIVE = "cumulative"
    """Each output holds everything so far."""
    DELTA = "delta"
    """Each output holds what is new since the last one."""
    FINAL_ONLY = "final_only"
    """One output, at the end."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's own distribution (temperature 1, no top-k or top-p).

    ``top`` has (token id, log-probability) of the most probable tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)  # a frozen one takes 2.5 times as long to make; there is one per token
class CompletionOutput:
    """One sampled output of a request; its text is empty without a tokenizer.

    ``finish_reason`` is ``stop`` after a stop token, a stop string or the end of sequence, and where nothing may follow
    in a structured output. It is None while the output runs.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None


@dataclass(slots=True)  # not frozen, as CompletionOutput
class RequestOutput:
    """State of one request: its samples by index, and the latency targets that hold for it.

    ``prompt_logprobs`` of a finished request that asked for them: None for the prompt's first token, then an entry for
    each. ``num_cached_tokens`` of its prompt came from the prefix cache (those of the first sample).
    ``error`` says why ``generate`` refused a request of a batch, which then has no ``outputs``, or why a structured
    output ended with the reason ``error``; the request's other outputs may still run.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    error: RequestError | LateError | None = None
    slo: Slo = NO_TARGETS
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def missed_targets(self) -> tuple[Literal["ttft", "tpot"], ...]:
        """The latency targets that the request has missed so far."""
        return self.metrics.missed_targets(self.slo, len(self.prompt_token_ids))

    @classmethod
    def refused(cls, request_id: str, error: RequestError | LateError, now: float) -> "RequestOutput":
        return cls(request_id, (), (), True, RequestMetrics(now, None, ()), error)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, and its state now.

    Attributes:
        num_prompt_tokens, num_output_tokens: tokens of prompts that have a first token, and tokens sampled.
        num_preemptions: times that a sequence lost its KV blocks and was recomputed.
        prefix_cache_queries, prefix_cache_hits: tokens of sequences that started, and those that came from the prefix
            cache; resumptions after a preemption are not counted.
        num_running, num_waiting: sequences that hold KV blocks, and that wait for them.
        policy_seconds, lane_seconds: device time of launches.
        lane_sm_seconds: device time × SMs of launches; empty without a GPU.
        lane_sms: SMs of each lane's current launch, 0 if it is idle; empty without a GPU.
        corrections: measured ÷ predicted time by policy, kind and most rows of forwards, as learned by the planner.
        predicted_ttft_ms: of a request of one token that came now; 0 without a performance table.
    """

    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_peak: int
    num_running: int
    num_waiting: int
    num_missing_graphs: int
    policy_seconds: Mapping[PolicyName, float]
    lane_seconds: Mapping[Lane, float]
    lane_sm_seconds: Mapping[Lane, float]
    lane_sms: Mapping[Lane, int]
    corrections: Mapping[tuple[PolicyName, ForwardKind, int], float]
    predicted_ttft_ms: float

    @property
    def policy_shares(self) -> dict[str, float]:
        """Each policy's share of device time; empty before the first launch."""
        total = sum(self.policy_seconds.values())
        return {policy: seconds / total for policy, seconds in self.policy_seconds.items()} if total else {}
