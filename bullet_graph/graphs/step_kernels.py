"""Which kernels a captured decode step runs, by its number of rows: the one place where that is chosen."""

from dataclasses import dataclass, field
from typing import Literal

from bullet_graph.errors import DeviceError
from bullet_graph.graphs.compiled import HalfCompiler, compile_now, compiled_functions
from bullet_graph.graphs.triton_norm import TritonNormOps
from bullet_graph.models.decoder import Decoder, LayerFunctions, eager_functions
from bullet_graph.models.ops import TorchOps
from bullet_graph.models.triton_ops import TritonOps, has_programmatic_launch

Halves = Literal["eager", "compiled", "compiled-pdl", "compiled-norm"]
"""How a layer's two halves are computed:

eager: operation by operation, by the step's ops, the only way for one row, which has matrix kernels of its own;
compiled: plain torch, fused by torch.compile;
compiled-pdl: likewise, with Inductor's kernels launched while the one before them runs;
compiled-norm: likewise compiled, but for the norms, which are Triton kernels of this package."""


@dataclass(frozen=True)
class StepKernels:
    """What a decode step of some number of rows launches.

    Attributes:
        halves: see :data:`Halves`.
        ops: for what lies between the halves, the output projection, and eager halves. With its ``pdl``, decode
            attention and sampling are launched likewise.
    """

    halves: Halves = "compiled-norm"
    ops: TritonOps = field(default_factory=TritonOps)

    @property
    def pdl(self) -> bool:
        """Whether some kernel is launched while the one before it runs."""
        return self.ops.pdl or self.halves == "compiled-pdl"

    @property
    def name(self) -> str:
        """Tells these kernels from others."""
        return f"{self.halves}{'-between-pdl' if self.ops.pdl else ''}"

    def functions(
        self, decoder: Decoder, max_rows: int, compiler: HalfCompiler = compile_now
    ) -> LayerFunctions:
        """The layer functions, compiled if need be for 2 to ``max_rows`` rows, on the current stream.

        Args:
            compiler: of the halves.

        Raises:
            DeviceError: the device has no programmatic dependent launch, and ``pdl`` asks for it.
        """
        device = decoder.cos_sin.device
        if self.pdl and not has_programmatic_launch(device):
            raise DeviceError(
                "programmatic dependent launch needs a GPU of compute capability 9.0 or more, and Triton's compiler; "
                f"found {device}: take step kernels without pdl"
            )
        if self.halves == "eager":
            return eager_functions(self.ops)
        return compiled_functions(
            decoder,
            self.ops,
            max_rows,
            fused=TritonNormOps(self.ops.pdl) if self.halves == "compiled-norm" else TorchOps(),
            pdl=self.halves == "compiled-pdl",
            compiler=compiler,
        )


def default_step_kernels(rows: int) -> StepKernels:
    """What the product runs for so many rows: the fastest with torch.compile (bench/results/h200/decode_step.json)."""
    return StepKernels(halves="eager" if rows == 1 else "compiled-norm")
