"""Sizes of scratch memory, known without torch and without the libraries that use it."""

from bullet_graph.perf.roofline import DecoderShape

_TILE_ROWS = 128
"""Query rows of a tile of FlashInfer's fa2, counted once for each query head of a key head; the most it takes."""

_SPLIT_TILES = 512
"""Tiles that its planner cuts work into where it splits keys: two for each SM, of up to 256."""


def prefill_workspace_bytes(shape: DecoderShape) -> int:
    """Float scratch of a lane's prefill attention, in bytes.

    Where tiles are fewer than what fills the device, FlashInfer's fa2 splits keys until they do, and keeps partial
    outputs and their log-sum-exp in float32 for each (head, tile, row); fa3 keeps none.
    """
    tiles = _SPLIT_TILES // shape.num_kv_heads + 1
    return shape.num_heads * tiles * _TILE_ROWS * (shape.head_dim + 1) * 4 + 1024**2
