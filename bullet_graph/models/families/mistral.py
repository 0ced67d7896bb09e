"""Mistral: as Llama, without scaled RoPE; some models attend to a window of the last tokens, in all layers."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config, with_window
from bullet_graph.models.json_files import JsonObject

MISTRAL = "MistralForCausalLM"


def read_mistral(config: JsonObject) -> ModelConfig:
    # The default of Hugging Face's config class; null means none.
    config = replace(config, values={"sliding_window": 4096, **config.values})
    return with_window(config, read_dense_config(config, MISTRAL))
