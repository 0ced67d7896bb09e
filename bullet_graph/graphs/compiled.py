"""The two compiled parts of a decoder layer, before and after attention: one compilation for all batch sizes above one.

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

from bullet_graph.kernels.fp8 import FP8, Quantized
from bullet_graph.kernels.ops import Experts, HeadNorms, Linear, TorchOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, attention_input, attention_output, mlp_part

_MOST_COMPILED = 64
"""Versions of a part that a process keeps, of all its models and settings; Dynamo's own limit is 8."""

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
        # dynamic=True would make the weights' shapes symbolic too. Without fullgraph, what cannot be compiled would
        # silently run eagerly.
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

    def compiled_input(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_input(fused, *arguments)

    def compiled_output(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_output(fused, *arguments)

    def compiled_mlp(*arguments: Any) -> tuple[Tensor, Tensor]:
        return mlp_part(fused, *arguments)

    config, layer = decoder.config, decoder.weights.layers[0]
    x, residual, attended = (
        decoder.weights.embed.new_zeros(max_rows, width)
        for width in (config.hidden_size, config.hidden_size, config.q_size)
    )
    eps = config.rms_norm_eps
    if between.communicator is not None:
        norm, qkv, _ = layer.input_weights
        _, attended_norm, mlp_norm, mlp, _, multiplier = layer.output_weights
        first = LayerPart("attention_input", compiled_input, (x, residual), (norm, qkv, None, eps))
        weights = (attended_norm, mlp_norm, mlp, multiplier, eps)
        return _around_collectives(
            between, compiler(first), compiler(LayerPart("mlp", compiled_mlp, (x, residual), weights))
        )
    first = LayerPart("attention_input", compiled_input, (x, residual), (*layer.input_weights, eps))
    second = LayerPart("attention_output", compiled_output, (attended, residual), (*layer.output_weights, eps))
    return LayerFunctions(between, compiler(first), compiler(second))


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


def _operator(schema: str, shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the operator of a schema; ``shapes`` gives empty results, by which Inductor traces it."""

    def define(run: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        name = schema.partition("(")[0]
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"bullet_graph::{name}", shapes, lib=_LIBRARY)
        return run

    return define


def _triton_ops() -> type[Any]:
    from bullet_graph.kernels.triton_ops import TritonOps  # noqa: PLC0415 - published for Linux only

    return TritonOps


def _quantized_shapes(x: Tensor, width: int, group: int) -> tuple[Tensor, Tensor]:
    # Not len(x), which would fix the number of rows.
    rows = x.shape[0]
    return x.new_empty(rows, width, dtype=FP8), x.new_empty(rows, -(-width // group), dtype=torch.float32)


@_operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)
def _add_rms_norm(*given: Any) -> tuple[Tensor, Tensor]:
    normed, summed = _triton_ops().add_rms_norm(*given)
    return normed, summed


@_operator(
    "add_rms_norm_quantized(Tensor x, Tensor residual, Tensor weight, float eps, int group)"
    " -> (Tensor, Tensor, Tensor)",
    lambda x, *rest: (*_quantized_shapes(x, x.shape[1], rest[-1]), torch.empty_like(x)),
)
def _add_rms_norm_quantized(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    (values, scales, _), summed = _triton_ops().add_rms_norm_quantized(*given)
    return values, scales, summed


@_operator(
    "act_and_mul_quantized(Tensor gate_up, bool gelu, int group) -> (Tensor, Tensor)",
    lambda gate_up, _, group: _quantized_shapes(gate_up, gate_up.shape[1] // 2, group),
)
def _act_and_mul_quantized(*given: Any) -> tuple[Tensor, Tensor]:
    values, scales, _ = _triton_ops().act_and_mul_quantized(*given)
    return values, scales


@_operator(
    "linear_fp8(Tensor values, Tensor scales, ScalarType dtype, Tensor weight, Tensor scale, Tensor? bias, int group)"
    " -> Tensor",
    lambda values, _, dtype, weight, *__: values.new_empty(values.shape[0], weight.shape[0], dtype=dtype),
)
def _linear_fp8(
    values: Tensor, scales: Tensor, dtype: torch.dtype, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int
) -> Tensor:
    result: Tensor = _triton_ops().linear(Quantized(values, scales, dtype), Linear(weight, bias, scale, group))
    return result


@_operator(
    "experts(Tensor x, Tensor router, Tensor? router_bias, Tensor gate_up, Tensor? gate_up_scale, int? gate_up_group,"
    " Tensor down, Tensor? down_scale, int? down_group, int top_k, bool renormalize, int first) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _experts(x: Tensor, *given: Any) -> Tensor:
    router, router_bias, gate_up, gate_up_scale, gate_up_group, down, down_scale, down_group, *rest = given
    first, last = Linear(gate_up, None, gate_up_scale, gate_up_group), Linear(down, None, down_scale, down_group)
    ops = _triton_ops()() if x.is_cuda else TorchOps()
    out: Tensor = ops.experts(x, Experts(Linear(router, router_bias), first, last, *rest))
    return out


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

    That kernel reads a row once, Inductor's reads it twice (bench/results/h200/decode_step.json). With FP8, Triton's
    kernels also quantize, and products are chosen by the number of rows, which a compiled part does not know.
    """

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, summed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normed, total = torch.ops.bullet_graph.add_rms_norm(x, residual, weight, eps)
        return normed, total if summed is None else summed.copy_(total)

    @staticmethod
    def add_rms_norm_quantized(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, summed: Tensor | None = None
    ) -> tuple[Quantized, Tensor]:
        values, scales, total = torch.ops.bullet_graph.add_rms_norm_quantized(x, residual, weight, eps, group)
        return Quantized(values, scales, x.dtype), total if summed is None else summed.copy_(total)

    @staticmethod
    def act_and_mul_quantized(gate_up: Tensor, gelu: bool, group: int) -> Quantized:
        values, scales = torch.ops.bullet_graph.act_and_mul_quantized(gate_up, gelu, group)
        return Quantized(values, scales, gate_up.dtype)

    @staticmethod
    def linear(x: Tensor | Quantized, linear: Linear, out: Tensor | None = None) -> Tensor:
        if not isinstance(x, Quantized):
            return TorchOps.linear(x, linear, out)
        weight, bias, scale, group = linear
        result: Tensor = torch.ops.bullet_graph.linear_fp8(*x, weight, scale, bias, group)
        return result if out is None else out.copy_(result)
