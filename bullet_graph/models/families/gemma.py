"""Gemma 3, text alone: norms on both sides, GeGLU, scaled embeddings, and two RoPEs by kind of layer."""

import math
from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.json_files import JsonObject
from bullet_graph.models.rope import Rope, read_rope_entry


def read_gemma3(config: JsonObject) -> ModelConfig:
    config = config.with_defaults(
        tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh",
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=4096,
    )
    pattern = config.read("sliding_window_pattern", int, default=6)
    # The two RoPEs are read below.
    common = config.with_values(rope_parameters=None, rope_scaling=None)
    model = read_dense_config(common, activation_key="hidden_activation", slides=lambda i: (i + 1) % pattern != 0)
    whole, local = _ropes(config, model.head_dim)
    return replace(
        model,
        rope=whole,
        layer_ropes=tuple(whole if window is None else local for window in model.windows),
        attention_scale=config.read("query_pre_attn_scalar", float) ** -0.5,
        norms="both",
        norm_plus_one=True,
        qk_norm=True,
        embedding_multiplier=math.sqrt(model.hidden_size),
    )


def _ropes(config: JsonObject, head_dim: int) -> list[Rope]:
    """RoPE of layers without and with a window: nested in transformers 5; ``rope_scaling`` is of the first."""
    config = config.with_defaults(rope_parameters={}, rope_scaling={}, rope_theta=1e6, rope_local_base_freq=1e4)
    ropes, scaling = [], config.nested("rope_scaling").values
    for kind, theta in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        rope = config.nested("rope_parameters").with_defaults(**{kind: {}}).nested(kind).with_values(**scaling)
        rope = rope.with_defaults(rope_theta=config.read(theta, float))
        ropes.append(read_rope_entry(config, rope, head_dim))
        scaling = {}
    return ropes
