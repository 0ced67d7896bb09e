"""One output being generated: the scheduler's unit of work."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from bullet_graph.runtime.step import Int32Array
from bullet_graph.sampling_params import SamplingParams


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
        status: waiting, running or finished.
        slot: its row in the device's state while it runs, else -1.
        num_cached: tokens whose keys and values launched steps have written.
        decoding: its whole prompt has been launched.
        num_in_flight: sampled tokens still to arrive.
        num_pending_steps: launched steps not retired that touch its blocks.
        output_token_ids: tokens that arrived.
    """

    request_id: str
    index: int
    prompt_token_ids: Int32Array
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    status: Status = Status.WAITING
    slot: int = -1
    num_cached: int = 0
    decoding: bool = False
    num_in_flight: int = 0
    num_pending_steps: int = 0
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those in flight included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    def known_token_ids(self, start: int, stop: int) -> Int32Array:
        """Tokens at positions [start, stop), all of which must have reached the host."""
        prompt_len = len(self.prompt_token_ids)
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        tail = np.asarray(
            self.output_token_ids[max(start - prompt_len, 0) : stop - prompt_len], dtype=np.int32
        )
        return np.concatenate([self.prompt_token_ids[start:], tail])
