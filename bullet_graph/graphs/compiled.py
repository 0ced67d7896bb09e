"""The two halves of a decoder layer, compiled once for every number of rows above one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bullet_graph.kernels.ops import LayerOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, attention_input, attention_output

_MOST_COMPILED = 64
"""Versions of a half that a process keeps, of all its models and settings: Dynamo's own limit is 8."""

Half = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerHalf:
    """A half to be compiled, and arguments of a call.

    Attributes:
        name: of the half.
        function: what to compile, the whole of it.
        rows: the first arguments, each [max_rows, width]: any number of rows from 2 to this one must do.
        rest: the other arguments: weights, which other layers have as well, None and numbers.
    """

    name: str
    function: Half
    rows: tuple[Tensor, ...]
    rest: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All of them, in order."""
        return (*self.rows, *self.rest)

    @property
    def max_rows(self) -> int:
        """The most rows that there will be."""
        return len(self.rows[0])


HalfCompiler = Callable[[LayerHalf], Half]
"""Makes a compiled function of a half."""


@contextmanager
def inductor_contained() -> Iterator[None]:
    """Have Inductor start no processes, and undo its additions to the environment: it stores its cache folder there.

    An embedded engine starts no process of its own.
    """
    before = set(os.environ)
    try:
        with torch._inductor.config.patch(compile_threads=1):
            yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


def compile_now(half: LayerHalf) -> Half:
    """A :data:`HalfCompiler` that keeps nothing."""
    # Others than those of the half, since marks stay.
    rows = [torch.zeros_like(tensor) for tensor in half.rows]
    for tensor in rows:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=half.max_rows)
    with inductor_contained(), torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
        # Not dynamic=True: that would make the weights' shapes symbolic, too. The whole function or an error: what it
        # cannot compile, it would run eagerly and not say so.
        function: Half = torch.compile(half.function, dynamic=False, fullgraph=True)
        function(*rows, *half.rest)
    return function


def by_rows(one: LayerFunctions, several: LayerFunctions) -> LayerFunctions:
    """Functions for forwards of any number of rows: compiled halves are for two or more."""

    def chosen(name: str) -> Half:
        for_one, for_several = getattr(one, name), getattr(several, name)

        def half(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = (for_one if len(x) == 1 else for_several)(x, *rest)
            return result

        return half

    return LayerFunctions(several.ops, chosen("attention_input"), chosen("attention_output"))


def compiled_functions(
    decoder: Decoder,
    between: LayerOps,
    fused: LayerOps,
    max_rows: int,
    compiler: HalfCompiler = compile_now,
) -> LayerFunctions:
    """Layer functions whose halves torch's compiler fuses, for 2 to ``max_rows`` rows.

    Compiling happens here and once: the number of rows stays symbolic.

    Args:
        decoder: whose weights to compile for.
        between: operations for what lies between the halves.
        fused: operations of the halves.
        max_rows: most rows, at least 2.
        compiler: of the halves.
    """

    def compiled_input(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_input(fused, *arguments)

    def compiled_output(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_output(fused, *arguments)

    config, layer = decoder.config, decoder.weights.layers[0]
    x, residual, attended = (
        torch.zeros(max_rows, width, dtype=layer.input_norm.dtype, device=layer.input_norm.device)
        for width in (config.hidden_size, config.hidden_size, config.q_size)
    )
    eps = config.rms_norm_eps
    first = LayerHalf(
        "attention_input",
        compiled_input,
        rows=(x, residual),
        rest=(*layer.input_weights, eps),
    )
    second = LayerHalf(
        "attention_output",
        compiled_output,
        rows=(attended, residual),
        rest=(*layer.output_weights, eps),
    )
    return LayerFunctions(between, compiler(first), compiler(second))
