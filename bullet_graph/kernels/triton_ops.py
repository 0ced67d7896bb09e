"""A layer's operations, and sampling, as launches of the Triton kernels in ``triton_kernels``."""

from collections.abc import Mapping

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bullet_graph.kernels import fp8_kernels, triton_fp8, triton_kernels
from bullet_graph.kernels.communicator import Communicator
from bullet_graph.kernels.few_rows import are_few, few_rows
from bullet_graph.kernels.fp8 import Quantized
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.launch import quick
from bullet_graph.kernels.ops import Experts, HeadNorms, KeysValues, Linear, RowInputs, TorchOps
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.triton_fp8 import can_gate, is_own, matmul_fp8, new_quantized
from bullet_graph.kernels.triton_moe import experts_output

_HEADS_BLOCK = 16
_VOCAB_BLOCK = 4096

FUSED_SWIGLU_MIN_ROWS = 640
"""The fused SwiGLU product is used from this number of rows on.

Measured on an H200 under its power cap with llama-3.1-8b's shapes: a layer takes 6 % less to 0.4 % more time at 640 to
960 rows (`bench/results/h200/fused_swiglu.json`), 3 % less from 1,024 on (`prefill_gemm.json`), and 19 % less to 8 %
more below 640. Other shapes were not measured."""

SWIGLU_TILING: Mapping[str, int] = {
    "BLOCK_M": 128,
    "BLOCK_N": 128,  # columns of gate and of up each
    "BLOCK_K": 64,  # of 16 bits: the widest rows of shared memory that TMA writes
    "GROUP_M": 16,  # tiles above one another, computed before those beside them
    "STAGES": 3,  # of 48 KiB of shared memory each
    "num_warps": 8,
}
"""Layout of the fused product on an SM: the fastest of those measured on an H200."""

_TMA_ALIGNMENT = 8
"""Elements of 16 bits: TMA requires rows that start at multiples of 16 bytes."""


class TritonOps(TorchOps):
    """Triton's kernels; all tensors contiguous, on one device.

    ``gpu`` is for streams that have all of its SMs; without it, no kernel runs whose grid is laid out for all SMs.
    Norms with a residual, rotation, quantization and our own products of rows overlap with the launch before.
    """

    def __init__(self, gpu: Gpu | None = None, communicator: Communicator | None = None) -> None:
        super().__init__(communicator)
        self._fused_swiglu_sms = gpu.num_sms if gpu is not None and gpu.is_hopper else 0

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, summed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, hidden_size = x.shape
        normed = torch.empty_like(x)
        summed = torch.empty_like(x) if summed is None else summed
        if rows:
            quick(triton_kernels.add_rms_norm_kernel)[(rows,)](
                x, residual, weight, normed, summed, hidden_size, eps, **_row_layout(hidden_size)
            )
        return normed, summed

    def add_rms_norm_quantized(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, summed: Tensor | None = None
    ) -> tuple[Quantized, Tensor]:
        rows, hidden_size = x.shape
        out, sizes = new_quantized(x, rows, hidden_size, group)
        summed = torch.empty_like(x) if summed is None else summed
        if rows:
            quick(fp8_kernels.add_rms_norm_quantize_kernel)[(rows,)](
                x, residual, weight, out.values, out.scales, summed, hidden_size, eps, **sizes
            )
        return out, summed

    def quantize(self, x: Tensor, group: int) -> Quantized:
        return triton_fp8.quantize(x, group)

    @staticmethod
    def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
        rows, width = x.shape
        if rows:
            quick(triton_kernels.rms_norm_kernel)[(rows,)](x, weight, width, x.stride(0), eps, **_row_layout(width))

    def linear(self, x: Tensor | Quantized, linear: Linear, out: Tensor | None = None) -> Tensor:
        if isinstance(x, Quantized) and is_own(x, linear):
            return matmul_fp8(x, linear, out)
        return few_rows(x, linear, out) if are_few(x, linear) else super().linear(x, linear, out)

    @staticmethod
    def group_for(linear: Linear, _x: Tensor | Quantized) -> int | None:
        return None if are_few(_x, linear) else linear.group

    @staticmethod
    def act_and_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
        rows, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, intermediate_size)
        block = min(triton.next_power_of_2(intermediate_size), 2048)
        quick(triton_kernels.act_and_mul_kernel)[(rows, triton.cdiv(intermediate_size, block))](
            gate_up, out, intermediate_size, GELU=gelu, BLOCK=block
        )
        return out

    def act_and_mul_quantized(self, gate_up: Tensor, gelu: bool, group: int) -> Quantized:
        rows, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
        out, sizes = new_quantized(gate_up, rows, intermediate_size, group)
        if rows:
            quick(fp8_kernels.act_and_mul_quantize_kernel)[(rows,)](
                gate_up, out.values, out.scales, intermediate_size, GELU=gelu, **sizes
            )
        return out

    def glu(
        self, x: Tensor | Quantized, gate_up: Linear, gelu: bool = False, group: int | None = None
    ) -> Tensor | Quantized:
        # One row, few rows of small weights, and many rows on Hopper take one launch, which rounds once.
        if group is None and are_few(x, gate_up):
            return few_rows(x, gate_up, glu=2 if gelu else 1)
        if isinstance(x, Quantized) and can_gate(x, gate_up):
            gated = matmul_fp8(x, gate_up, glu=2 if gelu else 1)
            return gated if group is None else self.quantize(gated, group)
        fused = self._fused_swiglu_sms and len(x) >= FUSED_SWIGLU_MIN_ROWS and not gelu
        if fused and group is None and isinstance(x, Tensor) and can_fuse(x, gate_up.weight):
            return swiglu_matmul(x, gate_up.weight, num_sms=self._fused_swiglu_sms)
        return super().glu(x, gate_up, gelu, group)

    def experts(self, x: Tensor, experts: Experts) -> Tensor:
        return experts_output(x, self.linear(x, experts.router), experts)

    def rope_and_cache(
        self, qkv: Tensor, inputs: RowInputs, cache: KeysValues, norms: HeadNorms | None, out: Tensor | None = None
    ) -> Tensor:
        num_kv_heads, head_dim = cache[0].shape[2:]
        rows, heads = len(qkv), qkv.shape[1] // head_dim
        num_heads = heads - 2 * num_kv_heads
        q = qkv.new_empty(rows, num_heads, head_dim) if out is None else out
        quick(triton_kernels.rope_and_cache_kernel)[(rows, triton.cdiv(heads, _HEADS_BLOCK))](
            *(qkv, inputs.positions, inputs.kv_slots, inputs.cos_sin),
            *((None, None) if norms is None else (norms.q, norms.k)),
            *(q, *cache, 0.0 if norms is None else norms.eps),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HEADS_BLOCK=_HEADS_BLOCK,
        )
        return q


