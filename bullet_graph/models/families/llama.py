"""Llama 3.x, and families that read its config with few changes: Granite, Mistral, Mixtral, OLMo 2, Phi-3, SmolLM3.

Llama has no biases; from 3.1 on, RoPE's low frequencies are scaled.
"""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config, with_experts
from bullet_graph.models.json_files import JsonObject
from bullet_graph.models.rope import Llama3RopeScaling, Rope

_ROPE = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)

LLAMA_3_1_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope=Rope(500000.0, _ROPE),
    dtype="bfloat16",
    # Of the instruct models: <|end_of_text|>, <|eom_id|>, <|eot_id|>.
    eos_token_ids=(128001, 128008, 128009),
)

LLAMA_3_1_70B = replace(LLAMA_3_1_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
LLAMA_3_1_405B = replace(LLAMA_3_1_8B, hidden_size=16384, intermediate_size=53248, num_layers=126, num_heads=128)

LLAMA_3_2_1B = replace(
    LLAMA_3_1_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope=Rope(500000.0, replace(_ROPE, factor=32.0)),
    tie_word_embeddings=True,
)

MIXTRAL_8X7B = replace(
    LLAMA_3_1_8B,
    architecture="MixtralForCausalLM",
    vocab_size=32000,
    max_position_embeddings=32768,
    rope=Rope(1000000.0),
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=14336,
    renormalize_experts=True,
    mixtral_names=True,
    eos_token_ids=(2,),
)

TINY = replace(
    LLAMA_3_1_8B,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    # Heads of 64: the smallest that the GPU's attention kernels come in.
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    # Long enough for the prompts of the long-document trace.
    max_position_embeddings=16384,
    rope=Rope(10000.0),
    dtype="float32",
    eos_token_ids=(),
)
"""For CPUs and tests."""


def read_granite(config: JsonObject) -> ModelConfig:
    """As Llama, with multipliers of embeddings, attention scores and residuals, and a divisor of logits."""
    return replace(
        read_dense_config(config),
        embedding_multiplier=config.read("embedding_multiplier", float, default=1.0),
        attention_scale=config.read("attention_multiplier", float, default=1.0),
        residual_multiplier=config.read("residual_multiplier", float, default=1.0),
        logits_divisor=config.read("logits_scaling", float, default=1.0),
    )


def read_mistral(config: JsonObject) -> ModelConfig:
    """As Llama, without scaled RoPE; some models attend to a window of the last tokens, Ministral in some layers."""
    # As Hugging Face's config class: 4096 by default, null means none, and without layer_types all layers are alike.
    values = {"sliding_window": 4096, **config.values}
    return read_dense_config(replace(config, values=values), slides=lambda _: True)


def read_mixtral(config: JsonObject) -> ModelConfig:
    """As Mistral, with experts instead of MLPs; the weights of a row's experts add up to 1."""
    # As Hugging Face's config class: no window by default, and all layers are alike.
    config = config.with_values(layer_types=None).with_defaults(
        rope_theta=1_000_000.0, num_local_experts=8, num_experts_per_tok=2
    )
    model = read_dense_config(config, has_experts=True, slides=lambda _: True)
    return with_experts(model, config, expert_size=model.intermediate_size, renormalize=True, mixtral_names=True)


def read_olmo2(config: JsonObject) -> ModelConfig:
    """Norms after attention and MLP instead of before, and over all query heads and all key heads."""
    return replace(read_dense_config(config), norms="after", qk_norm=True, qk_norm_spans_heads=True)


def read_phi3(config: JsonObject) -> ModelConfig:
    """Fused projections in the checkpoint; some models rotate only a part of each head, or use LongRoPE."""
    config = config.with_defaults(original_max_position_embeddings=4096)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        # Earlier names of LongRoPE, by which transformers means it here.
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            config = config.with_values(**{key: {**rope, "rope_type": "longrope"}})
    return read_dense_config(config, fused_projections=True, slides=lambda _: True)


def read_smollm3(config: JsonObject) -> ModelConfig:
    """As Llama, but some layers do not encode positions."""
    config = config.with_defaults(tie_word_embeddings=True, rope_theta=2000000.0)
    model = read_dense_config(config)
    interval = config.read("no_rope_layer_interval", int, default=4)
    # 1 where a layer has RoPE, despite the key's name.
    layers = config.get("no_rope_layers")
    if layers is None:
        layers = [int((layer + 1) % interval != 0) for layer in range(model.num_layers)]
    if not isinstance(layers, list) or len(layers) < model.num_layers or not all(x in (0, 1) for x in layers):
        config.fail("no_rope_layers", f"a list of 0 or 1 for each of {model.num_layers} layers")
    ropes = tuple(model.rope if has_rope else None for has_rope in layers[: model.num_layers])
    return replace(model, layer_ropes=ropes)
