"""Quantized rows and products of FP8, as launches of the Triton kernels in ``fp8_kernels``."""

import torch
import triton
from torch import Tensor

from bullet_graph.kernels import fp8_kernels
from bullet_graph.kernels.fp8 import FP8, Quantized
from bullet_graph.kernels.ops import Linear, TorchOps
from bullet_graph.perf.roofline import FP8_BLOCK

GEMV_BLOCK = 4096
GEMV_LEAST_BLOCK = 128


def new_quantized(like: Tensor, rows: int, width: int, group: int) -> tuple[Quantized, dict[str, int]]:
    """Memory for quantized rows, and the layout of the kernel that writes them, a row a program."""
    out = Quantized(
        like.new_empty(rows, width, dtype=FP8),
        like.new_empty(rows, triton.cdiv(width, group), dtype=torch.float32),
        like.dtype,
    )
    block = triton.next_power_of_2(max(width, group))
    return out, {
        "BLOCK": block,
        "GROUP": min(block, triton.next_power_of_2(group)),
        "num_warps": min(max(block // 512, 1), 16),
    }


def quantize(x: Tensor, group: int) -> Quantized:
    """See :func:`bullet_graph.kernels.fp8.quantize`."""
    rows, width = x.shape
    out, sizes = new_quantized(x, rows, width, group)
    if rows:
        fp8_kernels.quantize_kernel[(rows,)](x, out.values, out.scales, width, **sizes)
    return out


def linear_fp8(x: Quantized, linear: Linear, scale: Tensor, out: Tensor | None) -> Tensor:
    """The product for this number of rows and these scales."""
    weight, bias, _, group = linear
    assert group is not None
    out_features, in_features = weight.shape
    channels = 1 if len(scale) == out_features else FP8_BLOCK
    block = min(in_features & -in_features, GEMV_BLOCK)
    if len(x.values) == 1 and block >= GEMV_LEAST_BLOCK:
        if out is None:
            out = x.values.new_empty(1, out_features, dtype=x.dtype)
        fp8_kernels.gemv_fp8_kernel[(out_features,)](
            *(x.values, x.scales, weight, scale, bias, out),
            IN_FEATURES=in_features,
            HAS_BIAS=bias is not None,
            BLOCK=block,
            GROUP=group,
            CHANNELS=channels,
            num_warps=4,
        )
        return out
    if channels == 1:
        return TorchOps.linear(x, linear, out)
    # torch's kernels for blocks want scales in other orders.
    return matmul_fp8(x, linear, out)


def matmul_fp8(x: Quantized, linear: Linear, out: Tensor | None = None, *, splits: int = 1) -> Tensor:
    """As :func:`bullet_graph.kernels.fp8.linear_fp8`, by a Triton kernel that divides columns among ``splits``.

    Splits fill the SMs where tiles of the output are few. Their sums are added in one order, so results repeat.
    """
    weight, bias, scale, _ = linear
    assert scale is not None
    rows, (out_features, in_features) = len(x.values), weight.shape
    is_row_wise = len(scale) == out_features
    if splits > 1:
        target = x.values.new_empty(splits, rows, out_features, dtype=torch.float32)
    else:
        target = x.values.new_empty(rows, out_features, dtype=x.dtype) if out is None else out
    tile_m = min(max(triton.next_power_of_2(rows), 16), 128)
    tiles = triton.cdiv(rows, tile_m) * triton.cdiv(out_features, 128)
    if tiles:
        fp8_kernels.matmul_fp8_kernel[(tiles, splits)](
            *(x.values, x.scales, weight, scale, bias, target, rows, out_features, in_features),
            HAS_BIAS=bias is not None,
            BLOCK_M=tile_m,
            BLOCK_N=128,
            BLOCK_K=128,
            GROUP=0 if is_row_wise else FP8_BLOCK,
            CHANNELS=1 if is_row_wise else FP8_BLOCK,
            STAGES=4 if tile_m <= 64 else 3,
            num_warps=4 if tile_m <= 64 else 8,
        )
    if splits == 1:
        return target
    return target.sum(0).to(x.dtype) if out is None else out.copy_(target.sum(0))
