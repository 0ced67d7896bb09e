"""The two halves of a decoder layer, compiled once for every number of rows above one."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from bullet_graph.models.decoder import Decoder, LayerFunctions, attention_input, attention_output
from bullet_graph.models.ops import LayerOps

_MOST_COMPILED = 64
"""Versions of a half that a process keeps, of all its models and settings: Dynamo's own limit is 8."""


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Undo Inductor's additions to the process's environment: it stores its cache folder there."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


class HalfCompiler(Protocol):
    """Makes a compiled function of a half."""

    def __call__(
        self,
        name: str,
        half: Callable[..., tuple[Tensor, Tensor]],
        arguments: Sequence[Any],
        settings: dict[str, Any],
        /,
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """Compile.

        Args:
            name: of the half.
            half: what to compile, the whole of it.
            arguments: of a call, whose dynamic dimensions are marked.
            settings: for torch.compile.
        """


def compile_now(
    name: str,  # noqa: ARG001 - the protocol's
    half: Callable[..., tuple[Tensor, Tensor]],
    arguments: Sequence[Any],
    settings: dict[str, Any],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A :class:`HalfCompiler` that keeps nothing."""
    function = torch.compile(half, **settings)
    function(*arguments)
    return function


def by_rows(one: LayerFunctions, several: LayerFunctions) -> LayerFunctions:
    """Functions for forwards of any number of rows: compiled halves are for two or more."""

    def chosen(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
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
    """Layer functions whose halves torch.compile fuses, for 2 to ``max_rows`` rows.

    Compiling happens here and once: the number of rows stays symbolic. Inductor's worker processes are not
    started, since an embedded engine starts no process of its own.

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

    # Not dynamic=True: that would make the weights' shapes symbolic, too. The whole function or an error: what it
    # cannot compile, it would run eagerly and not say so.
    settings = {"dynamic": False, "fullgraph": True}
    config, layer = decoder.config, decoder.weights.layers[0]
    x, residual, attended = (
        torch.zeros(max_rows, width, dtype=layer.qkv.dtype, device=layer.qkv.device)
        for width in (config.hidden_size, config.hidden_size, config.q_size)
    )
    for tensor in (x, residual, attended):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=max_rows)
    eps = config.rms_norm_eps
    with (
        torch._inductor.config.patch(compile_threads=1),
        torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED),
        _environment_restored(),
    ):
        first = compiler(
            "attention_input",
            compiled_input,
            (x, residual, layer.input_norm, layer.qkv, layer.qkv_bias, eps),
            settings,
        )
        second = compiler(
            "attention_output",
            compiled_output,
            (attended, residual, layer.o, layer.post_norm, layer.gate_up, layer.down, eps),
            settings,
        )
    return LayerFunctions(between, first, second)
