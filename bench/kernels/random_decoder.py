"""A decoder to time: random weights, and a cache full of random keys and values."""

from bench.kernels.decode_inputs import DEVICE, DTYPE
from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.kernels.memory import KVCache
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder, cos_sin_table
from bullet_graph.models.weights import dummy_weights


def random_decoder(config: ModelConfig, *, num_blocks: int, max_positions: int) -> Decoder:
    """On the GPU, in bfloat16.

    Args:
        config: the model's shape.
        num_blocks: of the cache.
        max_positions: tokens of the longest sequence.
    """
    weights = dummy_weights(config, dtype=DTYPE, device=DEVICE, seed=0)
    cache = KVCache(config, num_blocks=num_blocks, block_tokens=KV_BLOCK_TOKENS, dtype=DTYPE, device=DEVICE)
    for index in range(config.num_layers):
        for half in cache.layer(index):
            half.normal_()
    return Decoder(config, weights, cache, cos_sin_table(config, max_positions, DEVICE))
