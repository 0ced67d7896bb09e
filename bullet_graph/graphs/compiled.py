"""The two halves of a decoder layer, compiled once for every batch size above one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bullet_graph.models.decoder import Decoder, LayerFunctions, attention_input, attention_output
from bullet_graph.models.ops import LayerOps, TorchOps


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Undo Inductor's additions to the process's environment: it stores its cache folder there."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


def compiled_functions(decoder: Decoder, between: LayerOps, max_rows: int) -> LayerFunctions:
    """Layer functions whose halves torch.compile fuses, for 2 to ``max_rows`` rows.

    Compiling happens here and once: the number of rows stays symbolic. Inductor's worker processes are not
    started, since an embedded engine starts no process of its own.

    Args:
        decoder: whose weights to compile for.
        between: operations for what lies between the halves.
        max_rows: most rows, at least 2.
    """
    ops = TorchOps()

    def compiled_input(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_input(ops, *arguments)

    def compiled_output(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_output(ops, *arguments)

    # Not dynamic=True: that would make the weights' shapes symbolic, too.
    functions = LayerFunctions(
        between, torch.compile(compiled_input, dynamic=False), torch.compile(compiled_output, dynamic=False)
    )
    config, layer = decoder.config, decoder.weights.layers[0]
    x, residual, attended = (
        torch.zeros(max_rows, width, dtype=layer.qkv.dtype, device=layer.qkv.device)
        for width in (config.hidden_size, config.hidden_size, config.q_size)
    )
    for tensor in (x, residual, attended):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=max_rows)
    eps = config.rms_norm_eps
    with torch._inductor.config.patch(compile_threads=1), _environment_restored():
        functions.attention_input(x, residual, layer.input_norm, layer.qkv, layer.qkv_bias, eps)
        functions.attention_output(
            attended, residual, layer.o, layer.post_norm, layer.gate_up, layer.down, eps
        )
    return functions
