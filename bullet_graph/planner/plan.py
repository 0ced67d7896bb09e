"""The values between the engine loop and its planner: the load, the options, and the plan."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bullet_graph.partition.masks import WHOLE_GPU, Lane, SmPartition

PolicyName = Literal["serial", "solo", "mixed", "split"]
"""How a launch shared the GPU: ``solo`` runs one phase only, ``serial`` alternates whole chunks and decode steps."""

Bound = Literal["forced", "tpot", "ttft", "throughput", "nothing"]
"""The reason of a choice: a forced policy, a latency target, the highest throughput, or no alternative."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The sequences that decode now, attending to ``kv_tokens`` in all; without targets the times are infinite.

    Attributes:
        budget_ms: longest constant interval between tokens that holds every TPOT target that can still be held.
        slack_ms: longest single wait for the next token after which decode alone on the whole GPU still holds them.
        target_ms: the tightest TPOT target among them.
    """

    batch_size: int
    kv_tokens: int
    budget_ms: float
    slack_ms: float
    target_ms: float


class PromptLoad(NamedTuple):
    """A prompt, or the rest of one, that is in no launched step; times are on the engine's clock.

    The ``tokens_cached`` before them are in the KV cache or in launched steps. Its first token is due at
    ``deadline_s``, which is infinite without a target. A ``resumed`` prompt is recomputed after a preemption.
    """

    tokens_left: int
    tokens_cached: int
    deadline_s: float
    arrival_s: float = 0.0
    started: bool = False
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """A prefill chunk under way on the prefill lane, with the earliest deadline of its prompts.

    ``attention_pairs`` are (query, key) pairs of all its sequences; ``layers_left`` are not launched.
    """

    tokens: int
    attention_pairs: float
    layers_left: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """The work at one tick: at most the first 64 waiting prompts, in serving order, but the tokens of them all.

    Tokens that the prefix cache holds are not counted.
    ``steps_left`` decode steps may the longest output still take; known if the longest outputs come first, else None.
    """

    now_s: float
    decode: DecodeLoad | None
    prompts: tuple[PromptLoad, ...]
    queued_tokens: int
    chunk: ChunkLoad | None
    steps_left: int | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """A weighed way to share the GPU.

    Attributes:
        decode_sms, slice_layers: of ``split``; None and 0 elsewhere.
        interval_ms: predicted time from one decode step to the next; infinite without decode.
        prefill_tokens_per_s: predicted prefill rate; 0 without prefill.
        throughput: prefill rate ÷ its rate alone + what a decode step saves ÷ the interval; above 1 beats taking turns.
        measured: the prediction rests on measured points alone.
        holds_tpot: the interval is within the budget, or that of a burst within the slack.
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

    @property
    def prefill_ms(self) -> float:
        """Predicted time of a chunk's forward; not for options without prefill."""
        return self.chunk_tokens * 1e3 / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class Plan:
    """How the next launches share the GPU.

    Attributes:
        prefill_lane: lane of the prompt rows: ``decode`` puts whole chunks into the decode lane's forwards
            (``serial``, ``solo``, ``mixed``), ``prefill`` runs them in slices of layers on their own lane
            (``split``, and ``solo`` while a chunk is under way there).
        chunk_tokens: most prompt rows of the next chunk; 0 starts none.
        decode_ms, slice_ms: predicted device times of the decode lane's next forward and of the next slice, if any.
        interval_ms: least time from the decode lane's last launch to this one, to save energy; 0 for none.
        least_rows: rows to which decode rows alone are padded, to save energy.
        options: those weighed, or the only one that the policy allows; empty for one phase, or without a table.
    """

    policy: PolicyName
    decode: bool
    prefill_lane: Lane = "decode"
    chunk_tokens: int = 0
    slice_layers: int = 0
    partition: SmPartition = WHOLE_GPU
    decode_ms: float | None = None
    slice_ms: float | None = None
    interval_ms: float = 0.0
    least_rows: int = 1
    bound: Bound = "nothing"
    options: tuple[Option, ...] = ()
