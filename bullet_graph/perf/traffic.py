"""How many bytes a decode step must move, counted from a model's shape alone."""

from typing import Protocol


class DecoderShape(Protocol):
    """The numbers of a dense decoder that decide its memory traffic (``ModelConfig`` has them all)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


def kv_cache_bytes_per_token(shape: DecoderShape, *, dtype_bytes: int) -> int:
    """Bytes that one token's keys and values take in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype_bytes


def decode_weight_bytes(shape: DecoderShape, *, batch_size: int, dtype_bytes: int) -> int:
    """Bytes of weights that one decode step reads.

    Every layer's matrices, norms and biases and the whole output head (tied or not) are read once, whatever
    the batch; of the embedding table only one row a sequence.
    """
    qkv_columns = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = (
        shape.hidden_size * qkv_columns
        + shape.num_heads * shape.head_dim * shape.hidden_size
        + 3 * shape.hidden_size * shape.intermediate_size
        + 2 * shape.hidden_size
        + (qkv_columns if shape.qkv_bias else 0)
        + (2 * shape.head_dim if shape.qk_norm else 0)
    )
    final_norm_and_head = shape.hidden_size * (1 + shape.vocab_size)
    embedding_rows = batch_size * shape.hidden_size
    return (shape.num_layers * layer + final_norm_and_head + embedding_rows) * dtype_bytes


def decode_step_bytes(
    shape: DecoderShape, *, batch_size: int, context_tokens: float, dtype_bytes: int
) -> float:
    """Bytes one decode step must move at least: weights, the KV cache read and the tokens added to it.

    Activations are left out: they stay in the caches of any device that could run the model.

    Args:
        shape: the model.
        batch_size: sequences in the step.
        context_tokens: tokens each sequence attends to, the one being decoded included; may be a mean.
        dtype_bytes: size of a weight and of a KV-cache element.
    """
    kv_per_token = kv_cache_bytes_per_token(shape, dtype_bytes=dtype_bytes)
    kv_moved = batch_size * (context_tokens + 1) * kv_per_token
    return decode_weight_bytes(shape, batch_size=batch_size, dtype_bytes=dtype_bytes) + kv_moved
