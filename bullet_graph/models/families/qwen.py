"""Qwen2 and Qwen2.5, whose q, k and v have a bias, and Qwen3, which norms each query and key head before RoPE.

Both come with experts instead of MLPs, too; Qwen2's have a shared expert with a gate besides.
"""

from dataclasses import replace

from bullet_graph.models.config import MAX_WIDTH, ModelConfig, read_dense_config, with_experts
from bullet_graph.models.families.llama import LLAMA_3_1_8B, TINY
from bullet_graph.models.json_files import JsonObject
from bullet_graph.models.rope import Rope


def read_qwen2(config: JsonObject) -> ModelConfig:
    # Whatever attention_bias says.
    return replace(_read_dense_config(config.with_values(attention_bias=None)), qkv_bias=True)


def read_qwen3(config: JsonObject) -> ModelConfig:
    if config.get("head_dim") is None:
        config.fail("head_dim", "given: Qwen3's does not follow from hidden_size")
    return replace(_read_dense_config(config), qk_norm=True)


def _with_window(config: JsonObject) -> JsonObject:
    """With the window that Hugging Face's config classes mean; one that is null is none."""
    values = {"sliding_window": 4096, **config.values}
    if not config.read("use_sliding_window", bool, default=False):
        values["sliding_window"] = None
    return replace(config, values=values)


def _read_dense_config(config: JsonObject) -> ModelConfig:
    config = _with_window(config).with_defaults(max_window_layers=28)
    first = config.get("max_window_layers") and config.read("max_window_layers", int)
    return read_dense_config(config, slides=lambda layer: layer >= first)


def read_qwen2_moe(config: JsonObject) -> ModelConfig:
    # Whatever attention_bias says.
    config = config.with_values(attention_bias=None).with_defaults(max_window_layers=28)
    first = config.get("max_window_layers") and config.read("max_window_layers", int)
    # By Hugging Face's config class, every other layer below it slides.
    config = _with_window(config)
    model = read_dense_config(config, has_experts=True, slides=lambda layer: layer % 2 == 0 and layer < first)
    shared_size = config.read("shared_expert_intermediate_size", int, at_most=MAX_WIDTH)
    return replace(_with_experts(model, config, shared_size), qkv_bias=config.read("qkv_bias", bool, default=True))


def read_qwen3_moe(config: JsonObject) -> ModelConfig:
    # A window is that of all layers.
    config = config.with_values(layer_types=None)
    model = read_dense_config(_with_window(config), has_experts=True, slides=lambda _: True)
    return replace(_with_experts(model, config), qk_norm=True)


def _with_experts(model: ModelConfig, config: JsonObject, shared_size: int = 0) -> ModelConfig:
    return with_experts(
        model,
        config,
        expert_size=config.read("moe_intermediate_size", int, at_most=MAX_WIDTH),
        renormalize=config.read("norm_topk_prob", bool, default=False),
        shared_size=shared_size,
    )


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

QWEN3_30B_A3B = replace(
    QWEN3_8B,
    architecture="Qwen3MoeForCausalLM",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_kv_heads=4,
    num_experts=128,
    experts_per_token=8,
    expert_intermediate_size=768,
    renormalize_experts=True,
)

QWEN3_235B_A22B = replace(
    QWEN3_30B_A3B, hidden_size=4096, intermediate_size=12288, num_layers=94, num_heads=64, expert_intermediate_size=1536
)

TINY_MOE = replace(
    TINY,
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    num_experts=16,
    experts_per_token=4,
    expert_intermediate_size=96,
    renormalize_experts=True,
)
"""For CPUs and tests."""
