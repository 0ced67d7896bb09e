"""The two halves of a decoder layer in a captured decode step: which ones run."""

from typing import Literal

import torch
from torch import Tensor

from bullet_graph.graphs.compiled import HalfCompiler, compile_now, compiled_functions
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, eager_functions

Halves = Literal["eager", "compiled", "compiled-norm"]
"""How a layer's two halves are computed:

eager: operation by operation, by Triton's operations; the only way for one row, which has a matrix kernel of its own;
compiled: plain torch, fused by torch.compile;
compiled-norm: likewise, but for the norms, which are this package's Triton kernel."""

DEFAULT_HALVES: Halves = "compiled-norm"
"""Of more rows than one: the fastest with torch.compile (bench/results/h200/decode_step.json)."""


# An operator that Inductor calls and does not look into, so that its kernel is launched as it is everywhere else.
# A compiled half finds it by its name. Not torch.library.custom_op: to call what that makes imports Dynamo.
_LIBRARY = torch.library.Library("bullet_graph", "FRAGMENT")
_LIBRARY.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return TritonOps.add_rms_norm(x, residual, weight, eps)


def _add_rms_norm_shapes(
    x: Tensor,
    residual: Tensor,  # noqa: ARG001 - the operator's
    weight: Tensor,  # noqa: ARG001
    eps: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


_LIBRARY.impl("add_rms_norm", _add_rms_norm, "CompositeExplicitAutograd")
torch.library.register_fake("bullet_graph::add_rms_norm", _add_rms_norm_shapes, lib=_LIBRARY)


class TritonNormOps(TorchOps):
    """Plain torch but for the norm, whose Triton kernel holds a row at once where Inductor's goes over it twice."""

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, summed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :func:`~bullet_graph.kernels.ops.add_rms_norm`."""
        normed, total = torch.ops.bullet_graph.add_rms_norm(x, residual, weight, eps)
        return normed, total if summed is None else summed.copy_(total)


def halves_for(rows: int, many: Halves = DEFAULT_HALVES) -> Halves:
    """What a decode step of so many rows runs; ``many`` for more than one."""
    return "eager" if rows == 1 else many


def decode_functions(
    decoder: Decoder, halves: Halves, max_rows: int, compiler: HalfCompiler = compile_now
) -> LayerFunctions:
    """The layer functions of captured decode steps, compiled if need be for 2 to ``max_rows`` rows.

    Args:
        compiler: of the halves.
    """
    ops = TritonOps()
    if halves == "eager":
        return eager_functions(ops)
    fused = TritonNormOps() if halves == "compiled-norm" else TorchOps()
    return compiled_functions(decoder, ops, fused, max_rows, compiler)
