"""Candidate kernels for prefill, not used by the engine; measured by `bench/kernels/prefill_gemm.py`.

Matrix products y[M, N] = x[M, K] @ w[N, K]^T in bf16, accumulated in fp32, persistent, with TMA loads and stores:
plain, and with the residual added before the only rounding. Then variants of the element-wise passes. The product
with SwiGLU is the engine's (`bullet_graph/models/triton_gemm.py`), here with other settings as well.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bullet_graph.models.triton_gemm import DEFAULT_TILING, SwigluTiling
from bullet_graph.models.triton_gemm_kernels import tile_at


@triton.jit
def matmul_kernel(
    x_desc,
    w_desc,
    residual_desc,
    y_desc,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """y = x @ w^T (+ residual); the tile is stored in two halves, which halves the epilogue's shared memory."""
    num_tiles_m, num_tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_at(tile, num_tiles_m, num_tiles_n, GROUP_M)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = tl.dot(x_desc.load([tile_m * BM, k]), w_desc.load([tile_n * BN, k]).T, acc)
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        column = tile_n * BN
        if RESIDUAL:
            left += residual_desc.load([tile_m * BM, column]).to(tl.float32)
        y_desc.store([tile_m * BM, column], left.to(y_desc.dtype))
        if RESIDUAL:
            right += residual_desc.load([tile_m * BM, column + BN // 2]).to(tl.float32)
        y_desc.store([tile_m * BM, column + BN // 2], right.to(y_desc.dtype))


@triton.jit
def add_rms_norm_rows_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    summed_ptr,
    num_rows,
    HIDDEN: tl.constexpr,
    eps,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """The engine's kernel without masks, ROWS rows at a time, over a grid that may be smaller than the rows.

    ADD false: x holds the sum already (the product before added the residual) and only the norm is left.
    """
    columns = tl.arange(0, HIDDEN)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        at = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        summed = tl.load(x_ptr + at)
        if ADD:
            residual = tl.load(residual_ptr + at).to(tl.float32)
            summed = (summed.to(tl.float32) + residual).to(weight_ptr.dtype.element_ty)
            tl.store(summed_ptr + at, summed)
        wide = summed.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / HIDDEN + eps)
        normed = (wide * scale[:, None]).to(weight_ptr.dtype.element_ty).to(tl.float32) * weight[None, :]
        tl.store(normed_ptr + at, normed.to(weight_ptr.dtype.element_ty))


@triton.jit
def silu_and_mul_wide_kernel(gate_up_ptr, out_ptr, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr):
    """The engine's kernel without masks; its input is read once and need not stay in L2."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * 2 * INTERMEDIATE + columns, eviction_policy="evict_first")
    up = tl.load(gate_up_ptr + row * 2 * INTERMEDIATE + INTERMEDIATE + columns, eviction_policy="evict_first")
    gate = gate.to(tl.float32)
    out = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(out_ptr + row * INTERMEDIATE + columns, out.to(out_ptr.dtype.element_ty))


# Boxes and launches by name. 128x256 keeps 128 accumulator registers a thread with 8 warps; three stages of it are
# 144 KiB, four 192 KiB, of 227 KiB.
# FLATTEN lets the next tile's first loads start under the epilogue. Hopper's warp specialization (Triton 3.6) compiles
# neither the split of the accumulator nor the box of three dimensions.
_TILE = {"BM": 128, "BN": 256, "BK": 64, "GROUP_M": 16, "num_warps": 8}
MATMULS: dict[str, dict[str, Any]] = {
    "s3 flat": _TILE | {"STAGES": 3, "FLATTEN": True},
    "s4": _TILE | {"STAGES": 4, "FLATTEN": False},
}
SWIGLUS: dict[str, SwigluTiling] = {"s3": DEFAULT_TILING, "s4": replace(DEFAULT_TILING, num_stages=4)}


def matmul(
    x: Tensor, w: Tensor, y: Tensor, config: dict[str, Any], num_sms: int, residual: Tensor | None = None
) -> None:
    """y = x @ w^T (+ residual): x [M, K], w [N, K], y and residual [M, N], all bf16 and contiguous."""
    (m, k), n = x.shape, len(w)
    bm, bn, bk = config["BM"], config["BN"], config["BK"]
    y_desc = TensorDescriptor.from_tensor(y, [bm, bn // 2])
    matmul_kernel[(min(num_sms, triton.cdiv(m, bm) * triton.cdiv(n, bn)),)](
        TensorDescriptor.from_tensor(x, [bm, bk]),
        TensorDescriptor.from_tensor(w, [bn, bk]),
        y_desc if residual is None else TensorDescriptor.from_tensor(residual, [bm, bn // 2]),
        y_desc,
        m,
        n,
        k,
        RESIDUAL=residual is not None,
        **config,
    )


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: tuple[Tensor, Tensor],
    rows_per_program: int = 1,
    num_warps: int = 8,
    grid: int | None = None,
) -> None:
    """Add (unless residual is None) and norm rows of a power-of-two width; out is (normed, summed)."""
    rows, hidden_size = x.shape
    normed, summed = out
    programs = triton.cdiv(rows, rows_per_program)
    if rows % rows_per_program:
        raise ValueError(f"rows must be a multiple of {rows_per_program}, found {rows}")
    add_rms_norm_rows_kernel[(min(programs, grid or programs),)](
        x,
        x if residual is None else residual,
        weight,
        normed,
        summed,
        rows,
        hidden_size,
        eps,
        ROWS=rows_per_program,
        ADD=residual is not None,
        num_warps=num_warps,
    )


def silu_and_mul(gate_up: Tensor, out: Tensor, block: int = 2048, num_warps: int = 8) -> None:
    """out [M, N] = silu(gate) * up of gate_up [M, 2 * N]; block divides N."""
    rows, intermediate_size = out.shape
    if intermediate_size % block:
        raise ValueError(f"the block must divide the intermediate size {intermediate_size}, found {block}")
    silu_and_mul_wide_kernel[(rows, intermediate_size // block)](
        gate_up, out, INTERMEDIATE=intermediate_size, BLOCK=block, num_warps=num_warps
    )


def reference_swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """The same in fp32: x [M, K] and gate_up [2 * N, K] of any type to [M, N] fp32."""
    gate, up = (x.float() @ gate_up.float().t()).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
