"""Decoders of random weights, or of a checkpoint's, for tests of what runs forwards."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch

from bullet_graph.kernels.memory import KVCache
from bullet_graph.models.checkpoint import open_checkpoint
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder, cos_sin_tables
from bullet_graph.models.presets import PRESETS, load_model_config
from bullet_graph.models.rope import Rope
from bullet_graph.models.weights import ModelWeights, checkpoint_views, fill_dummy, zero_weights
from bullet_graph.perf.roofline import Fp8Weights

TINY = PRESETS["tiny"]
VARIANTS: dict[str, ModelConfig] = {
    "plain": TINY,
    "qwen2": replace(TINY, qkv_bias=True),
    "gemma3": replace(
        TINY,
        norms="both",
        norm_plus_one=True,
        qk_norm=True,
        gelu=True,
        layer_ropes=(Rope(100.0), TINY.rope) * 2,
        attention_scale=0.1,
        embedding_multiplier=11.3,
    ),
    "fp8": replace(TINY, fp8=Fp8Weights()),
    "fp8-blocks": replace(TINY, fp8=Fp8Weights(blocks=True, plain=("qkv",))),
    "granite": replace(TINY, attention_scale=0.1, residual_multiplier=0.3, logits_divisor=7.0),
    "olmo2": replace(TINY, norms="after", qk_norm=True, qk_norm_spans_heads=True),
    "phi3": replace(TINY, rotary_dim=48),
    "smollm3": replace(TINY, layer_ropes=(None, TINY.rope) * 2),
    "experts": PRESETS["tiny-moe"],
    "shared expert": replace(PRESETS["tiny-moe"], shared_expert_intermediate_size=64, renormalize_experts=False),
    "fp8 experts": replace(
        PRESETS["tiny-moe"], expert_intermediate_size=128, shared_expert_intermediate_size=64, fp8=Fp8Weights()
    ),
    "fp8-blocks experts": replace(
        PRESETS["tiny-moe"], expert_intermediate_size=128, fp8=Fp8Weights(blocks=True, plain=("qkv",))
    ),
    "skewed router": replace(PRESETS["tiny-moe"], router_bias=True),
}
"""Each way in which layers differ between families."""


def dummy_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int) -> ModelWeights:
    weights = zero_weights(config, dtype=dtype, device=device)
    for _ in fill_dummy(config, weights, seed=seed):
        pass
    return weights


def read_weights(
    folder: Path, config: ModelConfig | None = None, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> ModelWeights:
    """A checkpoint's weights, held as its config says or as the one given."""
    config = config or load_model_config(folder)
    with open_checkpoint(folder, config) as checkpoint:
        weights = zero_weights(config, dtype=dtype, device=torch.device(device))
        assert sum(checkpoint.fill(weights)) == checkpoint.num_bytes or config.stored_head_dim is not None
    return weights


def tensors_of(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of nested weights, by its path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    parts = dict(enumerate(value)) if isinstance(value, tuple) else {}
    if hasattr(value, "_asdict"):
        parts = value._asdict()
    elif is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    return {k: v for key, part in parts.items() for k, v in tensors_of(part, f"{name}.{key}").items()}


def new_decoder(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_tokens: int = 16,
    max_len: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    random_cache: bool = False,
) -> Decoder:
    """The same weights each time; the cache is zero, or random with ``random_cache``."""
    on = torch.device(device)
    cache = KVCache(config, num_blocks=num_blocks, block_tokens=block_tokens, dtype=dtype, device=on)
    if random_cache:
        generator = torch.Generator(on).manual_seed(7)
        for layer in range(config.num_layers):
            for half in cache.layer(layer):
                half.copy_(torch.randn(half.shape, generator=generator, device=on, dtype=dtype))
    weights = dummy_weights(config, dtype=dtype, device=on, seed=2)
    generator = torch.Generator(on).manual_seed(2)
    # Dummy norms are 1: any could be left out unseen.
    for name, view in checkpoint_views(config, weights):
        if name.endswith("norm.weight"):
            view.uniform_(0.5, 1.5, generator=generator)
    return Decoder(config, weights, cache, cos_sin_tables(config, max_len, on))


def read_decoder(folder: Path, *, num_blocks: int, dtype: torch.dtype, device: str) -> Decoder:
    """A checkpoint's weights, with a cache of blocks of 16 tokens."""
    config, on = load_model_config(folder), torch.device(device)
    weights = read_weights(folder, config, dtype=dtype, device=device)
    cache = KVCache(config, num_blocks=num_blocks, block_tokens=16, dtype=dtype, device=on)
    return Decoder(config, weights, cache, cos_sin_tables(config, num_blocks * 16, on))
