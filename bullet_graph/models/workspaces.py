"""Sizes of scratch memory, known without the libraries that use it."""

from bullet_graph.models.config import ModelConfig

_TILE_ROWS = 128
"""Query rows of a tile of FlashInfer's fa2, counted once for each query head of a key head; the most it takes."""

_SPLIT_TILES = 512
"""Tiles that its planner cuts work into where it splits keys: two for each SM, of up to 256."""


def prefill_workspace_bytes(config: ModelConfig) -> int:
    """Float scratch of a lane's attention of prompts.

    Where tiles are fewer than what fills the device, FlashInfer's fa2 splits keys until they do, and keeps partial
    outputs and their log-sum-exp in float32 for each (head, tile, row); fa3 keeps none.
    """
    tiles = _SPLIT_TILES // config.num_kv_heads + 1
    return config.num_heads * tiles * _TILE_ROWS * (config.head_dim + 1) * 4 + 1024**2


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
