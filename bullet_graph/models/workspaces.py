"""Sizes of scratch memory, known without the libraries that use it."""

from bullet_graph.models.config import ModelConfig

_DECODE_TILE_ROWS = 16
"""Query rows of a tensor-core decode tile: the smallest of FlashInfer's fa2."""


def decode_workspace_bytes(config: ModelConfig, max_rows: int) -> int:
    """Float scratch of a decode of ``max_rows`` rows.

    FlashInfer keeps partial outputs and their log-sum-exp in float32 for each (head, tile, row); a captured
    plan counts at most ceil(rows * group / tile) + rows - 1 tiles, or what fills the device if that is more.
    """
    group = config.num_heads // config.num_kv_heads
    tiles = max(-(-max_rows * group // _DECODE_TILE_ROWS) + max_rows - 1, 512 // config.num_kv_heads + 1)
    return config.num_heads * tiles * _DECODE_TILE_ROWS * (config.head_dim + 1) * 4 + 1024**2
