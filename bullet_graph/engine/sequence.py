"""One output being generated, the scheduler's unit of work; and a step that the scheduler has filled."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from bullet_graph.partition.masks import Lane
from bullet_graph.runtime.step import Int32Array, SlotInit, Step
from bullet_graph.sampling_params import GREEDY_BELOW_TEMPERATURE, SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo

_INT32_MAX = 2**31 - 1

# No vocabulary is so large that its most probable token has less, so it keeps that one alone, as less would.
_TOP_P_MIN = 1e-9


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Progress of one sample of one request.

    Steps are launched before their tokens are known, so progress is counted twice: ``output_token_ids`` is
    what has reached the host, ``num_in_flight`` what launched steps will still deliver.

    Attributes:
        request_id: the request it belongs to.
        index: which of the request's samples.
        prompt_token_ids: the prompt.
        params: sampling settings.
        seed: of this sample.
        stop_token_ids: ids that end the output, end of sequence included unless ignored.
        slo: latency targets.
        arrival_s: when the request came, on the engine's clock.
        status: waiting, running or finished.
        slot: its row in the device's state while it runs, else -1.
        num_cached: tokens whose keys and values launched steps have written.
        prompt_launched: launched steps cover its whole prompt.
        decoding: decode rows may be launched for it: its prompt is done, or goes before them on the same lane.
        preempted: it lost its blocks and is recomputed.
        first_token_s: when its first token reached the host.
        num_in_flight: sampled tokens still to arrive.
        num_pending_steps: launched steps not retired that touch its blocks.
        output_token_ids: tokens that arrived.
        num_tokens: prompt and output tokens, those in flight included. Counted rather than computed, as the next
            two: they are asked for at every step and every row.
        max_tokens: most that ``num_tokens`` may become.
        kv_capacity: tokens that its blocks have room for.
        deadline_s: when its first token is due; infinite without a target.
    """

    request_id: str
    index: int
    prompt_token_ids: Int32Array
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    slo: Slo = NO_TARGETS
    arrival_s: float = 0.0
    status: Status = Status.WAITING
    slot: int = -1
    num_cached: int = 0
    prompt_launched: bool = False
    decoding: bool = False
    preempted: bool = False
    first_token_s: float | None = None
    num_in_flight: int = 0
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

    def known_token_ids(self, start: int, stop: int) -> Int32Array:
        """Tokens at positions [start, stop), all of which must have reached the host."""
        prompt_len = len(self.prompt_token_ids)
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        tail = np.asarray(
            self.output_token_ids[max(start - prompt_len, 0) : stop - prompt_len], dtype=np.int32
        )
        return np.concatenate([self.prompt_token_ids[start:], tail])

    def slot_init(self) -> SlotInit:
        """Settings in the device's 32-bit numbers; what these cannot hold has the same effect as their limit."""
        params = self.params
        return SlotInit(
            slot=self.slot,
            temperature=params.temperature if params.temperature >= GREEDY_BELOW_TEMPERATURE else 0.0,
            top_k=min(max(params.top_k, 0), _INT32_MAX),
            top_p=max(params.top_p, _TOP_P_MIN),
            min_p=params.min_p,
            seed=self.seed,
            masked_token_ids=tuple(sorted(self.stop_token_ids)) if params.min_tokens else (),
            masked_until=min(len(self.prompt_token_ids) + params.min_tokens, _INT32_MAX),
        )


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step and whose it is.

    Attributes:
        step: what the executor runs.
        lane: where.
        admitted: sequences that got their slot in this step.
        touched: sequences whose blocks the step reads or writes.
        sampled: sequences that get a token, in the order of the result's rows.
    """

    step: Step
    lane: Lane
    admitted: tuple[Sequence, ...]
    touched: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]
