"""What steps ask of a device, in the performance model's terms. No torch."""

from dataclasses import dataclass

import numpy as np

from bullet_graph.perf.performance import attention_pairs
from bullet_graph.runtime.step import Placement, Step


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step asks of the device.

    Attributes:
        tokens: prompt rows.
        pairs: (query, key) pairs of their attention.
        batch_size: decode rows.
        kv_tokens: tokens that these attend to, all together.
        num_sampled: rows of either kind that a token is sampled for.
    """

    tokens: int
    pairs: float
    batch_size: int
    kv_tokens: int
    num_sampled: int

    @classmethod
    def of(cls, step: Step, *, samples: bool) -> "StepWork":
        """What this step asks.

        Args:
            samples: it goes through the last layer, so that tokens are sampled.
        """
        tokens, pairs, batch_size, kv_tokens, num_sampled = 0, 0.0, 0, 0, 0
        if step.prefill is not None:
            tokens = len(step.prefill.token_ids)
            lengths = np.diff(step.prefill.q_indptr).tolist()
            pairs = sum(map(attention_pairs, lengths, step.prefill.starts.tolist()))
            num_sampled = int(np.count_nonzero(step.prefill.samples))
        if step.decode is not None:
            batch_size = len(step.decode.slots)
            kv_tokens = int(step.decode.positions.sum()) + batch_size
        return cls(tokens, pairs, batch_size, kv_tokens, num_sampled + batch_size if samples else 0)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One launch that has finished.

    Attributes:
        placement: where it ran, and which layers.
        work: of its whole step.
        device_ms: its time on the device.
    """

    placement: Placement
    work: StepWork
    device_ms: float
