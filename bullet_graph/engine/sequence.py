"""The scheduler's values: a sequence (one sample of a request), and a step that it has filled."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from bullet_graph.runtime.step import Adjustments, Int32Array, SlotInit, Step
from bullet_graph.sampling_params import GREEDY_BELOW_TEMPERATURE, SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo

if TYPE_CHECKING:
    # It imports the tokenizers, and the simulator does without.
    from bullet_graph.engine.structured import Matcher

_INT32_MAX = 2**31 - 1

# The most probable token of any vocabulary has more, so this keeps that token alone, as any smaller value would.
_TOP_P_MIN = 1e-9


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Progress of one sample of one request.

    Steps are launched before their tokens are known. So ``output_token_ids`` holds the tokens that have reached the
    host, and ``num_in_flight`` counts those that launched steps will still deliver.

    Attributes:
        stop_token_ids: ids that end the output, end-of-sequence included unless ignored.
        bad_words: token ids of the texts that are not generated.
        matcher: follows a structured output up to ``output_token_ids``; None for free text.
        slot: its row in the device's state while it runs, else -1.
        num_cached: tokens whose keys and values are in the cache or written by launched steps; while it waits, those
            that it is expected to find in the prefix cache.
        num_found: those that it found there when it first started.
        block_keys: keys of its first full blocks; none without a prefix cache.
        num_keyed: how many of its blocks others may find by their keys.
        awaited_key: while it waits, a key of the blocks that it lacks: it is passed over if another will write them.
        prompt_launched: launched steps cover its whole prompt.
        decoding: decode rows may be launched: its prompt is done, or precedes them on the same lane. A structured
            output must also have all its tokens on the host, for they say which may come next.
        preempted: it lost its blocks and is recomputed.
        num_scored: prompt tokens whose log-probabilities launched steps report.
        num_pending_steps: launched, unretired steps that touch its blocks.
        num_tokens: prompt and output tokens, including those in flight, ``max_tokens`` at most. As ``kv_capacity``, the
            tokens that fit into its blocks, it is stored because every row of every step reads it.
    """

    request_id: str
    index: int
    prompt_token_ids: Int32Array
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    slo: Slo = NO_TARGETS
    arrival_s: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    matcher: "Matcher | None" = None
    status: Status = Status.WAITING
    slot: int = -1
    num_cached: int = 0
    num_found: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    num_keyed: int = 0
    awaited_key: bytes | None = None
    prompt_launched: bool = False
    decoding: bool = False
    preempted: bool = False
    first_token_s: float | None = None
    num_in_flight: int = 0
    num_scored: int = 0
    num_pending_steps: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    kv_capacity: int = 0
    deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids)
        self.max_tokens = self.num_tokens + self.params.max_tokens
        self.deadline_s = self.arrival_s + self.slo.ttft_limit_ms(self.num_tokens) / 1e3

    @property
    def num_known(self) -> int:
        """Tokens that have reached the host."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether the rows of its prompt are: of a request's samples, only the first one's."""
        return self.params.prompt_logprobs is not None and self.index == 0

    def known_token_ids(self, start: int, stop: int) -> Int32Array:
        """Tokens at positions [start, stop); all must have reached the host."""
        prompt_len = len(self.prompt_token_ids)
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        tail = np.asarray(self.output_token_ids[max(start - prompt_len, 0) : stop - prompt_len], dtype=np.int32)
        return np.concatenate([self.prompt_token_ids[start:], tail])

    def to_score(self, stop: int) -> tuple[int, int] | None:
        """Positions [first, end) of a chunk up to ``stop`` whose rows are to be scored."""
        first, end = max(self.num_cached, self.num_scored), min(stop, len(self.prompt_token_ids) - 1)
        return (first, end) if self.is_scored and first < end else None

    def slot_init(self) -> SlotInit:
        """Settings in the device's 32-bit numbers; larger values are clamped, which has the same effect."""
        params, adjustments = self.params, None
        if params.adjusts_logits:
            output = np.array(self.output_token_ids, dtype=np.int32)
            adjustments = Adjustments(params, self.bad_words, self.prompt_token_ids, output)
        return SlotInit(
            slot=self.slot,
            temperature=params.temperature if params.temperature >= GREEDY_BELOW_TEMPERATURE else 0.0,
            top_k=min(max(params.top_k, 0), _INT32_MAX),
            top_p=max(params.top_p, _TOP_P_MIN),
            min_p=params.min_p,
            seed=self.seed,
            masked_token_ids=tuple(sorted(self.stop_token_ids)) if params.min_tokens else (),
            masked_until=min(len(self.prompt_token_ids) + params.min_tokens, _INT32_MAX),
            adjustments=adjustments,
            uses_bitmask=self.matcher is not None,
        )


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step and its sequences: those that got their slot in it, whose blocks it reads or writes, and that get a token.

    Those of ``touched`` with prompt rows come first. ``sampled`` are in the order of the result's rows.
    ``ends`` are the tokens of each touched sequence that are cached once the step is over. ``scored`` are sequences
    with the positions, from first to before the end, whose rows are scored: the first ones of ``prompt_logprobs``.
    """

    step: Step
    admitted: tuple[Sequence, ...]
    touched: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]
    ends: tuple[int, ...]
    scored: tuple[tuple[Sequence, int, int], ...] = ()

    @property
    def prompts(self) -> tuple[Sequence, ...]:
        """The touched sequences with prompt rows."""
        prefill = self.step.prefill
        return self.touched[: 0 if prefill is None else len(prefill.slots)]
