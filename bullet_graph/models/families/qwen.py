"""Qwen2 and Qwen2.5, whose q, k and v have a bias, and Qwen3, which norms each query and key head before RoPE."""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config
from bullet_graph.models.families.llama import LLAMA_3_1_8B
from bullet_graph.models.json_files import JsonObject
from bullet_graph.models.rope import Rope


def read_qwen2(config: JsonObject) -> ModelConfig:
    # Whatever attention_bias says.
    config = replace(config, values={**config.values, "attention_bias": None})
    return replace(_read_dense_config(config), qkv_bias=True)


def read_qwen3(config: JsonObject) -> ModelConfig:
    if config.get("head_dim") is None:
        config.fail("head_dim", "given: Qwen3's does not follow from hidden_size")
    return replace(_read_dense_config(config), qk_norm=True)


def with_window(config: JsonObject) -> JsonObject:
    """With the window that Hugging Face's config classes mean; one that is null is none."""
    values = {"sliding_window": 4096, **config.values}
    if not config.read("use_sliding_window", bool, default=False):
        values["sliding_window"] = None
    return replace(config, values=values)


def _read_dense_config(config: JsonObject) -> ModelConfig:
    config = with_window(config).with_defaults(max_window_layers=28)
    first = config.get("max_window_layers") and config.read("max_window_layers", int)
    return read_dense_config(config, slides=lambda layer: layer >= first)


QWEN3_8B = replace(
    LLAMA_3_1_8B,
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    intermediate_size=12288,
    num_layers=36,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope=Rope(1000000.0),
    qk_norm=True,
    eos_token_ids=(151645, 151643),  # <|im_end|>, <|endoftext|>
)

QWEN3_0_6B = replace(
    QWEN3_8B, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_word_embeddings=True
)
