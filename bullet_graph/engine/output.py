"""What the engine gives back."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from bullet_graph.errors import RequestError
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
    """Each output holds what came since the last one."""
    FINAL_ONLY = "final_only"
    """One output, at the end."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, of the model's own distribution (temperature 1, no cuts).

    Attributes:
        token_id: the token chosen.
        logprob: its log-probability.
        top: the most probable tokens, best first, as (token id, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)  # frozen ones take 2.5 times as long to make, and each token brings one
class CompletionOutput:
    """One sampled output of a request.

    Attributes:
        index: which of the ``n`` samples.
        text: detokenized text, empty for a model without a tokenizer.
        token_ids: generated ids.
        logprobs: one entry a token when asked for, else None.
        finish_reason: ``stop`` (a stop token or string, or end of sequence), ``length``, ``abort``, or None
            while it runs.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None


@dataclass(slots=True)  # not frozen, as CompletionOutput
class RequestOutput:
    """State of one request.

    Attributes:
        request_id: the caller's id.
        prompt_token_ids: the prompt as the model saw it.
        outputs: one entry a sample, by index; empty for a request that failed.
        finished: no more outputs follow.
        metrics: the request's times.
        error: why the request was refused (``generate`` over a batch), else None.
        slo: the targets it was served under.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    error: RequestError | None = None
    slo: Slo = NO_TARGETS

    @property
    def missed_targets(self) -> tuple[Literal["ttft", "tpot"], ...]:
        """The latency targets that the request has missed so far."""
        ttft_ms, tpot_ms = self.metrics.ttft_ms, self.metrics.tpot_ms
        missed: list[Literal["ttft", "tpot"]] = []
        if ttft_ms is not None and ttft_ms > self.slo.ttft_limit_ms(len(self.prompt_token_ids)):
            missed.append("ttft")
        if tpot_ms is not None and self.slo.tpot_ms is not None and tpot_ms > self.slo.tpot_ms:
            missed.append("tpot")
        return tuple(missed)

    @classmethod
    def refused(cls, request_id: str, error: RequestError, now: float) -> "RequestOutput":
        """The output of a request that the engine did not take."""
        return cls(request_id, (), (), True, RequestMetrics(now, None, ()), error)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, and its state now.

    Attributes:
        num_steps: forwards retired.
        num_preemptions: sequences that lost their blocks and were recomputed.
        kv_blocks_total: blocks that sequences can own.
        kv_blocks_used: blocks owned now.
        kv_blocks_peak: most owned at once.
        num_running: sequences that hold blocks.
        num_waiting: sequences that wait for blocks.
        num_decoding: running sequences whose prompts are done.
        num_missing_graphs: CUDA graphs still to be captured, of an engine that was ready before all of them were.
        policy_seconds: time the device spent on launches under each of the planner's policies.
        lane_seconds: time the device spent on each lane's launches.
        lane_sm_seconds: the same times the SMs that the launches had; without a GPU, which has no SMs, nothing.
        lane_sms: SMs of what each lane runs now, 0 where it is idle; without a GPU, nothing.
        corrections: measured over predicted time, by policy and kind of forward, as the planner has learned it.
    """

    num_steps: int
    num_preemptions: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_peak: int
    num_running: int
    num_waiting: int
    num_decoding: int
    num_missing_graphs: int
    policy_seconds: Mapping[PolicyName, float]
    lane_seconds: Mapping[Lane, float]
    lane_sm_seconds: Mapping[Lane, float]
    lane_sms: Mapping[Lane, int]
    corrections: Mapping[tuple[PolicyName, ForwardKind], float]

    @property
    def policy_shares(self) -> dict[str, float]:
        """Each policy's share of the device time of all launches; empty before the first."""
        total = sum(self.policy_seconds.values())
        return {policy: seconds / total for policy, seconds in self.policy_seconds.items()} if total else {}
