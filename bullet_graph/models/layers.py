"""A decoder layer: its weights, and what it computes before and after attention."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bullet_graph.kernels.ops import HeadNorms, TorchOps

_InputWeights = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]
_OutputWeights = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None, bool, float]


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection, x @ weight.T + bias: weight [out_features, in_features], bias [out_features]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Projections of attention; ``qkv`` gives (num_heads + 2 * num_kv_heads) * head_dim columns: q, then k, then v.

    ``spanning_norms`` are RMSNorms over all query heads together and over all key heads. ``rope`` is the layer's index
    into the decoder's tables.
    """

    qkv: Linear
    o: Linear
    head_norms: HeadNorms | None = None
    spanning_norms: HeadNorms | None = None
    rope: int = 0


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU between two projections, or GeGLU; ``gate_up`` gives 2 * intermediate_size columns: gate, then up."""

    gate_up: Linear
    down: Linear
    gelu: bool = False


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
    mlp: Mlp
    output_norm: Tensor | None
    residual_multiplier: float = 1.0
    input_weights: _InputWeights = field(init=False, repr=False)
    output_weights: _OutputWeights = field(init=False, repr=False)

    def __post_init__(self) -> None:
        qkv, o, mlp, norms = self.attention.qkv, self.attention.o, self.mlp, self.attention.spanning_norms
        q_norm, k_norm = (norms.q, norms.k) if norms else (None, None)
        before: _InputWeights = (self.input_norm, qkv.weight, qkv.bias, q_norm, k_norm)
        after: _OutputWeights = (
            *(o.weight, self.attended_norm, self.mlp_norm, mlp.gate_up.weight, mlp.down.weight),
            *(self.output_norm, mlp.gelu, self.residual_multiplier),
        )
        object.__setattr__(self, "input_weights", before)
        object.__setattr__(self, "output_weights", after)


def attention_input(
    ops: TorchOps,
    x: Tensor,
    residual: Tensor,
    norm: Tensor | None,
    qkv: Tensor,
    qkv_bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    summed: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm and project, before attention; returns (qkv [rows, q_size + 2 * kv_size], residual).

    They are in ``out`` and ``summed``, or new memory.
    """
    x, residual = _add_norm(ops, x, residual, norm, eps, summed)
    projected = ops.linear(x, qkv, qkv_bias, out=out)
    if q_norm is not None and k_norm is not None:
        ops.rms_norm_(projected[:, : len(q_norm)], q_norm, eps)
        ops.rms_norm_(projected[:, len(q_norm) : len(q_norm) + len(k_norm)], k_norm, eps)
    return projected, residual


def attention_output(
    ops: TorchOps,
    attended: Tensor,
    residual: Tensor,
    o: Tensor,
    attended_norm: Tensor | None,
    mlp_norm: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    output_norm: Tensor | None,
    gelu: bool,
    multiplier: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Project, norm, MLP, after attention; returns (x [rows, hidden_size], residual)."""
    x = _normed_output(ops, ops.linear(attended, o), attended_norm, multiplier, eps)
    x, residual = _add_norm(ops, x, residual, mlp_norm, eps)
    x = ops.linear(ops.glu(x, gate_up, gelu), down)
    return _normed_output(ops, x, output_norm, multiplier, eps), residual


def _add_norm(
    ops: TorchOps, x: Tensor, residual: Tensor, norm: Tensor | None, eps: float, summed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A sub-layer's input, and the new residual."""
    if norm is not None:
        return ops.add_rms_norm(x, residual, norm, eps, summed)
    summed = torch.add(x, residual, out=summed)
    return summed, summed


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
