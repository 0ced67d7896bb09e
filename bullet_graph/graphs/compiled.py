"""The two compiled parts of a decoder layer, before and after attention: one compilation for all batch sizes.

torch.compile makes them. A capture cache keeps them as AOTInductor packages instead: shared libraries and cubins, which
torch's C++ runtime loads within milliseconds.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bullet_graph.kernels.ops import Experts, HeadNorms, Linear, TorchOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, attention_input, attention_output, mlp_part

_MOST_COMPILED = 3 * 64
"""Versions of the three parts together that a process keeps, of all its models and settings: to Dynamo they are one
function. Its own limit is 8."""

_LEAST_TIME = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.enable_line_tables": False,
}
"""Inductor's settings for the least time in the C++ compiler (bench/LOG.md), which is most of the time here."""

_GPU_SETTINGS = {"cpp.vec_isa_ok": False, "cpp.march": ""}
"""No kernel runs on the host: neither probe its processor for vector instructions, nor use them."""

CompiledPart = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerPart:
    """A part to compile for 2 to max_rows rows, and the arguments of a call.

    Those are ``rows``, each [max_rows, width], then ``rest``: weights, which every layer has, None and numbers.
    """

    name: str
    function: CompiledPart
    rows: tuple[Tensor, ...]
    rest: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.rows, *self.rest)

    @property
    def max_rows(self) -> int:
        return len(self.rows[0])


PartCompiler = Callable[[LayerPart], CompiledPart]


# ---- torch.compile ----


@contextmanager
def inductor_contained() -> Iterator[None]:
    """Let Inductor start no processes, and undo its additions to the environment, such as its cache folder."""
    before = set(os.environ)
    try:
        with torch._inductor.config.patch(compile_threads=1):
            yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


def compile_now(part: LayerPart) -> CompiledPart:
    """A :data:`PartCompiler` that keeps nothing for later starts."""
    # Copies, since marks stay on tensors.
    rows = [torch.zeros_like(tensor) for tensor in part.rows]
    for tensor in rows:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=part.max_rows)
    with inductor_contained(), torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
        # dynamic=True would make the weights' shapes symbolic too. Without fullgraph, some parts might run eagerly.
        function: CompiledPart = torch.compile(part.function, dynamic=False, fullgraph=True)
        function(*rows, *part.rest)
    return function


# ---- AOTInductor packages ----


