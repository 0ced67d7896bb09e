"""The values between the engine loop and its planner: what there is to do, and how to do it."""

from dataclasses import dataclass
from typing import Literal

from bullet_graph.partition.masks import WHOLE_GPU, Lane, SmPartition

PolicyName = Literal["serial", "solo", "mixed", "split"]
"""How a tick shares the GPU: ``solo`` has one phase only, ``serial`` takes turns of whole prefills and steps."""

Bound = Literal["forced", "tpot", "ttft", "throughput", "nothing"]
"""What decided: a forced policy, a latency target, the highest throughput, or that there was no choice."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The sequences that decode now.

    Attributes:
        batch_size: how many.
        kv_tokens: tokens they attend to, all together.
        budget_ms: longest interval between their tokens, kept up from now on, that holds every TPOT target which
            can still be held; infinite without targets.
        slack_ms: longest wait for their next token alone, after which every such target can still be held by
            decoding alone on the whole GPU; infinite without targets.
        target_ms: the tightest TPOT target among them; infinite without targets.
    """

    batch_size: int
    kv_tokens: int
    budget_ms: float
    slack_ms: float
    target_ms: float


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """A prompt, or the rest of one, that no launched step covers yet.

    Attributes:
        tokens_left: tokens still to prefill.
        tokens_cached: tokens before them whose keys and values are in the cache, or will be.
        deadline_s: when its first token is due, on the engine's clock; infinite without a target.
    """

    tokens_left: int
    tokens_cached: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """A prefill chunk under way on the prefill lane.

    Attributes:
        tokens: rows of its forward.
        attention_pairs: (query, key) pairs of its attention, all sequences together.
        layers_left: layers not launched yet.
        deadline_s: the earliest deadline among its prompts.
    """

    tokens: int
    attention_pairs: float
    layers_left: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """All there is to do at one tick.

    Attributes:
        now_s: on the engine's clock.
        decode: None when no sequence decodes.
        prompts: waiting prompts in the order in which they will be served; at most the first 64.
        queued_tokens: tokens of all waiting prompts.
        chunk: the chunk under way, or None.
        steps_left: decode steps that the longest output may still take, of all that run or wait; None where the
            prompts come in an order that does not tell.
    """

    now_s: float
    decode: DecodeLoad | None
    prompts: tuple[PromptLoad, ...]
    queued_tokens: int
    chunk: ChunkLoad | None
    steps_left: int | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """A way to share the GPU that the planner weighed.

    Attributes:
        policy: its policy.
        decode_sms: SMs of the decode lane in ``split``; None for the whole GPU.
        chunk_tokens: rows of the prefill chunk.
        slice_layers: layers of a slice in ``split``; 0 elsewhere.
        interval_ms: predicted time from one decode step to the next; 0 without decode.
        prefill_tokens_per_s: predicted prefill rate; 0 without prefill.
        throughput: rates of both phases as shares of what each reaches alone on the whole GPU, added up; more
            than 1 is better than taking turns.
        measured: the prediction comes from measured points alone.
        holds_tpot: the interval fits the budget.
        holds_ttft: the first prompt's token is predicted before its deadline.
    """

    policy: PolicyName
    decode_sms: int | None
    chunk_tokens: int
    slice_layers: int
    interval_ms: float
    prefill_tokens_per_s: float
    throughput: float
    measured: bool
    holds_tpot: bool
    holds_ttft: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """How the next launches share the GPU.

    Attributes:
        policy: the policy chosen.
        decode: decode steps may be launched.
        prefill_lane: where prompt rows go: ``decode`` puts whole chunks into the decode lane's forwards
            (``serial``, ``solo``, ``mixed``), ``prefill`` runs them in slices of layers on a lane of their own
            (``split``, and ``solo`` while a chunk is under way there).
        chunk_tokens: most prompt rows of the next chunk; 0 starts none.
        slice_layers: layers of each slice launched on the prefill lane.
        partition: of both lanes.
        decode_ms: predicted time of the decode lane's next step on the device; None without a prediction.
        slice_ms: predicted time of the next slice on the device; None without a prediction.
        bound: what decided.
        options: what was weighed, empty when there was no choice.
    """

    policy: PolicyName
    decode: bool
    prefill_lane: Lane = "decode"
    chunk_tokens: int = 0
    slice_layers: int = 0
    partition: SmPartition = WHOLE_GPU
    decode_ms: float | None = None
    slice_ms: float | None = None
    bound: Bound = "nothing"
    options: tuple[Option, ...] = ()
