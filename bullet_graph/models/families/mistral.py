"""Mistral: as Llama, without scaled RoPE; some models attend to a window of the last tokens, in all layers.

Mixtral: as Mistral, with experts instead of MLPs; the weights of a row's experts add up to 1.
"""

from dataclasses import replace

from bullet_graph.models.config import ModelConfig, read_dense_config, with_experts
from bullet_graph.models.families.llama import LLAMA_3_1_8B
from bullet_graph.models.json_files import JsonObject
from bullet_graph.models.rope import Rope


def read_mistral(config: JsonObject) -> ModelConfig:
    # As Hugging Face's config class: 4096 by default, null means none, and all layers are alike.
    values = {"sliding_window": 4096, **config.values, "layer_types": None}
    return read_dense_config(replace(config, values=values), slides=lambda _: True)


def read_mixtral(config: JsonObject) -> ModelConfig:
    # As Hugging Face's config class: no window by default, and all layers are alike.
    config = replace(config, values={**config.values, "layer_types": None}).with_defaults(
        rope_theta=1_000_000.0, num_local_experts=8, num_experts_per_tok=2
    )
    model = read_dense_config(config, has_experts=True, slides=lambda _: True)
    return with_experts(model, config, expert_size=model.intermediate_size, renormalize=True, mixtral_names=True)


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
