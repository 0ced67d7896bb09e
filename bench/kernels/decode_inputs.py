"""What kernels of decode attention read: caches, rows of several lengths, blocks in any order."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bullet_graph.errors import ConfigError
from bullet_graph.models.config import ModelConfig

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
Int32Array: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]


@dataclass
class Cache:
    """What the kernels ask of a KV cache, in either layout."""

    block_tokens: int
    layers: list[tuple[Tensor, Tensor]]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.layers[index]

    @classmethod
    def random(
        cls, config: ModelConfig, tokens: int, block_tokens: int, num_layers: int, *, hnd: bool
    ) -> "Cache":
        inner = (block_tokens, config.num_kv_heads)
        shape = (num_layers, 2, tokens // block_tokens, *(inner[::-1] if hnd else inner), config.head_dim)
        data = torch.empty(shape, dtype=DTYPE, device=DEVICE)
        for layer in data:
            layer.normal_()
        return cls(block_tokens, [(layer[0], layer[1]) for layer in data])

    def turned(self) -> "Cache":
        """The same memory with heads and tokens exchanged."""
        return Cache(self.block_tokens, [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in self.layers])


def lengths(rows: int, context: int, spread: bool) -> Int32Array:
    """Tokens of context of each row: all alike, or drawn from a lognormal distribution with that mean."""
    if not spread:
        return np.full(rows, context, dtype=np.int32)
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, rows)
    return np.clip(drawn * context / drawn.mean(), 1, 16384).astype(np.int32)


def scattered_blocks(
    kv_lens: Int32Array, num_blocks: int, block_tokens: int
) -> tuple[Int32Array, Int32Array]:
    """Blocks in random order, as a cache has them after hours of service.

    Args:
        kv_lens: [rows], tokens of context.
        num_blocks: that the cache holds.
        block_tokens: of a block.

    Returns:
        (kv_indptr [rows + 1], kv_indices [blocks in use]), as FlashInfer reads them.

    Raises:
        ConfigError: the rows need more blocks than there are.
    """
    indptr = np.concatenate(([0], np.cumsum(-(-kv_lens // block_tokens)))).astype(np.int32)
    indices = np.random.default_rng(1).permutation(num_blocks)[: indptr[-1]].astype(np.int32)
    if len(indices) < indptr[-1]:
        raise ConfigError(
            f"a case needs {indptr[-1]} blocks, the cache holds {num_blocks}: make it larger or the case smaller"
        )
    return indptr, indices
