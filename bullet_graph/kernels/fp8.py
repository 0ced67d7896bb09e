"""FP8 (E4M3) in plain torch: activations and weights with scales, and their product.

A scale is the largest magnitude of what shares it, divided by 448. Weights have a scale for each output channel, or for
each 128 × 128 block. Activations are quantized when they are computed, with a scale for each token, or for each token
and 128 columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bullet_graph.perf.roofline import FP8_BLOCK

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite number of the format."""
LEAST_AMAX = 1e-10
"""Zeros have this magnitude at least, or their scale would divide by zero."""

_EMULATED_CHANNELS = 1024
"""Output channels of a product that are emulated at once, a multiple of the block: their weights become float32."""


class Quantized(NamedTuple):
    """Rows in FP8: values [rows, width] and float32 scales [rows, ceil(width / group)]; ``dtype`` is what they were."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    def rows(self, at: Tensor) -> "Quantized":
        """Copies of the rows with these indices."""
        return Quantized(self.values[at], self.scales[at], self.dtype)


def quantize(x: Tensor, group: int) -> Quantized:
    """Quantize rows [rows, width]; ``group`` columns share a scale."""
    groups = pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    scales = groups.abs().amax(-1).clamp_min(LEAST_AMAX) / FP8_MAX
    return Quantized(saturated(groups / scales[..., None]).flatten(1)[:, : x.shape[1]].contiguous(), scales, x.dtype)


def quantize_weight(weight: Tensor, *, blocks: bool) -> tuple[Tensor, Tensor]:
    """FP8 values [out, in] and scales: [out, 1], or [ceil(out / 128), ceil(in / 128)] with ``blocks``."""
    if not blocks:
        return quantize(weight, weight.shape[1])[:2]
    (rows, columns), size = weight.shape, FP8_BLOCK
    tiles = pad(weight.float(), (0, -columns % size, 0, -rows % size)).unflatten(1, (-1, size)).unflatten(0, (-1, size))
    scales = tiles.abs().amax((1, 3)).clamp_min(LEAST_AMAX) / FP8_MAX
    return saturated(tiles / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def saturated(x: Tensor) -> Tensor:
    """Round to FP8; what is beyond its range becomes its largest number."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dequantize_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """Weights [out, in] in float32."""
    if len(scale) != len(weight):
        scale = scale.repeat_interleave(FP8_BLOCK, 0)[: len(weight)]
        scale = scale.repeat_interleave(FP8_BLOCK, 1)[:, : weight.shape[1]]
    return weight.float() * scale


def linear_fp8(x: Quantized, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x.dtype, [rows, out]: on a GPU, bfloat16 and scales of channels have torch's kernel.

    All else is emulated: the same operands are summed in float32.
    """
    if weight.is_cuda and x.dtype is torch.bfloat16 and len(scale) == len(weight):
        result: Tensor = torch._scaled_mm(
            *(x.values, weight.t(), x.scales, scale.t()), out_dtype=x.dtype, use_fast_accum=True, out=out
        )
        # cuBLAS refuses a bias beside scales of channels for some shapes (CUBLAS_STATUS_NOT_SUPPORTED).
        return result if bias is None else result.add_(bias)
    wide = _dequantized(x)
    of_scale = _EMULATED_CHANNELS if len(scale) == len(weight) else _EMULATED_CHANNELS // FP8_BLOCK
    parts = zip(weight.split(_EMULATED_CHANNELS), scale.split(of_scale), strict=True)
    result = torch.cat([wide @ dequantize_weight(*part).t() for part in parts], dim=1)
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype) if out is None else out.copy_(result)


def _dequantized(x: Quantized) -> Tensor:
    scales = x.scales
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(FP8_BLOCK, 1)[:, : x.values.shape[1]]
    return x.values.float() * scales
