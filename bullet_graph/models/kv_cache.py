"""The paged KV cache's memory."""

import torch
from torch import Tensor

from bullet_graph.models.config import ModelConfig


def kv_block_bytes(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return config.num_layers * 2 * block_tokens * config.kv_size * dtype.itemsize


class KVCache:
    """Keys and values of all layers, in blocks of ``block_tokens`` tokens.

    Args:
        num_blocks: blocks, the padding block included.
        block_tokens: tokens a block holds.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        # Zeroed: padded rows attend to the padding block, and uninitialised memory may hold NaN.
        self._data = torch.zeros(
            config.num_layers,
            2,
            num_blocks,
            block_tokens,
            config.num_kv_heads,
            config.head_dim,
            dtype=dtype,
            device=device,
        )
        # Views made once: an eager forward asks for them three times a layer, and its launches are what it waits for.
        self._layers = [(self._data[index, 0], self._data[index, 1]) for index in range(config.num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a layer, each [num_blocks, block_tokens, num_kv_heads, head_dim]."""
        return self._layers[index]
