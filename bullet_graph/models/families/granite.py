"""Granite: as Llama, with multipliers of embeddings, attention scores and residuals, and a divisor of logits."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject

GRANITE = "GraniteForCausalLM"


def read_granite(config: JsonObject) -> ModelConfig:
    config.refuse("attention_bias")
    return replace(
        read_dense_config(config, GRANITE),
        embedding_multiplier=config.read("embedding_multiplier", float, default=1.0),
        attention_scale=config.read("attention_multiplier", float, default=1.0),
        residual_multiplier=config.read("residual_multiplier", float, default=1.0),
        logits_divisor=config.read("logits_scaling", float, default=1.0),
    )
