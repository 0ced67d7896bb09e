"""Decoders of random weights, for tests of what runs forwards."""

import torch

from bullet_graph.kernels.memory import KVCache
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder, cos_sin_tables
from bullet_graph.models.weights import ModelWeights, fill_dummy, zero_weights


def dummy_weights(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> ModelWeights:
    weights = zero_weights(config, dtype=dtype, device=device)
    for _ in fill_dummy(config, weights, seed=seed):
        pass
    return weights


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
                half.normal_(generator=generator)
    weights = dummy_weights(config, dtype=dtype, device=on, seed=2)
    return Decoder(config, weights, cache, cos_sin_tables(config, max_len, on))
