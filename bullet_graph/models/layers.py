"""A decoder layer: its weights, and what it computes before and after attention."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from bullet_graph.kernels.ops import HeadNorms, TorchOps


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection, x @ weight.T + bias: weight [out_features, in_features], bias [out_features]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Projections of attention; ``qkv`` gives (num_heads + 2 * num_kv_heads) * head_dim columns: q, then k, then v."""

    qkv: Linear
    o: Linear
    head_norms: HeadNorms | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU between two projections; ``gate_up`` gives 2 * intermediate_size columns: gate, then up."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: RMSNorms [hidden_size] before attention and before the MLP, and the two.

    ``input_weights`` and ``output_weights`` are those of :func:`attention_input` and :func:`attention_output`, gathered
    once, because an eager forward waits for Python.
    """

    input_norm: Tensor
    attention: SelfAttention
    post_norm: Tensor
    mlp: Mlp
    input_weights: tuple[Tensor, Tensor, Tensor | None] = field(init=False, repr=False)
    output_weights: tuple[Tensor, Tensor, Tensor, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        qkv, o, mlp = self.attention.qkv, self.attention.o, self.mlp
        after = (o.weight, self.post_norm, mlp.gate_up.weight, mlp.down.weight)
        object.__setattr__(self, "input_weights", (self.input_norm, qkv.weight, qkv.bias))
        object.__setattr__(self, "output_weights", after)


def attention_input(
    ops: TorchOps, x: Tensor, residual: Tensor, norm: Tensor, qkv: Tensor, qkv_bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm and project, before attention; returns (qkv [rows, q_size + 2 * kv_size], residual)."""
    x, residual = ops.add_rms_norm(x, residual, norm, eps)
    return ops.linear(x, qkv, qkv_bias), residual


def attention_output(
    ops: TorchOps,
    attended: Tensor,
    residual: Tensor,
    o: Tensor,
    norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Project, norm, MLP, after attention; returns (x [rows, hidden_size], residual)."""
    x, residual = ops.add_rms_norm(ops.linear(attended, o), residual, norm, eps)
    return ops.linear(ops.swiglu(x, gate_up), down), residual


@dataclass(frozen=True, slots=True)
class LayerFunctions:
    """A layer's two parts, eager or compiled, with their operations bound; ``ops`` are those between the parts."""

    ops: TorchOps
    attention_input: Callable[..., tuple[Tensor, Tensor]]
    attention_output: Callable[..., tuple[Tensor, Tensor]]


def eager_functions(ops: TorchOps) -> LayerFunctions:
    return LayerFunctions(ops, partial(attention_input, ops), partial(attention_output, ops))
