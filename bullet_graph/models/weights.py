"""The tensors of a decoder, as frozen values; projections that share an input are stored fused."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer; every matrix is [out_features, in_features], as ``F.linear`` takes it.

    Attributes:
        input_norm: [hidden_size], RMSNorm before attention.
        qkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]; rows are q, then k, then v.
        qkv_bias: [(num_heads + 2 * num_kv_heads) * head_dim] or None.
        q_norm: [head_dim] RMSNorm over each query head (Qwen3) or None.
        k_norm: [head_dim] RMSNorm over each key head (Qwen3) or None.
        o: [hidden_size, num_heads * head_dim].
        post_norm: [hidden_size], RMSNorm before the MLP.
        gate_up: [2 * intermediate_size, hidden_size]; rows are gate, then up.
        down: [hidden_size, intermediate_size].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder.

    Attributes:
        embed: [vocab_size, hidden_size].
        layers: one entry a layer, first to last.
        final_norm: [hidden_size].
        lm_head: [vocab_size, hidden_size]; the same tensor as ``embed`` when the embeddings are tied.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor
