"""Qwen2 and Qwen2.5: the query, key and value projections have a bias, whatever ``attention_bias`` says."""

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(config: JsonObject) -> ModelConfig:
    """See :func:`~bullet_graph.models.config.read_dense_config`."""
    return read_dense_config(config, ARCHITECTURE, qkv_bias=True)