def _row_layout(width: int) -> dict[str, int]:
    """A row a program."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def can_fuse(x: Tensor, gate_up_weight: Tensor) -> bool:
    """Whether :func:`swiglu_matmul` takes these: 16-bit dtypes, hidden and intermediate size multiples of 8."""
    aligned = x.shape[1] % _TMA_ALIGNMENT == 0 and gate_up_weight.shape[0] % (2 * _TMA_ALIGNMENT) == 0
    return aligned and x.dtype == gate_up_weight.dtype and x.dtype in (torch.bfloat16, torch.float16)


def swiglu_matmul(
    x: Tensor, gate_up: Tensor, out: Tensor | None = None, *, num_sms: int, tiling: Mapping[str, int] = SWIGLU_TILING
) -> Tensor:
    """SwiGLU of x @ gate_up.T on Hopper: summed and multiplied in float32, rounded once. Needs :func:`can_fuse`.

    The [rows, 2 * intermediate_size] array between the two steps is never written. The descriptors that TMA needs are
    made on the host and travel with the launch's arguments, so a captured launch holds while its tensors stay in place.

    ``x`` is [rows, hidden_size] not empty, ``gate_up`` [2 * intermediate_size, hidden_size]: gate's
    rows, then up's. The result [rows, intermediate_size] goes into ``out`` or new memory. All are contiguous.
    """
    (rows, hidden_size), intermediate_size = x.shape, len(gate_up) // 2
    out = x.new_empty(rows, intermediate_size) if out is None else out
    block_m, block_n, block_k = (tiling[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    num_tiles = triton.cdiv(rows, block_m) * triton.cdiv(intermediate_size, block_n)
    # One program per SM of the device. On a lane with fewer, those that find no room start when others have ended.
    quick(triton_kernels.swiglu_matmul_kernel)[(min(num_sms, num_tiles),)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(gate_up.view(2, intermediate_size, hidden_size), [2, block_n, block_k]),
        TensorDescriptor.from_tensor(out, [block_m, block_n]),
        *(rows, intermediate_size, hidden_size),
        **tiling,
    )
    return out


def sample(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """As :func:`bullet_graph.kernels.sampler.sample`; ``slots`` and ``positions`` are int32."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        # A launch for rows with adjusted logits; it exits at once where there are none, and costs other rows nothing.
        for adjusted in (True, False):
            quick(triton_kernels.sample_kernel)[(rows,)](
                *(logits, slots, positions, state.settings, state.adjustments, state.last_token),
                *(out, vocab_size, logits.stride(0), state.adjustments.stride(0)),
                BLOCK=min(_VOCAB_BLOCK, triton.next_power_of_2(vocab_size)),
                ADJUSTED=adjusted,
                num_warps=8,
            )
    return out
