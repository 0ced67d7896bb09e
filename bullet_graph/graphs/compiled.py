"""The two halves of a decoder layer, compiled once for every batch size."""

from typing import Any

import torch
from torch import Tensor

from bullet_graph.models.decoder import Decoder, LayerFunctions, attention_input, attention_output
from bullet_graph.models.ops import LayerOps, TorchOps


def compiled_functions(between: LayerOps) -> LayerFunctions:
    """Layer functions whose halves torch.compile fuses.

    Args:
        between: operations for what lies between the halves.
    """
    ops = TorchOps()

    def compiled_input(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_input(ops, *arguments)

    def compiled_output(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attention_output(ops, *arguments)

    # Only the rows are dynamic, and marked so in `warm_up`: weight shapes must stay constants.
    return LayerFunctions(
        between, torch.compile(compiled_input, dynamic=False), torch.compile(compiled_output, dynamic=False)
    )


def warm_up(decoder: Decoder, functions: LayerFunctions, batch_sizes: tuple[int, ...]) -> None:
    """Compile for one row, and once for every larger number of rows.

    Inductor's worker processes are not started: an embedded engine starts no process of its own.
    """
    config, layer = decoder.config, decoder.weights.layers[0]
    dtype, device = layer.qkv.dtype, layer.qkv.device
    with torch._inductor.config.patch(compile_threads=1):
        for rows in sorted({min(2, batch_sizes[-1]), batch_sizes[0]}, reverse=True):
            x, residual = (
                torch.zeros(rows, config.hidden_size, dtype=dtype, device=device) for _ in range(2)
            )
            attended = torch.zeros(rows, config.q_size, dtype=dtype, device=device)
            if rows > 1:
                for tensor in (x, residual, attended):
                    torch._dynamo.mark_dynamic(tensor, 0, min=2)
            functions.attention_input(
                x, residual, layer.input_norm, layer.qkv, layer.qkv_bias, config.rms_norm_eps
            )
            functions.attention_output(
                attended,
                residual,
                layer.o,
                layer.post_norm,
                layer.gate_up,
                layer.down,
                config.rms_norm_eps,
            )
