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


def piece_buffer_bytes(config: ModelConfig, max_rows: int, *, dtype_bytes: int) -> int:
    """Buffers of :class:`~bullet_graph.models.pieces.LayerPieces` of up to ``max_rows`` rows.

    Activations and their residual, qkv, queries and what attention made of them; positions and cache slots in int32.
    """
    columns = 2 * config.hidden_size + (config.q_size + 2 * config.kv_size) + 2 * config.q_size
    return max_rows * (columns * dtype_bytes + 2 * 4)


def piece_scratch_bytes(config: ModelConfig, max_rows: int, *, dtype_bytes: int) -> int:
    """What captured pieces of forwards of up to ``max_rows`` rows compute in, the graphs themselves left out.

    Besides their buffers that is the intermediate results of one piece, in a pool that all of them share: at most three
    of [rows, hidden_size] at a time, and gate, up and their product.
    """
    columns = 3 * config.hidden_size + 3 * config.intermediate_size
    return piece_buffer_bytes(config, max_rows, dtype_bytes=dtype_bytes) + max_rows * columns * dtype_bytes
