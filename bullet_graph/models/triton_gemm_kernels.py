# Triton kernels are a language of their own inside Python's syntax.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Triton kernel of the gate and up projections with SwiGLU; launched by ``triton_gemm``.

It is persistent: a program works through tiles of the output, and the loads of its next tile start while it still
finishes the last one. Loads and stores are TMA's, which reads zeros beyond an array's end and writes nothing there:
so no size needs to be a multiple of a tile's.
"""

import triton
import triton.language as tl


@triton.jit
def tile_at(tile, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: down GROUP_M rows first, so that tiles at work together share x and w in L2."""
    tiles_in_group = GROUP_M * num_tiles_n
    first = tile // tiles_in_group * GROUP_M
    rows = min(num_tiles_m - first, GROUP_M)
    return first + tile % tiles_in_group % rows, tile % tiles_in_group // rows


# The number of rows changes with every chunk: no value of it may be compiled for anew.
@triton.jit(do_not_specialize=["num_rows"])
def swiglu_matmul_kernel(
    x_desc,
    gate_up_desc,
    out_desc,
    num_rows,
    intermediate_size,
    hidden_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = silu(x @ gate^T) * (x @ up^T), summed in float32.

    gate_up_desc is over [2, intermediate_size, hidden_size], a box of it [2, BLOCK_N, BLOCK_K]: one product then
    gives both halves, and each step reads x from shared memory once.
    """
    num_tiles_m, num_tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(intermediate_size, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(tile, num_tiles_m, num_tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in tl.range(0, hidden_size, BLOCK_K, num_stages=STAGES):
            gate_up = tl.reshape(gate_up_desc.load([0, tile_n * BLOCK_N, k]), (2 * BLOCK_N, BLOCK_K))
            acc = tl.dot(x_desc.load([tile_m * BLOCK_M, k]), gate_up.T, acc)
        # The halves of a column lie in the same thread, so that they are split without a shuffle.
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        out_desc.store(
            [tile_m * BLOCK_M, tile_n * BLOCK_N], (gate * tl.sigmoid(gate) * up).to(out_desc.dtype)
        )
