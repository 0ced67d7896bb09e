"""Granite: as Llama, with multipliers of embeddings, attention scores and residuals, and a divisor of logits."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject


def read_granite(config: JsonObject) -> ModelConfig:
    return replace(
        read_dense_config(config),
        embedding_multiplier=config.read("embedding_multiplier", float, default=1.0),
        attention_scale=config.read("attention_multiplier", float, default=1.0),
        residual_multiplier=config.read("residual_multiplier", float, default=1.0),
        logits_divisor=config.read("logits_scaling", float, default=1.0),
    )
