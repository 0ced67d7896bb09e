"""Mistral: as Llama, without scaled RoPE; some models attend to a window of the last tokens, in all layers."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject

MISTRAL = "MistralForCausalLM"


def read_mistral(config: JsonObject) -> ModelConfig:
    model = read_dense_config(config, MISTRAL)
    if config.get("sliding_window") is None:
        return model
    window = config.read("sliding_window", int)
    return replace(model, layer_windows=(window,) * model.num_layers)
