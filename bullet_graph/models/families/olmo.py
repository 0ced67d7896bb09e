"""OLMo 2: norms after attention and MLP instead of before, and over all query heads and all key heads."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject


def read_olmo2(config: JsonObject) -> ModelConfig:
    return replace(read_dense_config(config), norms="after", qk_norm=True, qk_norm_spans_heads=True)
