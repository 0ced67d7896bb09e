"""The two halves of a decoder layer in a captured decode step: which ones run, and compiling them once for all rows."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from bullet_graph.models.decoder import (
    Decoder,
    LayerFunctions,
    attention_input,
    attention_output,
    eager_functions,
)
from bullet_graph.models.ops import LayerOps, TorchOps
from bullet_graph.models.triton_ops import TritonOps

Halves = Literal["eager", "compiled", "compiled-norm"]
"""How a layer's two halves are computed:

eager: operation by operation, by Triton's operations; the only way for one row, which has a matrix kernel of its own;
compiled: plain torch, fused by torch.compile;
compiled-norm: likewise, but for the norms, which are this package's Triton kernel."""

DEFAULT_HALVES: Halves = "compiled-norm"
"""Of more rows than one: the fastest with torch.compile (bench/results/h200/decode_step.json)."""

_MOST_COMPILED = 64
"""Versions of a half that a process keeps, of all its models and settings: Dynamo's own limit is 8."""


# An operator that Inductor calls and does not look into, so that its kernel is launched as it is everywhere else.
@torch.library.custom_op("bullet_graph::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return TritonOps.add_rms_norm(x, residual, weight, eps)


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(x), torch.empty_like(x)


class TritonNormOps(TorchOps):
    """Plain torch but for the norm, whose Triton kernel holds a row at once where Inductor's goes over it twice."""

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, summed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :func:`~bullet_graph.models.ops.add_rms_norm`."""
        normed, total = _add_rms_norm(x, residual, weight, eps)
        return normed, total if summed is None else summed.copy_(total)


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Undo Inductor's additions to the process's environment: it stores its cache folder there."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


def halves_for(rows: int, many: Halves = DEFAULT_HALVES) -> Halves:
    """What a decode step of so many rows runs; ``many`` for more than one."""
    return "eager" if rows == 1 else many


def decode_functions(decoder: Decoder, halves: Halves, max_rows: int) -> LayerFunctions:
    """The layer functions of captured decode steps, compiled if need be for 2 to ``max_rows`` rows."""
    ops = TritonOps()
    if halves == "eager":
        return eager_functions(ops)
    fused = TritonNormOps() if halves == "compiled-norm" else TorchOps()
    return compiled_functions(decoder, ops, fused, max_rows)


def compiled_functions(decoder: Decoder, between: LayerOps, fused: LayerOps, max_rows: int) -> LayerFunctions:
    """Layer functions whose halves torch.compile fuses, for 2 to ``max_rows`` rows.

    Compiling happens here and once: the number of rows stays symbolic. Inductor's worker processes are not
    started, since an embedded engine starts no process of its own.

    Args:
        decoder: whose weights to compile for.
        between: operations for what lies between the halves.
        fused: operations of the halves.
        max_rows: most rows, at least 2.
    """

    def compiled_input(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_input(fused, *arguments)

    def compiled_output(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_output(fused, *arguments)

    def compiled(half: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        # Not dynamic=True: that would make the weights' shapes symbolic, too. The whole function or an error: what it
        # cannot compile, it would run eagerly and not say so.
        return torch.compile(half, dynamic=False, fullgraph=True)

    functions = LayerFunctions(between, compiled(compiled_input), compiled(compiled_output))
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
        functions.attention_input(x, residual, layer.input_norm, layer.qkv, layer.qkv_bias, eps)
        functions.attention_output(
            attended, residual, layer.o, layer.post_norm, layer.gate_up, layer.down, eps
        )
    return functions
