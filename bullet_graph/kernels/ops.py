"""A layer's operations but attention in plain torch: on any device, and as torch.compile fuses them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bullet_graph.kernels.communicator import Communicator
from bullet_graph.kernels.fp8 import FP8, Quantized, linear_fp8, quantize, saturated

KeysValues = tuple[Tensor, Tensor]
"""A layer's cache: both are [num_blocks, block_tokens, num_kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs of a forward's rows besides their hidden states.

    ``positions`` [rows] are those of each token in its sequence. Its keys and values go to ``kv_slots`` [rows]: block *
    block_tokens + offset. ``cos_sin`` is [max_model_len, head_dim] float32: cosines, then sines, by position.
    """

    positions: Tensor
    kv_slots: Tensor
    cos_sin: Tensor


# Tuples, which torch.compile and torch.export take as arguments.


class Linear(NamedTuple):
    """A projection, x @ weight.T + bias: weight [out_features, in_features], bias [out_features].

    With a ``scale``, weights are FP8, and so are rows, where :meth:`TorchOps.group_for` says so. ``group`` columns of a
    row then share a scale: all, where ``scale`` is [out_features, 1], or 128, where it is [ceil(out_features / 128),
    ceil(in_features / 128)]. See :mod:`bullet_graph.kernels.fp8`.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    group: int | None = None

    def of_expert(self, index: int) -> "Linear":
        """Views of one expert's projection, where weights and scales of all experts are stacked."""
        return Linear(self.weight[index], None, None if self.scale is None else self.scale[index], self.group)


class HeadNorms(NamedTuple):
    """RMSNorms of queries and of keys: over each head (Qwen3), weights [head_dim], or over all heads together."""

    q: Tensor
    k: Tensor
    eps: float


class Experts(NamedTuple):
    """The routed experts of a layer (Shazeer et al. 2017): each row goes to ``top_k`` of them, by the router.

    ``router`` gives num_experts columns. Weights of all experts are stacked: ``gate_up`` [num_experts, 2 *
    intermediate_size, hidden_size], gate's rows first, ``down`` [num_experts, hidden_size, intermediate_size]. An
    expert's output counts by its softmax over all experts; with ``renormalize``, those of a row's experts add up to 1.
    Scales of FP8 are stacked too; the router has none. Where the router knows more experts than are stacked, these are
    those from ``first`` on, and outputs of the others are left out.
    """

    router: Linear
    gate_up: Linear
    down: Linear
    top_k: int
    renormalize: bool
    first: int = 0