def compile_ahead(part: LayerPart, package: Path) -> CompiledPart:
    """Compile a part into a package, a new file, and load it.

    Torch may raise any exception, for instance where this machine lacks a C++ compiler or CUDA headers.
    """
    with inductor_contained(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        # Torch's own code calls what torch deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        # Elsewhere first: Inductor leaves files beside a package.
        made = Path(folder) / f"{part.name}.pt2"
        wanted = _LEAST_TIME if part.rows[0].device.type == "cpu" else _LEAST_TIME | _GPU_SETTINGS
        # Releases of torch differ in the settings they know.
        known = torch._inductor.config.get_config_copy()
        torch._inductor.aoti_compile_and_package(
            exported(part),
            package_path=str(made),
            inductor_configs={name: value for name, value in wanted.items() if name in known},
        )
        package.write_bytes(made.read_bytes())
    return load_package(package, part)


def exported(part: LayerPart) -> torch.export.ExportedProgram:
    """A part as a program of its tensors, weights included: for 2 to max_rows rows, all other sizes fixed."""
    tensors = _tensors(part.arguments)
    # A dimension of one size is none.
    rows = {0: torch.export.Dim("rows", min=2, max=part.max_rows)} if part.max_rows > 2 else None
    shapes = [rows] * len(part.rows) + [None] * (len(tensors) - len(part.rows))

    class OfTensors(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            given = iter(tensors)
            return part.function(*tree_map_only(Tensor, lambda _: next(given), part.arguments))

    # strict=True would only have Dynamo trace the function a second time.
    return torch.export.export(OfTensors(), tuple(tensors), dynamic_shapes=(tuple(shapes),), strict=False)


def load_package(package: Path, part: LayerPart) -> CompiledPart:
    """Load the package of a part, to the device of its arguments. A package is code: it must come from a trusted place.

    Calls it once: kernels are loaded at the first call, which a capture does not allow. Torch may raise any exception
    where the package is not from :func:`compile_ahead` with the same torch.
    """
    device = part.rows[0].device
    # `torch._inductor.aoti_load_package`, the documented way to this class, imports Dynamo, Inductor and sympy for
    # seconds. Single-threaded: else the runtime records events and waits for them, which a capture forbids.
    loader = torch._C._aoti.AOTIModelPackageLoader(
        str(package), "model", True, 1, -1 if device.index is None else device.index
    )
    run = loader.boxed_run

    def loaded(*arguments: Any) -> tuple[Tensor, Tensor]:
        x, residual = run(_tensors(arguments))
        return x, residual

    loaded(*part.arguments)
    return loaded


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]


# ---- layers ----


def by_rows(one: LayerFunctions, several: LayerFunctions) -> LayerFunctions:
    """Layer functions that choose by the number of rows: compiled parts take two or more."""

    def first(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return (one if len(x) == 1 else several).attention_input(x, *rest)

    def second(attended: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return (one if len(attended) == 1 else several).attention_output(attended, *rest)

    return LayerFunctions(several.ops, first, second)


def compiled_functions(
    decoder: Decoder, between: TorchOps, fused: TorchOps, max_rows: int, compiler: PartCompiler = compile_now
) -> LayerFunctions:
    """Layer functions whose two parts are compiled once, for 2 to ``max_rows`` rows.

    ``fused`` are the operations of the parts, ``between`` those between them: with several ranks, the collectives
    too, so that the second part is :func:`~bullet_graph.models.layers.mlp_part`.
    """

    def part(name: str, function: CompiledPart, rows: tuple[Tensor, ...], rest: tuple[Any, ...]) -> CompiledPart:
        return compiler(LayerPart(name, lambda *arguments: function(fused, *arguments), rows, rest))

    config, layer = decoder.config, decoder.weights.layers[0]
    x, residual, attended = (
        decoder.weights.embed.new_zeros(max_rows, width)
        for width in (config.hidden_size, config.hidden_size, config.q_size)
    )
    eps = config.rms_norm_eps
    if between.communicator is not None:
        norm, qkv, _ = layer.input_weights
        _, attended_norm, mlp_norm, mlp, _, multiplier = layer.output_weights
        first = part("attention_input", attention_input, (x, residual), (norm, qkv, None, eps))
        weights = (attended_norm, mlp_norm, mlp, multiplier, eps)
        return _around_collectives(between, first, part("mlp", mlp_part, (x, residual), weights))
    first = part("attention_input", attention_input, (x, residual), (*layer.input_weights, eps))
    second = part("attention_output", attention_output, (attended, residual), (*layer.output_weights, eps))
    return LayerFunctions(between, first, second)


def _around_collectives(ops: TorchOps, project: CompiledPart, mlp: CompiledPart) -> LayerFunctions:
    """Layer functions of a rank: sums over ranks, and norms that need one, are launched between compiled parts."""

    def ranked_input(
        x: Tensor, residual: Tensor, norm: Tensor | None, qkv: Linear, norms: HeadNorms | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        projected, residual = project(x, residual, norm, qkv, None, eps)
        if norms is not None:
            ops.spanning_norms_(projected, norms)
        return projected, residual

    return LayerFunctions(ops, ranked_input, partial(attention_output, ops, between=mlp))


# ---- kernels inside compiled parts ----

# Operators that Inductor calls without looking into them, so that their kernels are launched as everywhere else. A
# compiled part finds them by name. Not torch.library.custom_op: calling what that makes imports Dynamo.
_LIBRARY = torch.library.Library("bullet_graph", "FRAGMENT")


def _define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Define an operator; ``shapes`` gives empty results, by which Inductor traces it."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bullet_graph::{name}", shapes, lib=_LIBRARY)


def _triton_ops() -> TorchOps:
    from bullet_graph.kernels.triton_ops import TritonOps  # noqa: PLC0415 - published for Linux only

    return TritonOps()


def _experts(x: Tensor, *given: Any) -> Tensor:
    router, router_bias, gate_up, gate_up_scale, gate_up_group, down, down_scale, down_group, *rest = given
    first, last = Linear(gate_up, None, gate_up_scale, gate_up_group), Linear(down, None, down_scale, down_group)
    ops = _triton_ops() if x.is_cuda else TorchOps()
    return ops.experts(x, Experts(Linear(router, router_bias), first, last, *rest))


_define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda *given: _triton_ops().add_rms_norm(*given),
    lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)
_define(
    "experts(Tensor x, Tensor router, Tensor? router_bias, Tensor gate_up, Tensor? gate_up_scale, int? gate_up_group,"
    " Tensor down, Tensor? down_scale, int? down_group, int top_k, bool renormalize, int first) -> Tensor",
    _experts,
    lambda x, *_: torch.empty_like(x),
)


class CompiledOps(TorchOps):
    """Operations of compiled parts: plain torch, which Inductor fuses, but for the experts."""

    def experts(self, x: Tensor, experts: Experts) -> Tensor:
        router, gate_up, down, *rest = experts
        out: Tensor = torch.ops.bullet_graph.experts(
            *(x, router.weight, router.bias, gate_up.weight, gate_up.scale, gate_up.group),
            *(down.weight, down.scale, down.group, *rest),
        )
        return out


class TritonNormOps(CompiledOps):
    """Operations of compiled parts on a GPU, with the Triton kernel of the norm.

    That kernel reads a row once, Inductor's reads it twice (bench/results/h200/changed/decode_step_norms.json).
    """

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, summed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normed, total = torch.ops.bullet_graph.add_rms_norm(x, residual, weight, eps)
        return normed, total if summed is None else summed.copy_(total)
