"""The gate and up projections and SwiGLU in one launch, for forwards of many rows on Hopper.

The [rows, 2 * intermediate_size] array between the two steps is never written. The descriptors that TMA needs are
made on the host and travel with the launch's arguments, so a captured launch holds while its tensors stay in place.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bullet_graph.errors import ConfigError
from bullet_graph.models.triton_gemm_kernels import swiglu_matmul_kernel

FUSED_SWIGLU_MIN_ROWS = 640
"""From so many rows on, a layer takes less time or as much, measured on an H200 under its power cap with llama-3.1-8b's
shapes: 6 % less to 0.4 % more at 640 to 960 rows (`bench/results/h200/fused_swiglu.json`), 3 % less from 1,024 on
(`prefill_gemm.json`); below 640, from 19 % less to 8 % more. Other shapes were not measured."""

_HOPPER = (9, 0)
_DTYPES = (torch.bfloat16, torch.float16)
_TMA_ALIGNMENT = 8
"""Elements of 16 bits: TMA wants rows that start at multiples of 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwigluTiling:
    """How the product is laid out on an SM; the defaults were the fastest of those measured on an H200.

    Attributes:
        block_m: rows of an output tile.
        block_n: columns of an output tile: so many of gate, and as many of up.
        block_k: terms of the sums a step, 64 of 16 bits for the widest rows of shared memory that TMA writes.
        group_m: tiles above one another that are computed before those beside them.
        num_stages: steps whose loads are under way or in use: 48 KiB of shared memory each with these blocks.
        num_warps: of a program.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 16
    num_stages: int = 3
    num_warps: int = 8


DEFAULT_TILING = SwigluTiling()


def can_fuse(x: Tensor, gate_up_weight: Tensor) -> bool:
    """Whether :func:`swiglu_matmul` takes these.

    That is: on Hopper, both in bfloat16 or both in float16, hidden and intermediate size multiples of 8.
    """
    aligned = x.shape[1] % _TMA_ALIGNMENT == 0 and gate_up_weight.shape[0] % (2 * _TMA_ALIGNMENT) == 0
    return aligned and x.dtype == gate_up_weight.dtype and x.dtype in _DTYPES and hopper_sms(x.device) > 0


def hopper_sms(device: torch.device) -> int:
    """SMs of a GPU of compute capability 9.0, and 0 of any other device."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    is_hopper = (properties.major, properties.minor) == _HOPPER
    return int(properties.multi_processor_count) if is_hopper else 0


def swiglu_matmul(
    x: Tensor, gate_up_weight: Tensor, out: Tensor | None = None, *, tiling: SwigluTiling = DEFAULT_TILING
) -> Tensor:
    """SwiGLU of x @ gate_up_weight.T: summed and multiplied in float32, rounded once.

    Args:
        x: [rows, hidden_size], contiguous, at least one row.
        gate_up_weight: [2 * intermediate_size, hidden_size], contiguous: gate's rows, then up's.
        out: [rows, intermediate_size], contiguous, where to put the result, or None for new memory.

    Raises:
        ConfigError: :func:`can_fuse` says no.
    """
    if not can_fuse(x, gate_up_weight):
        raise ConfigError(
            "the fused SwiGLU product needs a GPU of compute capability 9.0, bfloat16 or float16, and hidden and "
            f"intermediate sizes that are multiples of {_TMA_ALIGNMENT}; found {x.device}, "
            f"{x.dtype} @ {gate_up_weight.dtype}, hidden size {x.shape[1]} and intermediate size "
            f"{gate_up_weight.shape[0] / 2:g}: project and apply silu_and_mul instead"
        )
    (rows, hidden_size), intermediate_size = x.shape, len(gate_up_weight) // 2
    out = x.new_empty(rows, intermediate_size) if out is None else out
    num_tiles = triton.cdiv(rows, tiling.block_m) * triton.cdiv(intermediate_size, tiling.block_n)
    # One program an SM of the device. On a lane with fewer, those that find no room start when others have ended.
    swiglu_matmul_kernel[(min(hopper_sms(x.device), num_tiles),)](
        TensorDescriptor.from_tensor(x, [tiling.block_m, tiling.block_k]),
        TensorDescriptor.from_tensor(
            gate_up_weight.view(2, intermediate_size, hidden_size), [2, tiling.block_n, tiling.block_k]
        ),
        TensorDescriptor.from_tensor(out, [tiling.block_m, tiling.block_n]),
        rows,
        intermediate_size,
        hidden_size,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP_M=tiling.group_m,
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )
    return out
