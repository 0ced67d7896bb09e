"""Phi-3 and Phi-4-mini: fused projections in the checkpoint; some rotate only a part of each head, or use LongRoPE."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject


def read_phi3(config: JsonObject) -> ModelConfig:
    config = config.with_defaults(original_max_position_embeddings=4096)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        # Earlier names of LongRoPE, by which transformers means it here.
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            config = replace(config, values={**config.values, key: {**rope, "rope_type": "longrope"}})
    return read_dense_config(config, fused_projections=True, slides=lambda _: True)