class TorchOps:
    """The reference; Triton's operations derive from it.

    With tensor parallelism, all but the collectives compute a rank's part; without, ``communicator`` is None.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self.communicator = communicator

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up all ranks' tensors, in place."""
        return x if self.communicator is None or not x.numel() else self.communicator.all_reduce(x)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, summed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add the residual, then norm; returns (normed, x + residual), all [rows, hidden_size] and in x's dtype.

        ``summed`` is where to put the sum (may be ``residual``), or None for new memory.
        """
        summed = torch.add(x, residual, out=summed) if summed is not None else x + residual
        return _rms_norm(summed, weight, eps), summed

    def add_rms_norm_quantized(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, summed: Tensor | None = None
    ) -> tuple[Quantized, Tensor]:
        """As :meth:`add_rms_norm`; then quantize the normed rows, ``group`` columns with one scale."""
        normed, summed = self.add_rms_norm(x, residual, weight, eps, summed)
        return quantize(normed, group), summed

    def quantize(self, x: Tensor, group: int) -> Quantized:
        """See :func:`bullet_graph.kernels.fp8.quantize`."""
        return quantize(x, group)

    @staticmethod
    def group_for(linear: Linear, _x: Tensor | Quantized) -> int | None:
        """How many columns of a row share a scale when it is quantized for a projection; None: it is not."""
        return linear.group

    def linear(self, x: Tensor | Quantized, linear: Linear, out: Tensor | None = None) -> Tensor:
        """Project rows [rows, in_features], see :meth:`group_for`, into ``out`` [rows, out_features] or new memory."""
        weight, bias, scale, _ = linear
        if scale is not None:
            assert isinstance(x, Quantized)
            return linear_fp8(x, weight, scale, bias, out)
        assert isinstance(x, Tensor)
        if out is None:
            return torch.nn.functional.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    @staticmethod
    def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
        """Norm rows [rows, width] in place; they may be strided."""
        x.copy_(_rms_norm(x, weight, eps))

    def spanning_norms_(self, qkv: Tensor, norms: HeadNorms) -> None:
        """Norm all query heads together, and all key heads, of [rows, q_size + 2 * kv_size] in place."""
        queries, keys, _ = qkv.split((len(norms.q), len(norms.k), len(norms.k)), dim=1)
        if self.communicator is None:
            self.rms_norm_(queries, norms.q, norms.eps)
            self.rms_norm_(keys, norms.k, norms.eps)
            return
        # Ranks have equally many heads, and hold each key head equally often: the mean is that of their means.
        means = torch.stack([part.float().pow(2).mean(-1) for part in (queries, keys)])
        means = self.all_reduce(means) / self.communicator.num_ranks
        for part, weight, mean in zip((queries, keys), norms[:2], means, strict=True):
            part.copy_(_rms_norm(part, weight, norms.eps, mean[:, None]))

    @staticmethod
    def act_and_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
        """silu(gate) * up, or gelu(gate) * up. [rows, 2 * intermediate_size] to [rows, intermediate_size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)) * up

    def act_and_mul_quantized(self, gate_up: Tensor, gelu: bool, group: int) -> Quantized:
        """As :meth:`act_and_mul`; then quantize, ``group`` columns with one scale."""
        return quantize(self.act_and_mul(gate_up, gelu), group)

    def glu(
        self, x: Tensor | Quantized, gate_up: Linear, gelu: bool = False, group: int | None = None
    ) -> Tensor | Quantized:
        """SwiGLU, or GeGLU (Shazeer 2020): project [rows, hidden_size], then :meth:`act_and_mul`.

        ``gate_up`` has 2 * intermediate_size outputs, gate's first. With a ``group``, the result is quantized.
        """
        both = self.linear(x, gate_up)
        return self.act_and_mul(both, gelu) if group is None else self.act_and_mul_quantized(both, gelu, group)

    def experts(self, x: Tensor, experts: Experts) -> Tensor:
        """Add up the outputs of each row's experts, times their weights: [rows, hidden_size] to the same.

        The router takes the rows as they are. Experts in FP8 take them quantized, and so does ``down`` what it takes.
        Outputs are added in float32, from the highest weight to the lowest, and rounded once. The loop reads on the
        host which experts are chosen: neither a compiler nor a capture can take it.
        """
        weights, chosen = route(self.linear(x, experts.router), experts.top_k, renormalize=experts.renormalize)
        # Zeros of experts that are on other ranks.
        outputs, reference = x.new_zeros(*chosen.shape, x.shape[1]), TorchOps()
        chosen = chosen - experts.first
        group = experts.gate_up.group
        rows = x if group is None else reference.quantize(x, group)
        for expert in set(chosen.unique().tolist()) & set(range(len(experts.down.weight))):
            at = torch.where(chosen == expert)
            own = rows[at[0]] if isinstance(rows, Tensor) else rows.rows(at[0])
            activated = reference.glu(own, experts.gate_up.of_expert(expert), group=experts.down.group)
            outputs[at] = reference.linear(activated, experts.down.of_expert(expert))
        return (outputs.float() * weights[..., None]).sum(1).to(x.dtype)

    def rope_and_cache(
        self, qkv: Tensor, inputs: RowInputs, cache: KeysValues, norms: HeadNorms | None, out: Tensor | None = None
    ) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values into the cache.

        In ``qkv`` [rows, q_size + 2 * kv_size], rotated keys replace the keys. Returns queries, [rows, num_heads,
        head_dim], in ``out`` or new memory. An FP8 cache saturates; ``qkv`` then gets keys and values as rounded there.
        """
        keys, values = cache
        num_kv_heads, head_dim = keys.shape[2:]
        heads = qkv.unflatten(1, (-1, head_dim))
        q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        normed_k = k
        if norms is not None:
            q = _rms_norm(q, norms.q, norms.eps)
            normed_k = _rms_norm(k, norms.k, norms.eps)
        cos, sin = inputs.cos_sin[inputs.positions].chunk(2, dim=-1)
        k.copy_(_rotate(normed_k, cos, sin))
        for cached, new in ((keys, k), (values, v)):
            if cached.dtype is FP8:
                new.copy_(saturated(new))
            cached.flatten(0, 1)[inputs.kv_slots] = new.to(cached.dtype)
        rotated = _rotate(q, cos, sin)
        return rotated if out is None else out.copy_(rotated)


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts by the softmax over all, in float32: their weights and indices, [rows, top_k], highest first."""
    weights, chosen = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), chosen


def _rms_norm(x: Tensor, weight: Tensor, eps: float, mean_square: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32 inside (Zhang and Sennrich 2019)."""
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True) if mean_square is None else mean_square
    wide = wide * torch.rsqrt(mean_square + eps)
    # Rounded before it is weighted, but for weights in float32.
    return (wide.to(weight.dtype) * weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over split halves (Su et al. 2021), of [rows, heads, head_dim] by [rows, head_dim / 2] in float32."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
