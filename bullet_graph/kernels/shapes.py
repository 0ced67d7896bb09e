"""The numbers of a decoder that its kernels depend on, and the memory they need; pure, without torch."""

from typing import Protocol

_TILE_ROWS = 128
"""Query rows of a tile of FlashInfer's fa2, counted once for each query head of a key head; the most it takes."""

_SPLIT_TILES = 512
"""Tiles that its planner cuts work into where it splits keys: two for each SM, of up to 256."""


class DecoderShape(Protocol):
    """What kernels read of a model; ``ModelConfig`` has it all."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


def kv_block_bytes(shape: DecoderShape, block_tokens: int, *, dtype_bytes: int) -> int:
    """Bytes of one KV block over all layers, keys and values."""
    return shape.num_layers * 2 * block_tokens * shape.num_kv_heads * shape.head_dim * dtype_bytes


def prefill_workspace_bytes(shape: DecoderShape) -> int:
    """Float scratch of a lane's prefill attention, in bytes.

    Where tiles are fewer than what fills the device, FlashInfer's fa2 splits keys until they do, and keeps partial
    outputs and their log-sum-exp in float32 for each (head, tile, row); fa3 keeps none.
    """
    tiles = _SPLIT_TILES // shape.num_kv_heads + 1
    return shape.num_heads * tiles * _TILE_ROWS * (shape.head_dim + 1) * 4 + 1024**2
