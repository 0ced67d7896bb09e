"""Wave quantization: how well a prefill chunk's matrix products fill so many SMs.

A matrix product is cut into tiles, one for a thread block. Only so many blocks run at a time, one *wave*; the last
wave is as long as the others however few blocks are left for it.
"""

import math

from bullet_graph.perf.traffic import DecoderShape

CHUNK_STEP_TOKENS = 64
"""Chunks are multiples of this: the matrix kernels work in tiles of 64 rows or more."""

TILE_ROWS = 128
TILE_COLUMNS = 256


def layer_matrices(shape: DecoderShape) -> tuple[tuple[int, int], ...]:
    """(output columns, input columns) of a layer's products: qkv, attention output, gate and up, down."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return (
        (q_size + 2 * kv_size, shape.hidden_size),
        (shape.hidden_size, q_size),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    )


def num_waves(
    rows: float,
    columns: int,
    sms: int,
    *,
    tile_rows: int = TILE_ROWS,
    tile_columns: int = TILE_COLUMNS,
    blocks_per_sm: int = 1,
) -> int:
    """Waves of thread blocks that a product of rows × columns takes on so many SMs."""
    tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
    return math.ceil(tiles / (sms * blocks_per_sm))


def wave_efficiency(tokens: int, sms: int, shape: DecoderShape) -> float:
    """Share of the SMs' time that a forward of ``tokens`` rows puts to use in its products: above 0, at most 1.

    It says nothing of memory, which bounds a forward of a few rows.
    """
    return matrices_efficiency(tokens, sms, layer_matrices(shape))


def matrices_efficiency(tokens: float, sms: int, matrices: tuple[tuple[int, int], ...]) -> float:
    """As :func:`wave_efficiency`, for the matrices of :func:`layer_matrices`."""
    useful = spent = 0
    for columns, depth in matrices:
        useful += columns * depth
        spent += num_waves(tokens, columns, sms) * depth
    return tokens * useful / (spent * sms * TILE_ROWS * TILE_COLUMNS)


def wave_chunk_tokens(max_tokens: int, sms: int, shape: DecoderShape) -> int:
    """The chunk of at most ``max_tokens`` rows whose products fill their waves best, the largest of equals.

    It is a multiple of ``CHUNK_STEP_TOKENS``, or ``max_tokens`` itself where that is less than one step.
    """
    if max_tokens < CHUNK_STEP_TOKENS:
        return max_tokens
    matrices = layer_matrices(shape)
    sizes = range(CHUNK_STEP_TOKENS, max_tokens + 1, CHUNK_STEP_TOKENS)
    return max(sizes, key=lambda tokens: (matrices_efficiency(tokens, sms, matrices), tokens))
