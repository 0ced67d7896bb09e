"""Configs as published with transformers 4 read as those that transformers 5 writes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from bullet_graph.errors import ModelError, UnsupportedModelError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import load_model_config
from bullet_graph.models.rope import Rope, RopeDivisors

COMMON: dict[str, Any] = json.loads("""{
    "vocab_size": 1000, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
    "num_hidden_layers": 12, "num_key_value_heads": 1, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16", "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0
}""")
GEMMA = COMMON | json.loads("""{
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": null,
    "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6
}""")
PHI = COMMON | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_act": "silu",
    "hidden_size": 512,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.1] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
SMOLLM = COMMON | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "no_rope_layers": [1, 1, 1, 0] * 3,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "use_sliding_window": False,
}
OLMO = COMMON | json.loads("""{
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rope_scaling": null, "rope_theta": 500000,
    "tie_word_embeddings": false
}""")
GRANITE = COMMON | json.loads("""{
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "rope_scaling": null,
    "rope_theta": 10000000.0, "tie_word_embeddings": true
}""")
QWEN = COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0}
MIXTRAL = COMMON | json.loads("""{
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2, "rope_theta": 1000000.0, "sliding_window": null
}""")
QWEN3_MOE = COMMON | json.loads("""{
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
    "num_experts": 128, "num_experts_per_tok": 8, "rope_scaling": null, "rope_theta": 1000000.0,
    "sliding_window": null, "use_sliding_window": false
}""")
QWEN2_MOE = QWEN3_MOE | json.loads("""{
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "max_window_layers": 21,
    "norm_topk_prob": false, "shared_expert_intermediate_size": 5632, "sliding_window": 32768
}""")
YARN = {"factor": 4.0, "original_max_position_embeddings": 8192, "type": "yarn"}

PUBLISHED = {
    "gemma": GEMMA,
    "gemma, scaled": GEMMA | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gemma, by defaults": {key: value for key, value in GEMMA.items() if "rope" not in key and "attn" not in key},
    "phi": PHI,
    "phi, unscaled": PHI | {"rope_scaling": None, "partial_rotary_factor": 1.0, "sliding_window": 2047},
    "phi, before": PHI
    | {"rope_scaling": PHI["rope_scaling"] | {"type": "su", "original_max_position_embeddings": 4096}},
    "smollm": SMOLLM,
    "smollm, by interval": SMOLLM | {"no_rope_layers": None, "no_rope_layer_interval": 3},
    "olmo": OLMO,
    "granite": GRANITE,
    "qwen with yarn": QWEN | {"rope_scaling": YARN},
    "qwen with yarn and all keys": QWEN
    | {"rope_scaling": YARN | {"attention_factor": 1.1, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    "qwen, dynamic": QWEN | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "qwen, linear": QWEN | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "mixtral": MIXTRAL,
    "mixtral with a window": MIXTRAL | {"sliding_window": 64},
    "qwen3 moe": QWEN3_MOE,
    "qwen3 moe with windows": QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 64},
    "qwen2 moe": QWEN2_MOE,
    "qwen2 moe with windows": QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 7},
    "qwen with windows": QWEN | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 7},
}


def load(folder: Path, config: dict[str, Any]) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_model_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    published = load(tmp_path / "published", PUBLISHED[name])
    AutoConfig.from_pretrained(tmp_path / "published").save_pretrained(tmp_path / "written")
    assert load_model_config(tmp_path / "written") == published


def test_yarn_extends_what_its_config_leaves_as_it_was(tmp_path: Path) -> None:
    short = PUBLISHED["qwen with yarn"] | {"max_position_embeddings": 10000}
    assert load(tmp_path, short).max_position_embeddings == 4 * 8192
    assert load(tmp_path, short | {"max_position_embeddings": 40960}).max_position_embeddings == 40960


def test_what_gemma_s_keys_mean(tmp_path: Path) -> None:
    model = load(tmp_path, PUBLISHED["gemma, scaled"])
    local, whole = Rope(1e4), Rope(1e6, RopeDivisors((8.0,) * 128))
    assert model.layer_ropes == (*(local,) * 5, whole) * 2
    assert model.layer_windows == (*(512,) * 5, None) * 2
    assert model.tie_word_embeddings
    assert (model.attention_scale, model.embedding_multiplier) == (1 / 16, 1152**0.5)


def test_what_phi_s_keys_mean(tmp_path: Path) -> None:
    model = load(tmp_path, PHI)
    assert (model.rotary_dim, model.fused_projections) == (96, True)
    assert isinstance(model.rope.scaling, RopeDivisors)
    # √(1 + ln(32768 / 4096) / ln(4096))
    assert model.rope.scaling.attention_factor == pytest.approx(1.118034)


@pytest.mark.parametrize(
    ("base", "key", "value", "error"),
    [
        (GEMMA, "attn_logit_softcapping", 50.0, UnsupportedModelError),
        (GEMMA, "hidden_activation", "gelu", UnsupportedModelError),
        (GEMMA, "layer_types", ["sliding_attention"], UnsupportedModelError),
        (GEMMA, "layer_types", ["chunked_attention"] * 12, UnsupportedModelError),
        (GEMMA, "use_bidirectional_attention", True, UnsupportedModelError),
        (GEMMA, "query_pre_attn_scalar", 0, ModelError),
        (PHI, "partial_rotary_factor", 1.5, ModelError),
        (PHI, "partial_rotary_factor", 0.002, ModelError),
        (PHI, "sliding_window", -1, ModelError),
        (SMOLLM, "no_rope_layers", [1, 0], ModelError),
        (SMOLLM, "no_rope_layers", [2] * 12, ModelError),
        (SMOLLM, "use_sliding_window", True, UnsupportedModelError),
        (GRANITE, "logits_scaling", 0, ModelError),
        *((base, "attention_bias", True, UnsupportedModelError) for base in (GEMMA, SMOLLM, OLMO, GRANITE)),
        (GRANITE, "mlp_bias", True, UnsupportedModelError),
        (QWEN, "max_window_layers", -1, ModelError),
        (QWEN3_MOE, "mlp_only_layers", [3], UnsupportedModelError),
        (QWEN2_MOE, "decoder_sparse_step", 2, UnsupportedModelError),
        (QWEN3_MOE, "hidden_act", "gelu_pytorch_tanh", UnsupportedModelError),
        (QWEN3_MOE, "num_experts", 2000, ModelError),
        (QWEN3_MOE, "num_experts_per_tok", 129, ModelError),
        (QWEN2_MOE, "shared_expert_intermediate_size", 0, ModelError),
        (MIXTRAL, "num_experts_per_tok", 9, ModelError),
    ],
)
def test_refused_key(base: dict[str, Any], key: str, value: Any, error: type[ModelError], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"config.json: {key} must be ") as caught:
        load(tmp_path, base | {"use_sliding_window": base is QWEN, key: value})
    assert type(caught.value) is error
