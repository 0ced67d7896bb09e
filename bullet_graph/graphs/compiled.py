"""The two halves of a decoder layer, compiled once for every batch size above one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bullet_graph.models.decoder import Decoder, LayerFunctions, attention_input, attention_output
from bullet_graph.models.ops import LayerOps, TorchOps
from bullet_graph.models.triton_ops import TritonOps

_MOST_COMPILED = 64
"""Versions of a half that a process keeps, of all its models and settings: Dynamo's own limit is 8."""


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


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Undo Inductor's additions to the process's environment: it stores its cache folder there."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


def compiled_functions(
    decoder: Decoder, between: LayerOps, max_rows: int, *, fused: LayerOps | None = None, pdl: bool = False
) -> LayerFunctions:
    """Layer functions whose halves torch.compile fuses, for 2 to ``max_rows`` rows.

    Compiling happens here and once: the number of rows stays symbolic. Inductor's worker processes are not
    started, since an embedded engine starts no process of its own.

    Args:
        decoder: whose weights to compile for.
        between: operations for what lies between the halves.
        max_rows: most rows, at least 2.
        fused: operations of the halves; None for plain torch.
        pdl: have Inductor launch its kernels while the one before them runs; the device must be able to.
    """
    ops = TorchOps() if fused is None else fused

    def compiled_input(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_input(ops, *arguments)

    def compiled_output(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_output(ops, *arguments)

    def compiled(half: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        # Not dynamic=True: that would make the weights' shapes symbolic, too. Options, not a patch of the settings:
        # Dynamo takes what it has compiled for the same code with the same options. The whole function or an error:
        # what it cannot compile, it would run eagerly and not say so.
        return torch.compile(half, dynamic=False, fullgraph=True, options={"triton.enable_pdl": pdl})

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
