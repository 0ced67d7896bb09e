"""The ways to compute a decode step that ``decode_step.py`` compares, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.kernels.skinny_gemm import skinny
from bullet_graph.graphs.step_kernels import Halves, StepKernels, default_step_kernels
from bullet_graph.models.triton_gemm import can_fuse, swiglu_matmul
from bullet_graph.models.triton_ops import TritonOps

KernelsFor = Callable[[int], StepKernels]

DEFAULT = "compiled-norm"
"""What the product does, and what the others are held against."""

_SKINNY_ROWS = (17, 64)
_SKINNY_32 = {"BM": 32, "BN": 128, "BK": 64, "STAGES": 5, "warps": 8, "SPLIT": 1, "PRE": False}
_SKINNY_64 = {"BM": 64, "BN": 128, "BK": 64, "STAGES": 4, "warps": 4, "SPLIT": 1, "PRE": False}
"""The fastest for the output projection of llama-3.1-8b (bench/results/h200/kernel_exploration.json)."""
_FUSED_LEAST_ROWS = 128
"""A tile's rows."""


@dataclass(frozen=True)
class SkinnyHeadOps(TritonOps):
    """As its base, but the output projection of 17 to 64 rows by :mod:`~bench.kernels.skinny_gemm`.

    Attributes:
        vocab_size: by which the projection is told from others.
    """

    vocab_size: int = 0

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See :func:`~bullet_graph.models.ops.linear`."""
        tiling = _SKINNY_32 if len(x) <= _SKINNY_32["BM"] else _SKINNY_64
        fits = weight.shape[0] % tiling["BN"] == 0 and weight.shape[1] % tiling["BK"] == 0
        few = _SKINNY_ROWS[0] <= len(x) <= _SKINNY_ROWS[1]
        if out is None or len(weight) != self.vocab_size or not (few and fits):
            return super().linear(x, weight, bias, out)
        x_tiles = TensorDescriptor.from_tensor(x, [tiling["BM"], tiling["BK"]])
        weight_tiles = TensorDescriptor.from_tensor(weight, [tiling["BN"], tiling["BK"]])
        # Unsplit, it takes no partial sums and no counters.
        skinny(x_tiles, weight_tiles, x, weight, out, out, out, tiling, len(x), self.pdl)
        return out


class FusedSwigluOps(TritonOps):
    """As its base, but SwiGLU is one launch with its projections from :data:`_FUSED_LEAST_ROWS` on."""

    def swiglu(self, x: Tensor, gate_up_weight: Tensor) -> Tensor:
        """See :func:`~bullet_graph.models.ops.swiglu`."""
        if len(x) < _FUSED_LEAST_ROWS or not can_fuse(x, gate_up_weight):
            return super().swiglu(x, gate_up_weight)
        return swiglu_matmul(x, gate_up_weight)


def _always(halves: Halves, ops: TritonOps) -> KernelsFor:
    """One row, which no compiled halves take, is computed eagerly."""
    return lambda rows: StepKernels("eager" if rows == 1 else halves, ops)


def variants(vocab_size: int) -> dict[str, KernelsFor]:
    """By name; "+pdl" is programmatic dependent launch of the package's own kernels."""
    plain, pdl = TritonOps(), TritonOps(pdl=True)
    return {
        DEFAULT: default_step_kernels,
        "compiled": _always("compiled", plain),
        "compiled+pdl": _always("compiled", pdl),
        "compiled-pdl+pdl": _always("compiled-pdl", pdl),
        "compiled-norm+pdl": _always("compiled-norm", pdl),
        "eager": _always("eager", plain),
        "eager+pdl": _always("eager", pdl),
        "skinny-head": _always("compiled-norm", SkinnyHeadOps(vocab_size=vocab_size)),
        "fused-swiglu": _always("eager", FusedSwigluOps()),
    }


def distinct(chosen: dict[str, KernelsFor], rows: int) -> dict[str, str]:
    """Each variant's name to that of the first which launches the same for so many rows."""
    first: dict[StepKernels, str] = {}
    same: dict[str, str] = {}
    for name, kernels_for in chosen.items():
        kernels = kernels_for(rows)
        ops = kernels.ops
        if (isinstance(ops, SkinnyHeadOps) and not _SKINNY_ROWS[0] <= rows <= _SKINNY_ROWS[1]) or (
            isinstance(ops, FusedSwigluOps) and rows < _FUSED_LEAST_ROWS
        ):
            kernels = StepKernels(kernels.halves, TritonOps(ops.pdl))
        same[name] = first.setdefault(kernels, name)
    return same
