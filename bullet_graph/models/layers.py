"""The layers of a decoder: their weights, as frozen values, and what is computed before and after attention."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from bullet_graph.kernels.ops import HeadNorms, TorchOps


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection: x @ weight.T + bias.

    Attributes:
        weight: [out_features, in_features], as ``F.linear`` takes it.
        bias: [out_features] or None.
    """

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Causal attention over all of a sequence.

    Attributes:
        qkv: to (num_heads + 2 * num_kv_heads) * head_dim columns: q, then k, then v.
        o: from num_heads * head_dim columns.
        head_norms: RMSNorm of each query and key head before RoPE, or None.
    """

    qkv: Linear
    o: Linear
    head_norms: HeadNorms | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU between two projections.

    Attributes:
        gate_up: to 2 * intermediate_size columns: gate, then up.
        down: from intermediate_size columns.
    """

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        input_norm: [hidden_size], RMSNorm before attention.
        attention: its projections.
        post_norm: [hidden_size], RMSNorm before the MLP.
        mlp: its projections.
        input_weights: the weights that :func:`attention_input` takes. Gathered once: an eager forward waits for Python.
        output_weights: the weights that :func:`attention_output` takes.
    """

    input_norm: Tensor
    attention: SelfAttention
    post_norm: Tensor
    mlp: Mlp
    input_weights: tuple[Tensor, Tensor, Tensor | None] = field(init=False, repr=False)
    output_weights: tuple[Tensor, Tensor, Tensor, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        qkv, mlp = self.attention.qkv, self.mlp
        object.__setattr__(self, "input_weights", (self.input_norm, qkv.weight, qkv.bias))
        object.__setattr__(
            self,
            "output_weights",
            (self.attention.o.weight, self.post_norm, mlp.gate_up.weight, mlp.down.weight),
        )


def attention_input(
    ops: TorchOps,
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    qkv: Tensor,
    qkv_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Norm and project: everything of a layer before attention.

    Returns:
        (qkv [rows, q_size + 2 * kv_size], residual).
    """
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
    """Project, norm, MLP: everything of a layer after attention.

    Returns:
        (x [rows, hidden_size], residual).
    """
    x, residual = ops.add_rms_norm(ops.linear(attended, o), residual, norm, eps)
    return ops.linear(ops.swiglu(x, gate_up), down), residual


@dataclass(frozen=True, slots=True)
class LayerFunctions:
    """How a layer is computed: eagerly, or with its two parts compiled.

    Attributes:
        ops: operations for what lies between the two parts.
        attention_input: :func:`attention_input` with the operations bound.
        attention_output: :func:`attention_output` with the operations bound.
    """

    ops: TorchOps
    attention_input: Callable[..., tuple[Tensor, Tensor]]
    attention_output: Callable[..., tuple[Tensor, Tensor]]


def eager_functions(ops: TorchOps) -> LayerFunctions:
    """A layer computed operation by operation."""
    return LayerFunctions(ops, partial(attention_input, ops), partial(attention_output, ops))
