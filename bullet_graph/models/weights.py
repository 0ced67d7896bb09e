"""A model's weights: their shapes, names, memory and random values; :mod:`checkpoint` reads files."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bullet_graph.kernels.ops import HeadNorms
from bullet_graph.models.config import DtypeName, ModelConfig
from bullet_graph.models.layers import Layer, Linear, Mlp, SelfAttention

_DUMMY_BIAS_STD = 0.02


def torch_dtype(name: DtypeName) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder.

    ``embed`` and ``lm_head`` are [vocab_size, hidden_size], and one tensor if the embeddings are tied.
    """

    embed: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Tensor


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by Hugging Face's names; no ``lm_head`` with tied embeddings."""
    weights = zero_weights(config, dtype=torch.float32, device=torch.device("meta"))
    return {name: tuple(tensor.shape) for name, tensor in checkpoint_views(config, weights)}


def fill_dummy(config: ModelConfig, weights: ModelWeights, *, seed: int) -> Iterator[int]:
    """Draw random weights on the current stream, and yield the bytes of each tensor.

    The same seed, dtype and kind of device give the same weights. Matrices are normal with variance 1 / in_features:
    activations keep their size at any depth. Norms are 1 and biases small.
    """
    generator = torch.Generator(weights.embed.device).manual_seed(seed)
    for name, view in checkpoint_views(config, weights):
        if name.endswith(".bias"):
            view.normal_(0.0, _DUMMY_BIAS_STD, generator=generator)
        elif view.dim() == 1:
            view.fill_(1.0)
        else:
            view.normal_(0.0, view.shape[1] ** -0.5, generator=generator)
        yield view.nbytes


def zero_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Weights to fill later; until then, a forward with them gives no NaN."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    qkv_size = config.q_size + 2 * config.kv_size
    embed = zeros(config.vocab_size, config.hidden_size)
    layers = tuple(
        Layer(
            input_norm=zeros(config.hidden_size),
            attention=SelfAttention(
                qkv=Linear(zeros(qkv_size, config.hidden_size), zeros(qkv_size) if config.qkv_bias else None),
                o=Linear(zeros(config.hidden_size, config.q_size)),
                head_norms=HeadNorms(zeros(config.head_dim), zeros(config.head_dim), config.rms_norm_eps)
                if config.qk_norm
                else None,
            ),
            post_norm=zeros(config.hidden_size),
            mlp=Mlp(
                gate_up=Linear(zeros(2 * config.intermediate_size, config.hidden_size)),
                down=Linear(zeros(config.hidden_size, config.intermediate_size)),
            ),
        )
        for _ in range(config.num_layers)
    )
    return ModelWeights(
        embed=embed,
        layers=layers,
        final_norm=zeros(config.hidden_size),
        lm_head=embed if config.tie_word_embeddings else zeros(config.vocab_size, config.hidden_size),
    )


def checkpoint_views(config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a checkpoint: its Hugging Face name, and the view of ``weights`` that holds it."""
    qkv_sizes = [config.q_size, config.kv_size, config.kv_size]
    yield "model.embed_tokens.weight", weights.embed
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        attention, mlp = layer.attention, layer.mlp
        yield f"{prefix}.input_layernorm.weight", layer.input_norm
        for name, view in zip("qkv", torch.split(attention.qkv.weight, qkv_sizes), strict=True):
            yield f"{prefix}.self_attn.{name}_proj.weight", view
        if attention.qkv.bias is not None:
            for name, view in zip("qkv", torch.split(attention.qkv.bias, qkv_sizes), strict=True):
                yield f"{prefix}.self_attn.{name}_proj.bias", view
        if attention.head_norms is not None:
            yield f"{prefix}.self_attn.q_norm.weight", attention.head_norms.q
            yield f"{prefix}.self_attn.k_norm.weight", attention.head_norms.k
        yield f"{prefix}.self_attn.o_proj.weight", attention.o.weight
        yield f"{prefix}.post_attention_layernorm.weight", layer.post_norm
        for name, view in zip(("gate", "up"), mlp.gate_up.weight.chunk(2), strict=True):
            yield f"{prefix}.mlp.{name}_proj.weight", view
        yield f"{prefix}.mlp.down_proj.weight", mlp.down.weight
    yield "model.norm.weight", weights.final_norm
    if weights.lm_head is not weights.embed:
        yield "lm_head.weight", weights.lm_head
