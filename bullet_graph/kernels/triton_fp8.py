"""Quantized rows and products of FP8, as launches of the Triton kernels in ``fp8_kernels``."""

import torch
import triton
from torch import Tensor

from bullet_graph.kernels import fp8_kernels
from bullet_graph.kernels.fp8 import FP8, Quantized
from bullet_graph.kernels.launch import quick
from bullet_graph.kernels.ops import Linear
from bullet_graph.perf.roofline import FP8_BLOCK

_MOST_OWN_ROWS, _OWN_OUTPUTS = 256, 2**21
"""The Triton product is used up to so many rows and below so many outputs.

Measured on an H200 with llama-3.1-8b's shapes (bench/LOG.md): 64 rows of down take 20 instead of 37 µs."""
_MOST_GATED_ROWS = 64
"""With 128 × 128 blocks of scales, SwiGLU in the product saves 4 to 13 % at 16 and 64 rows, and costs 12 to 21 % from
300 on (H200, bench/LOG.md). Not measured: 65 to 299 rows, and more than 64 with scales of channels."""
_WIDE = 16384
"""From so many output features on, there are tiles enough for all SMs."""
_SMS = 132
"""Of an H100 or H200. Where tiles of 64 features are more, larger ones are faster: qkv, 256 rows 14.8, not 20.7 µs."""


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
        "num_warps": min(max(block // 512, 1), 32),
    }


def quantize(x: Tensor, group: int) -> Quantized:
    """See :func:`bullet_graph.kernels.fp8.quantize`."""
    rows, width = x.shape
    out, sizes = new_quantized(x, rows, width, group)
    if rows:
        quick(fp8_kernels.quantize_kernel)[(rows,)](x, out.values, out.scales, width, **sizes)
    return out


def can_gate(x: Quantized, gate_up: Linear) -> bool:
    """Whether the product should compute SwiGLU, too: :func:`is_own` holds, and there are few rows."""
    return len(x.values) <= _MOST_GATED_ROWS and is_own(x, gate_up)


def is_own(x: Quantized, linear: Linear) -> bool:
    """Whether :func:`matmul_fp8` is to be used, and not torch's product, for this number of rows and these scales."""
    assert linear.scale is not None
    rows, out_features = len(x.values), len(linear.weight)
    # torch's kernels for blocks want scales in other orders.
    return (rows <= _MOST_OWN_ROWS and rows * out_features < _OWN_OUTPUTS) or len(linear.scale) != out_features


def matmul_fp8(x: Quantized, linear: Linear, out: Tensor | None = None, *, glu: int = 0) -> Tensor:
    """As :func:`bullet_graph.kernels.fp8.linear_fp8`, by a Triton kernel; ``glu`` as in :func:`few_rows`."""
    weight, bias, scale, _ = linear
    assert scale is not None
    rows, (out_features, in_features) = len(x.values), weight.shape
    if out is None:
        out = x.values.new_empty(rows, out_features // 2 if glu else out_features, dtype=x.dtype)
    is_row_wise = len(scale) == out_features
    block_m = min(max(triton.next_power_of_2(rows), 16), 128)
    if block_m == 128 and (not is_row_wise or out_features >= _WIDE):
        block_n, block_k, stages, num_warps = 128, 128, 3, 8
    elif out_features >= _WIDE:
        block_n, block_k, stages, num_warps = 64, 128, 3, 4
    elif rows > block_m and triton.cdiv(rows, block_m) * triton.cdiv(out_features, 64) > _SMS:
        block_n, block_k, stages, num_warps = 128, 128, 6, 4
    else:
        # Few programs: each has more of the weights on their way.
        block_n, block_k, stages, num_warps = 64, 256 if is_row_wise else 128, 6 if block_m < 128 else 4, 4
    if tiles := triton.cdiv(rows, block_m) * triton.cdiv(out_features, block_n):
        quick(fp8_kernels.matmul_kernel)[(tiles,)](
            *(x.values, x.scales, weight, scale, bias, out, rows),
            OUT_FEATURES=out_features,
            IN_FEATURES=in_features,
            GLU=glu,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP=0 if is_row_wise else FP8_BLOCK,
            CHANNELS=1 if is_row_wise else FP8_BLOCK,
            STAGES=stages,
            num_warps=num_warps,
        )
    return out
