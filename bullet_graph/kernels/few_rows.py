"""Products of few rows, by Triton kernels that stream the weights. Beside FP8 weights, too, one row keeps 16 bits."""

from typing import TypeGuard

import triton
import triton.language as tl
from torch import Tensor

from bullet_graph.kernels.fp8 import Quantized
from bullet_graph.kernels.fp8_kernels import fp8_to_half, matmul_kernel
from bullet_graph.kernels.launch import quick
from bullet_graph.kernels.ops import Linear
from bullet_graph.kernels.triton_kernels import gated, wait_for_earlier
from bullet_graph.perf.roofline import FP8_BLOCK

FEW_ROWS = 8
"""Most rows that these kernels take: the columns of a tensor core's tile."""
_LEAST_BLOCK, _MOST_BLOCK = 128, 2048  # columns that a program reads at once, a power of two
_MOST_BYTES = 2**24
"""From two rows on, torch takes larger 16-bit weights, with 2 to 7 % less energy (H200, bench/LOG.md)."""


def are_few(x: Tensor | Quantized, linear: Linear) -> TypeGuard[Tensor]:
    """Whether x are rows that :func:`few_rows` takes: the columns must be whole blocks.

    Beside FP8 weights, and 16-bit weights above 16 MiB, it takes one row.
    """
    if not isinstance(x, Tensor) or not 0 < len(x) <= FEW_ROWS or linear.weight.shape[1] % _LEAST_BLOCK:
        return False
    return len(x) == 1 or (linear.scale is None and x.element_size() == 2 and linear.weight.nbytes <= _MOST_BYTES)


def few_rows(x: Tensor, linear: Linear, out: Tensor | None = None, *, glu: int = 0) -> Tensor:
    """Project rows [rows, in_features] in 16 bits into ``out`` [rows, out_features] or new memory.

    With ``glu``, outputs are gate's, then up's, and the result is silu(gate) * up (1) or gelu(gate) * up (2), [rows,
    out_features / 2], rounded once. Needs :func:`are_few`.
    """
    weight, bias, scale, _ = linear
    rows, (out_features, in_features) = len(x), weight.shape
    if out is None:
        out = x.new_empty(rows, out_features // 2 if glu else out_features)
    sizes = {"OUT_FEATURES": out_features, "IN_FEATURES": in_features, "GLU": glu}
    most = in_features & -in_features
    if rows > 1:
        quick(matmul_kernel)[(triton.cdiv(out_features, 32),)](
            *(x, None, weight, None, bias, out, rows),
            **sizes,
            BLOCK_M=FEW_ROWS,
            BLOCK_N=32,
            BLOCK_K=min(256, most),
            GROUP=0,
            CHANNELS=1,
            STAGES=4,
            num_warps=2,
        )
        return out
    # Two outputs share the row's conversion to float32 (bench/LOG.md).
    features = 1 if out_features % 2 else 2
    quick(one_row_kernel)[(out_features // features,)](
        *(x, weight, scale, bias, out),
        **sizes,
        CHANNELS=0 if scale is None else 1 if len(scale) == out_features else FP8_BLOCK,
        BLOCK=min(most, _MOST_BLOCK),
        FEATURES=features,
        num_warps=4,
    )
    return out


@triton.jit
def one_row_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    GLU: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    """FEATURES outputs a program: the products of one row with so many rows of the weights, read past the L2.

    CHANNELS rows of weights share a scale: 0 none, 1 a scale for a row, more for as many columns, too. With GLU, every
    other feature is up's, beside gate's of the same column.
    """
    first = tl.program_id(0).to(tl.int64) * FEATURES
    each = tl.arange(0, FEATURES)
    features = first // 2 + each // 2 + each % 2 * (OUT_FEATURES // 2) if GLU > 0 else first + each
    lanes = tl.arange(0, BLOCK)
    rows = weight_ptr + features[:, None] * IN_FEATURES + lanes[None, :]
    wait_for_earlier(PDL)
    total = tl.zeros((FEATURES, BLOCK), tl.float32)
    for start in range(0, IN_FEATURES, BLOCK):
        weights = tl.load(rows + start, eviction_policy="evict_first")
        if weights.dtype == tl.float8e4nv:
            # A thread loads 16 weights at once, but 8 elements of x. Two loads give it those of its weights; else they
            # would pass through shared memory (bench/LOG.md).
            at = x_ptr + start + tl.arange(0, BLOCK // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
            x = tl.reshape(tl.permute(tl.join(tl.load(at), tl.load(at + 8)), (0, 2, 1)), (BLOCK,))
            weights = fp8_to_half(weights)
        else:
            x = tl.load(x_ptr + start + lanes)
        products = weights.to(tl.float32) * x.to(tl.float32)[None, :]
        if CHANNELS > 1:
            scales = scale_ptr + features // CHANNELS * tl.cdiv(IN_FEATURES, CHANNELS)
            products *= tl.load(scales[:, None] + ((start + lanes) // CHANNELS)[None, :])
        total += products
    out = tl.sum(total, axis=1)
    if CHANNELS == 1:
        out *= tl.load(scale_ptr + features)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + features).to(tl.float32)
    if GLU > 0:
        gate, up = tl.split(tl.reshape(out, (FEATURES // 2, 2)))
        tl.store(
            out_ptr + first // 2 + tl.arange(0, FEATURES // 2), gated(gate, up, GLU == 2).to(out_ptr.dtype.element_ty)
        )
    else:
        tl.store(out_ptr + features, out.to(out_ptr.dtype.element_ty))
