"""Operations and bytes of a workload and of a decode step, counted from the model's shape and the lengths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bullet_graph.perf.traffic import (
    DecoderShape,
    decode_step_bytes,
    decode_weight_bytes,
    kv_cache_bytes_per_token,
)
from bullet_graph.perf.waves import layer_matrices
from bullet_graph.workloads import WorkloadRequest

_FLOPS_PER_WEIGHT = 2
_DTYPE_BYTES = 2
"""Of bfloat16, which all targets are for."""


@dataclass(frozen=True, slots=True)
class ServingWork:
    """What all requests of a workload ask for at least.

    Each token goes through the layers once, but for a request's last, which nobody reads on. Of the last layer, keys
    and values are needed of all tokens, the rest and the output head only of those that are sampled.

    Attributes:
        layer_flops: of the layers' matrix products.
        head_flops: of the output head.
        attention_flops: of prompts attending to themselves, causally.
        kv_bytes: of keys and values that decode rows read, each row all tokens before it and its own.
    """

    layer_flops: float
    head_flops: float
    attention_flops: float
    kv_bytes: float


def serving_work(shape: DecoderShape, requests: Sequence[WorkloadRequest]) -> ServingWork:
    """Count the work of a workload in bfloat16."""
    qkv, *others = (_FLOPS_PER_WEIGHT * math.prod(matrix) for matrix in layer_matrices(shape))
    sampled = sum(request.output_tokens for request in requests)
    rows = sum(request.prompt_tokens + request.output_tokens - 1 for request in requests)
    # A query and a key are multiplied, and the result with a value: two products a pair of tokens, head and element.
    pair_flops = 2 * _FLOPS_PER_WEIGHT * shape.num_heads * shape.head_dim
    pairs = sum(request.prompt_tokens * (request.prompt_tokens + 1) / 2 for request in requests)
    last_layer_pairs = sum(request.prompt_tokens for request in requests)
    kv_tokens = sum(
        (r.output_tokens - 1) * (r.prompt_tokens + r.output_tokens / 2)  # p + 1, ..., p + output_tokens - 1
        for r in requests
    )
    return ServingWork(
        layer_flops=(shape.num_layers * qkv + (shape.num_layers - 1) * sum(others)) * rows
        + sum(others) * sampled,
        head_flops=_FLOPS_PER_WEIGHT * shape.hidden_size * shape.vocab_size * sampled,
        attention_flops=pair_flops * ((shape.num_layers - 1) * pairs + last_layer_pairs),
        kv_bytes=kv_tokens * kv_cache_bytes_per_token(shape, dtype_bytes=_DTYPE_BYTES),
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a decode step asks for at least.

    Attributes:
        product_flops: of the layers' matrix products and the output head.
        weight_bytes: read once.
        kv_bytes: read, and those of the new tokens.
    """

    product_flops: float
    weight_bytes: float
    kv_bytes: float


def step_work(shape: DecoderShape, batch_size: int, context: float) -> StepWork:
    """Count the work of a decode step in bfloat16."""
    weights = shape.num_layers * sum(map(math.prod, layer_matrices(shape)))
    weights += shape.hidden_size * shape.vocab_size
    weight_bytes = decode_weight_bytes(shape, batch_size=batch_size, dtype_bytes=_DTYPE_BYTES)
    step_bytes = decode_step_bytes(
        shape, batch_size=batch_size, context_tokens=context, dtype_bytes=_DTYPE_BYTES
    )
    return StepWork(
        product_flops=_FLOPS_PER_WEIGHT * weights * batch_size,
        weight_bytes=weight_bytes,
        kv_bytes=step_bytes - weight_bytes,
    )
