"""The steps of a layer, and sampling, as Triton launches: the GPU's."""

import torch
import triton
from torch import Tensor

from bullet_graph.models import ops
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.ops import RowInputs
from bullet_graph.models.sampler import MASKED_IDS_COLUMN, SETTINGS_COLUMNS, SamplingState
from bullet_graph.models.triton_gemm import FUSED_SWIGLU_MIN_ROWS, can_fuse, swiglu_matmul
from bullet_graph.models.triton_kernels import (
    add_rms_norm_kernel,
    gemv_kernel,
    rope_and_cache_kernel,
    sample_kernel,
    silu_and_mul_kernel,
)
from bullet_graph.models.weights import LayerWeights
from bullet_graph.sampling_params import MAX_MASKED_TOKEN_IDS

_HEADS_BLOCK = 16
_VOCAB_BLOCK = 4096
_GEMV_BLOCK = 4096
_GEMV_LEAST_BLOCK = 128


class TritonOps:
    """See :class:`~bullet_graph.models.ops.LayerOps`; all tensors contiguous, on one device."""

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, summed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :func:`~bullet_graph.models.ops.add_rms_norm`."""
        rows, hidden_size = x.shape
        normed = torch.empty_like(x)
        summed = torch.empty_like(x) if summed is None else summed
        if rows:
            block = triton.next_power_of_2(hidden_size)
            add_rms_norm_kernel[(rows,)](
                x,
                residual,
                weight,
                normed,
                summed,
                hidden_size,
                eps,
                BLOCK=block,
                num_warps=_norm_warps(block),
            )
        return normed, summed

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """See :func:`~bullet_graph.models.ops.linear`; one row has a kernel of its own."""
        out_features, in_features = weight.shape
        block = min(in_features & -in_features, _GEMV_BLOCK)  # the largest power of two that divides it
        if len(x) != 1 or block < _GEMV_LEAST_BLOCK:
            return ops.linear(x, weight, bias, out)
        if out is None:
            out = x.new_empty(1, out_features)
        gemv_kernel[(out_features,)](
            x, weight, bias, out, IN_FEATURES=in_features, HAS_BIAS=bias is not None, BLOCK=block, num_warps=4
        )
        return out

    @staticmethod
    def silu_and_mul(gate_up: Tensor) -> Tensor:
        """See :func:`~bullet_graph.models.ops.silu_and_mul`."""
        rows, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, intermediate_size)
        block = min(triton.next_power_of_2(intermediate_size), 2048)
        silu_and_mul_kernel[(rows, triton.cdiv(intermediate_size, block))](
            gate_up, out, intermediate_size, BLOCK=block
        )
        return out

    @staticmethod
    def swiglu(x: Tensor, gate_up_weight: Tensor) -> Tensor:
        """See :func:`~bullet_graph.models.ops.swiglu`; many rows on Hopper take one launch, and round once."""
        if len(x) >= FUSED_SWIGLU_MIN_ROWS and can_fuse(x, gate_up_weight):
            return swiglu_matmul(x, gate_up_weight)
        return TritonOps.silu_and_mul(TritonOps.linear(x, gate_up_weight))

    @staticmethod
    def rope_and_cache(
        qkv: Tensor,
        inputs: RowInputs,
        keys: Tensor,
        values: Tensor,
        layer: LayerWeights,
        config: ModelConfig,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`~bullet_graph.models.ops.LayerOps.rope_and_cache`."""
        rows, half = len(qkv), config.head_dim // 2
        q = qkv.new_empty(rows, config.num_heads, config.head_dim) if out is None else out
        heads = config.num_heads + 2 * config.num_kv_heads
        rope_and_cache_kernel[(rows, triton.cdiv(heads, _HEADS_BLOCK))](
            qkv,
            inputs.positions,
            inputs.kv_slots,
            inputs.cos_sin,
            layer.q_norm,
            layer.k_norm,
            q,
            keys,
            values,
            config.rms_norm_eps,
            NUM_HEADS=config.num_heads,
            NUM_KV_HEADS=config.num_kv_heads,
            HALF=half,
            HALF_BLOCK=triton.next_power_of_2(half),
            HEADS_BLOCK=_HEADS_BLOCK,
            QK_NORM=config.qk_norm,
        )
        return q


class PartitionOps(TritonOps):
    """For a lane that has not all SMs: no kernel whose grid is laid out for the device's."""

    @staticmethod
    def swiglu(x: Tensor, gate_up_weight: Tensor) -> Tensor:
        """See :func:`~bullet_graph.models.ops.swiglu`."""
        return TritonOps.silu_and_mul(TritonOps.linear(x, gate_up_weight))


def _norm_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def sample(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """See :func:`bullet_graph.models.sampler.sample`; ``slots`` and ``positions`` are int32."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        sample_kernel[(rows,)](
            logits,
            slots,
            positions,
            state.settings,
            state.last_token,
            out,
            vocab_size,
            logits.stride(0),
            SETTINGS_COLUMNS=SETTINGS_COLUMNS,
            MASKED_COLUMN=MASKED_IDS_COLUMN,
            MASKED_COUNT=MAX_MASKED_TOKEN_IDS,
            BLOCK=min(_VOCAB_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=8,
        )
    return out
