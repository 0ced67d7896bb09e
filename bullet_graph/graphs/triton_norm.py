"""The norm of compiled halves as a Triton kernel that Inductor leaves as it is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bullet_graph.models.ops import TorchOps
from bullet_graph.models.triton_ops import TritonOps


# An operator that Inductor calls and does not look into: kernels that it traces lose how they are launched.
@torch.library.custom_op("bullet_graph::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool
) -> tuple[Tensor, Tensor]:
    return TritonOps(pdl).add_rms_norm(x, residual, weight, eps)


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(x), torch.empty_like(x)


@dataclass(frozen=True)
class TritonNormOps(TorchOps):
    """Plain torch but for the norm, whose Triton kernel holds a row at once where Inductor's goes over it twice.

    Attributes:
        pdl: see :class:`~bullet_graph.models.triton_ops.TritonOps`.
    """

    pdl: bool

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, summed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :func:`~bullet_graph.models.ops.add_rms_norm`."""
        normed, total = _add_rms_norm(x, residual, weight, eps, self.pdl)
        return normed, total if summed is None else summed.copy_(total)
