"""Triton kernels that quantize activations to FP8, and products of FP8 and of few rows.

``fp8`` computes the same in plain torch. A row's columns form groups, which have a scale each: one group of all
columns, or groups of 128.
"""

import triton
import triton.language as tl

from bullet_graph.kernels import fp8
from bullet_graph.kernels.triton_kernels import act_and_mul, gated, rms_norm, wait_for_earlier

_MAX = tl.constexpr(fp8.FP8_MAX)
_LEAST_AMAX = tl.constexpr(fp8.LEAST_AMAX)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def fp8_to_half(x):
    """FP8 as fp16, exactly, two numbers an instruction: decode attention is faster than with Triton's own conversion
    (bench/LOG.md)."""
    if _IS_INTERPRETED:
        return x.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            constraints="=r,=r,r",
            args=[x.to(tl.uint8, bitcast=True)],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def _store_quantized(x, values_ptr, scales_ptr, row, columns, width, GROUP: tl.constexpr):
    """Write a row, [groups, GROUP], in FP8, and its scales."""
    num_groups = tl.cdiv(width, GROUP)
    wide = x.to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(wide), axis=1), _LEAST_AMAX) / _MAX
    values = tl.minimum(tl.maximum(wide * (1.0 / scales)[:, None], -_MAX), _MAX)
    tl.store(values_ptr + row * width + columns, values.to(tl.float8e4nv), mask=columns < width)
    groups = tl.arange(0, x.shape[0])
    tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)


@triton.jit
def _columns(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    return tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def quantize_kernel(x_ptr, values_ptr, scales_ptr, width, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = _columns(BLOCK, GROUP)
    wait_for_earlier(PDL)
    x = tl.load(x_ptr + row * width + columns, mask=columns < width, other=0.0)
    _store_quantized(x, values_ptr, scales_ptr, row, columns, width, GROUP)


@triton.jit
def add_rms_norm_quantize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    values_ptr,
    scales_ptr,
    summed_ptr,
    hidden_size,
    eps,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program, as ``add_rms_norm_kernel``, with the same roundings before the last."""
    row = tl.program_id(0).to(tl.int64)
    columns = _columns(BLOCK, GROUP)
    inside = columns < hidden_size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    x = tl.load(x_ptr + row * hidden_size + columns, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * hidden_size + columns, mask=inside, other=0.0)
    summed = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(summed_ptr + row * hidden_size + columns, summed, mask=inside)
    normed = rms_norm(summed, weight, hidden_size, eps)
    _store_quantized(normed, values_ptr, scales_ptr, row, columns, hidden_size, GROUP)


@triton.jit
def act_and_mul_quantize_kernel(
    x_ptr, out_ptr, scales_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr
):
    """One row a program, as ``act_and_mul_kernel``, with the same rounding before the last."""
    row = tl.program_id(0).to(tl.int64)
    columns = _columns(BLOCK, GROUP)
    inside = columns < width
    wait_for_earlier(PDL)
    out = act_and_mul(x_ptr + row * 2 * width, width, columns, inside, GELU)
    _store_quantized(out, out_ptr, scales_ptr, row, columns, width, GROUP)


# The number of rows changes with every chunk: no value of it may be compiled for anew.
@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x @ weight^T + bias, a tile of BLOCK_M rows and BLOCK_N features a program, in FP8 or 16 bits.

    The weights are the left operand: the tensor cores take at least 16 rows there, but as few as 8 columns on the
    right. With scales, GROUP columns of x, and of CHANNELS rows of weights, share one; GROUP 0: all columns. A group is
    a multiple of BLOCK_K columns, CHANNELS one of BLOCK_N or 1. GLU is 1 for SwiGLU, 2 for GeGLU, else 0. With it, a
    tile alternates eight features of gate and the eight of up for the same columns: so one thread holds both.
    """
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tile_m, tile_n = tl.program_id(0) % num_tiles_m, tl.program_id(0) // num_tiles_m
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    alternate = columns // 16 * 8 + columns % 8 + columns // 8 % 2 * (OUT_FEATURES // 2)
    features = alternate if GLU > 0 else columns
    lanes = tl.arange(0, BLOCK_K)
    NUM_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP if GROUP > 0 else 1
    # Beyond the last feature the first are computed again; rows are masked: all programs would read them.
    is_row = (rows < num_rows)[:, None]
    some_rows, some_features = rows % num_rows, features % OUT_FEATURES
    x_at = x_ptr + some_rows.to(tl.int64)[:, None] * IN_FEATURES + lanes[None, :]
    weight_at = weight_ptr + some_features.to(tl.int64)[:, None] * IN_FEATURES + lanes[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    wait_for_earlier(PDL)
    for start in tl.range(0, IN_FEATURES, BLOCK_K, num_stages=STAGES):
        if IN_FEATURES % BLOCK_K == 0:
            x, weight = tl.load(x_at + start, is_row, other=0.0), tl.load(weight_at + start)
        else:
            is_inside = (lanes < IN_FEATURES - start)[None, :]
            x = tl.load(x_at + start, is_inside & is_row, other=0.0)
            weight = tl.load(weight_at + start, is_inside, other=0.0)
        if GROUP > 0:
            x_scale = tl.load(x_scales_ptr + some_rows * NUM_GROUPS + start // GROUP)
            scale = tl.load(scale_ptr + some_features // CHANNELS * NUM_GROUPS + start // GROUP)
            acc += tl.dot(weight, x.T) * scale[:, None] * x_scale[None, :]
        else:
            acc = tl.dot(weight, x.T, acc)
    if GROUP == 0 and scale_ptr is not None:
        acc *= tl.load(scale_ptr + some_features // CHANNELS)[:, None] * tl.load(x_scales_ptr + some_rows)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + some_features).to(tl.float32)[:, None]
    WIDTH: tl.constexpr = OUT_FEATURES // 2 if GLU > 0 else OUT_FEATURES
    if GLU > 0:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
        acc = tl.reshape(gated(gate, up, GLU == 2), (BLOCK_N // 2, BLOCK_M))
        columns = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = out_ptr + rows.to(tl.int64)[None, :] * WIDTH + columns[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), (rows < num_rows)[None, :] & (columns < WIDTH)[:, None])
