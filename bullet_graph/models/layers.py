"""A decoder layer: its weights, and what it computes before and after attention."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bullet_graph.kernels.fp8 import Quantized
from bullet_graph.kernels.ops import Experts, HeadNorms, Linear, TorchOps


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Projections of attention; ``qkv`` gives (num_heads + 2 * num_kv_heads) * head_dim columns: q, then k, then v.

    ``spanning_norms`` are RMSNorms over all query heads and over all key heads. ``rope`` indexes the decoder's tables.
    """

    qkv: Linear
    o: Linear
    head_norms: HeadNorms | None = None
    spanning_norms: HeadNorms | None = None
    rope: int = 0


class Mlp(NamedTuple):
    """SwiGLU between two projections, or GeGLU; ``gate_up`` gives 2 * intermediate_size columns: gate, then up."""

    gate_up: Linear
    down: Linear
    gelu: bool = False


class Mixture(NamedTuple):
    """Routed experts, and one that all rows go to: ``shared``, times the sigmoid of the one column of its gate."""

    experts: Experts
    shared: Mlp | None = None
    shared_gate: Linear | None = None


_InputWeights = tuple[Tensor | None, Linear, HeadNorms | None]
_OutputWeights = tuple[Linear, Tensor | None, Tensor | None, Mlp | Mixture, Tensor | None, float]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: RMSNorms [hidden_size] before and after attention, before and after the MLP, and the two.

    ``residual_multiplier`` multiplies what attention and MLP add to the residual. ``input_weights`` and
    ``output_weights`` are those of :func:`attention_input` and :func:`attention_output`, gathered once, because an
    eager forward waits for Python.
    """

    input_norm: Tensor | None
    attention: SelfAttention
    attended_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: Mlp | Mixture
    output_norm: Tensor | None
    residual_multiplier: float = 1.0
    input_weights: _InputWeights = field(init=False, repr=False)
    output_weights: _OutputWeights = field(init=False, repr=False)

    def __post_init__(self) -> None:
        attention = self.attention
        before = self.input_norm, attention.qkv, attention.spanning_norms
        after = (
            *(attention.o, self.attended_norm, self.mlp_norm),
            *(self.mlp, self.output_norm, self.residual_multiplier),
        )
        object.__setattr__(self, "input_weights", before)
        object.__setattr__(self, "output_weights", after)


def attention_input(
    ops: TorchOps,
    x: Tensor,
    residual: Tensor,
    norm: Tensor | None,
    qkv: Linear,
    norms: HeadNorms | None,
    eps: float,
    summed: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm and project, before attention; returns (qkv [rows, q_size + 2 * kv_size], residual).

    They are in ``out`` and ``summed``, or new memory.
    """
    rows, residual = _add_norm(ops, x, residual, norm, eps, qkv, summed)
    projected = ops.linear(rows, qkv, out=out)
    if norms is not None:
        ops.spanning_norms_(projected, norms)
    return projected, residual


def attention_output(
    ops: TorchOps,
    attended: Tensor,
    residual: Tensor,
    o: Linear,
    attended_norm: Tensor | None,
    mlp_norm: Tensor | None,
    mlp: Mlp | Mixture,
    output_norm: Tensor | None,
    multiplier: float,
    eps: float,
    between: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Project, norm, MLP, after attention; returns (x [rows, hidden_size], residual).

    ``between`` stands in for :func:`mlp_part`, the part between the two sums over ranks.
    """
    group = ops.group_for(o, attended)
    x = ops.all_reduce(ops.linear(attended if group is None else ops.quantize(attended, group), o))
    part = partial(mlp_part, ops) if between is None else between
    x, residual = part(x, residual, attended_norm, mlp_norm, mlp, multiplier, eps)
    return _normed_output(ops, ops.all_reduce(x), output_norm, multiplier, eps), residual


def mlp_part(
    ops: TorchOps,
    x: Tensor,
    residual: Tensor,
    attended_norm: Tensor | None,
    mlp_norm: Tensor | None,
    mlp: Mlp | Mixture,
    multiplier: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Norms around attention's end, and the MLP; returns (x [rows, hidden_size], residual), x before its sum."""
    x = _normed_output(ops, x, attended_norm, multiplier, eps)
    into = mlp.gate_up if isinstance(mlp, Mlp) else mlp.experts.router
    rows, residual = _add_norm(ops, x, residual, mlp_norm, eps, into)
    return _glu_output(ops, rows, mlp) if isinstance(mlp, Mlp) else _mixture(ops, rows, mlp), residual


def _glu_output(ops: TorchOps, rows: Tensor | Quantized, mlp: Mlp) -> Tensor:
    return ops.linear(ops.glu(rows, mlp.gate_up, mlp.gelu, ops.group_for(mlp.down, rows)), mlp.down)


def _mixture(ops: TorchOps, x: Tensor | Quantized, mixture: Mixture) -> Tensor:
    assert isinstance(x, Tensor), "the router's rows are not quantized"
    out = ops.experts(x, mixture.experts)
    if mixture.shared is None or mixture.shared_gate is None:
        return out
    group = ops.group_for(mixture.shared.gate_up, x)
    shared = _glu_output(ops, x if group is None else ops.quantize(x, group), mixture.shared)
    return out + torch.sigmoid(ops.linear(x, mixture.shared_gate)) * shared


def _add_norm(
    ops: TorchOps, x: Tensor, residual: Tensor, norm: Tensor | None, eps: float, into: Linear, out: Tensor | None = None
) -> tuple[Tensor | Quantized, Tensor]:
    """A sub-layer's input, quantized if its first projection is, and the new residual."""
    group = ops.group_for(into, x)
    if norm is None:
        out = torch.add(x, residual, out=out)
        return (out if group is None else ops.quantize(out, group)), out
    if group is None:
        return ops.add_rms_norm(x, residual, norm, eps, out)
    return ops.add_rms_norm_quantized(x, residual, norm, eps, group, out)


def _normed_output(ops: TorchOps, x: Tensor, norm: Tensor | None, multiplier: float, eps: float) -> Tensor:
    """What a sub-layer adds to the residual, from its last projection; may be in the same memory."""
    if norm is not None:
        ops.rms_norm_(x, norm, eps)
    return x if multiplier == 1.0 else x.mul_(multiplier)


@dataclass(frozen=True, slots=True)
class LayerFunctions:
    """A layer's two parts, eager or compiled, with their operations bound; ``ops`` are those between the parts."""

    ops: TorchOps
    attention_input: Callable[..., tuple[Tensor, Tensor]]
    attention_output: Callable[..., tuple[Tensor, Tensor]]


def eager_functions(ops: TorchOps) -> LayerFunctions:
    return LayerFunctions(ops, partial(attention_input, ops), partial(attention_output, ops))
