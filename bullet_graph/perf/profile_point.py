"""One thing that ``bullet-graph profile`` measures, and whether it can be."""

from dataclasses import dataclass
from typing import Literal, get_args

from bullet_graph.config import KV_BLOCK_TOKENS

PointKind = Literal["decode", "prefill", "mixed", "split"]
KINDS: tuple[PointKind, ...] = get_args(PointKind)


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One thing to measure; what it has not is 0.

    Attributes:
        kind: decode alone, prefill alone, both in one forward, or both at once on partitions.
        sms: of the decode lane for decode and split, of the prefill lane for prefill; None is the whole GPU.
        batch_size: decode rows.
        context_tokens: that each of them attends to, itself included.
        tokens: rows of the prompt chunk.
        cached_tokens: of the prompt, before the chunk.
    """

    kind: PointKind
    sms: int | None = None
    batch_size: int = 0
    context_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """What the engine under measurement can hold.

    Attributes:
        max_batch_size: decode rows.
        max_tokens: rows of a prompt chunk.
        max_model_len: tokens of a sequence.
        kv_tokens: tokens of the KV cache.
    """

    max_batch_size: int
    max_tokens: int
    max_model_len: int
    kv_tokens: int

    def allows(self, point: ProfilePoint) -> bool:
        """Whether the point can be measured."""
        prompt = point.cached_tokens + point.tokens
        held = point.batch_size * _in_blocks(point.context_tokens) + _in_blocks(prompt)
        return (
            point.batch_size <= self.max_batch_size
            and point.tokens <= self.max_tokens
            and max(prompt, point.context_tokens) <= self.max_model_len
            and held <= self.kv_tokens
        )


def _in_blocks(tokens: int) -> int:
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
