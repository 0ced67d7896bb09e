"""A mixture of experts as launches of the Triton kernels in ``moe_kernels``; the host reads nothing back.

There are five, and with FP8 two more, which quantize what the products take.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
from torch import Tensor

from bullet_graph.kernels import moe_kernels
from bullet_graph.kernels.launch import quick
from bullet_graph.kernels.ops import Experts, Linear
from bullet_graph.kernels.triton_fp8 import quantize
from bullet_graph.perf.roofline import FP8_BLOCK

Tiling = Mapping[str, int]
Tilings = tuple[tuple[float, Tiling, Tiling], ...]
"""Up to a mean number of rows per expert: layouts of the products gate_up and down, of one BLOCK_M."""

_ROUTED_ROWS = 16
"""Rows of a program that routes or sorts."""
_COUNTS = 8192
"""Counts that a program of the sort reads at a time."""
_COMBINE_BLOCK = 1024


def _tiling(m: int, n: int, k: int, stages: int, num_warps: int) -> Tiling:
    tiling = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "STAGES": stages, "num_warps": num_warps}
    return MappingProxyType(tiling)


TILINGS: Tilings = (
    # Few rows: the weights' stream decides, so many programs with narrow tiles and long loads.
    (8, _tiling(16, 64, 128, 4, 4), _tiling(16, 64, 128, 4, 4)),
    (24, _tiling(32, 64, 128, 3, 4), _tiling(32, 64, 128, 4, 4)),
    (48, _tiling(64, 64, 64, 3, 4), _tiling(64, 128, 64, 4, 4)),
    (128, _tiling(64, 128, 64, 4, 8), _tiling(64, 128, 64, 3, 4)),
    (float("inf"), _tiling(128, 128, 64, 4, 8), _tiling(128, 128, 64, 3, 8)),
)
"""The fastest of those measured on an H200 with qwen3-30b-a3b's shapes (bench/LOG.md); of gate and up each, a tile has
BLOCK_N columns."""

FP8_TILINGS: Tilings = (
    (8, _tiling(16, 64, 128, 5, 8), _tiling(16, 64, 128, 4, 4)),
    (24, _tiling(32, 64, 128, 3, 4), _tiling(32, 64, 128, 4, 4)),
    (48, _tiling(64, 64, 128, 3, 4), _tiling(64, 128, 128, 3, 8)),
    (float("inf"), _tiling(128, 128, 128, 4, 8), _tiling(128, 128, 128, 3, 8)),
)
"""Those of products in FP8: a step takes the columns that share a scale."""


def experts_output(x: Tensor, logits: Tensor, experts: Experts, tilings: Tilings | None = None) -> Tensor:
    """As :meth:`TorchOps.experts`, from the router's logits [rows, num_experts]; all contiguous, rows at least 1.

    Grids and buffers have the most programs and rows that any routing needs, so that a captured launch holds for all.
    A row's result depends on no other row, but for the layout that the number of rows chooses.
    """
    (rows, hidden_size), top_k = x.shape, experts.top_k
    num_experts, intermediate_size = logits.shape[1], experts.down.weight.shape[2]
    # Blocks of experts on other ranks exit at once. Where there are none, the kernels have no code for it.
    own = {"FIRST": experts.first, "OWN": len(experts.down.weight) if len(experts.down.weight) < num_experts else 0}
    num_pairs = rows * top_k
    mean_rows = num_pairs / num_experts

    some = tilings or (TILINGS if experts.gate_up.scale is None else FP8_TILINGS)
    _, gate_up_tiling, down_tiling = next(each for each in some if mean_rows <= each[0])
    block_m = gate_up_tiling["BLOCK_M"]
    # Every expert's last block may hold a single pair.
    max_blocks = (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m

    width, num_programs = max(triton.next_power_of_2(num_experts), 16), triton.cdiv(rows, _ROUTED_ROWS)
    weights = x.new_empty(num_pairs, dtype=torch.float32)
    # Each begins at a multiple of 16 bytes: for others, Triton would compile the kernels anew.
    sizes = [num_programs * width, *[-(-size // 4) * 4 for size in (num_pairs, num_pairs, 3 * max_blocks)]]
    counts, chosen, pairs, blocks = x.new_empty(sum(sizes), dtype=torch.int32).split(sizes)
    shared = {"TOP_K": top_k, "ROWS": _ROUTED_ROWS, "EXPERTS": width}
    quick(moe_kernels.route_kernel)[(num_programs,)](
        logits, weights, chosen, counts, rows, NUM_EXPERTS=num_experts, RENORMALIZE=experts.renormalize, **shared
    )
    quick(moe_kernels.sort_kernel)[(num_programs,)](
        *(chosen, counts, pairs, blocks, rows, num_programs, max_blocks),
        BLOCK_M=block_m,
        CHUNK=max(_COUNTS // width, 1),
        **shared,
    )

    def product(source: Tensor, linear: Linear, columns: int, tiling: Tiling, *, glu: bool) -> Tensor:
        weight, _, scale, group = linear
        depth, channels, scales = source.shape[1], 0, None
        if scale is not None and group is not None:
            # As many scales as channels: each is of all columns.
            channels, group = (1, 0) if scale.shape[1] == weight.shape[1] else (FP8_BLOCK, group)
            source, scales, _ = quantize(source, group or depth)
        out = x.new_empty(num_pairs, columns)
        quick(moe_kernels.grouped_matmul_kernel)[(max_blocks * triton.cdiv(columns, tiling["BLOCK_N"]),)](
            *(source, scales, weight, scale, blocks, pairs, weights, out, max_blocks),
            COLUMNS=columns,
            DEPTH=depth,
            TOP_K=top_k,
            GLU=glu,
            GROUP=group or 0,
            CHANNELS=channels,
            **own,
            **tiling,
        )
        return out

    activated = product(x, experts.gate_up, intermediate_size, gate_up_tiling, glu=True)
    outputs = product(activated, experts.down, hidden_size, down_tiling, glu=False)
    out = torch.empty_like(x)
    block = min(triton.next_power_of_2(hidden_size), _COMBINE_BLOCK)
    quick(moe_kernels.combine_kernel)[(rows, triton.cdiv(hidden_size, block))](
        outputs, chosen, out, COLUMNS=hidden_size, TOP_K=top_k, BLOCK=block, **own
    )
    return out
