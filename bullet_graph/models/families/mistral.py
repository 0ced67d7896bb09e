"""Mistral: as Llama, without scaled RoPE; some models attend to a window of the last tokens, in all layers."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject


def read_mistral(config: JsonObject) -> ModelConfig:
    # As Hugging Face's config class: 4096 by default, null means none, and all layers are alike.
    values = {"sliding_window": 4096, **config.values, "layer_types": None}
    return read_dense_config(replace(config, values=values), slides=lambda _: True)
