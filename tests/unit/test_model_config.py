import json
import math
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bullet_graph.errors import ConfigError, ModelError, UnsupportedModelError
from bullet_graph.models.json_files import JsonObject
from bullet_graph.models.presets import PRESETS, FoundModel, load_model_config, resolve_model
from bullet_graph.models.rope import Rope, RopeDivisors, read_rope_entry

LLAMA: dict[str, Any] = json.loads("""{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "eos_token_id": 128009, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256
}""")

QWEN3: dict[str, Any] = json.loads("""{
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "use_sliding_window": false, "vocab_size": 151936
}""")

MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "rope_scaling": None, "sliding_window": 4096}

# ---- configs of the families as transformers 4 published them ----

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
PHI = COMMON | json.loads("""{
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu", "hidden_size": 512,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
    "sliding_window": 262144, "tie_word_embeddings": true
}""")
PHI["rope_scaling"] = {"long_factor": [1.5] * 48, "short_factor": [1.1] * 48, "type": "longrope"}
SMOLLM = COMMON | json.loads("""{
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "rope_scaling": null, "rope_theta": 5000000.0,
    "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0], "use_sliding_window": false
}""")
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
GIVEN = {
    *("architectures", "model_type", "head_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("num_experts", "num_experts_per_tok", "num_local_experts"),
}
"""Keys besides the common ones without which the config classes' own sizes are taken."""
YARN = {"factor": 4.0, "original_max_position_embeddings": 8192, "type": "yarn"}

ABSENT = object()


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**base, **changes}.items() if value is not ABSENT}


def scaling(**changes: Any) -> dict[str, Any]:
    return changed(LLAMA["rope_scaling"], **changes)


def test_published_configs_equal_presets(tmp_path: Path) -> None:
    llama_eos = {"eos_token_id": [128001, 128008, 128009]}
    assert load_model_config(write(tmp_path, LLAMA, llama_eos)) == PRESETS["llama-3.1-8b"]
    assert load_model_config(write(tmp_path, QWEN3, {"eos_token_id": [151645, 151643]})) == PRESETS["qwen3-0.6b"]


def test_transformers_5_layout_reads_the_same(tmp_path: Path) -> None:
    expected = load_model_config(write(tmp_path, LLAMA))
    parameters = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    newer = changed(LLAMA, rope_scaling=ABSENT, rope_theta=ABSENT, torch_dtype=ABSENT, dtype="bfloat16")
    assert load_model_config(write(tmp_path, {**newer, "rope_parameters": parameters})) == expected


WINDOW = {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 20}
MIXED = ["sliding_attention", "full_attention"]
UNSCALED = {"rope": Rope(500000.0)}
BASE = {"rope_type": "default", "rope_theta": 500000.0}


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (LLAMA, {"rope_scaling": None}, UNSCALED),
        (LLAMA, {"rope_scaling": {"rope_type": "default"}}, UNSCALED),
        (LLAMA, {"rope_scaling": None, "partial_rotary_factor": 1.0}, UNSCALED),
        (LLAMA, {"rope_scaling": ABSENT, "rope_theta": ABSENT}, {"rope": Rope(10000.0)}),
        (LLAMA, {"rope_scaling": ABSENT, "rope_theta": 3580165449}, {"rope": Rope(3580165449.0)}),
        (LLAMA, {"rope_theta": ABSENT, "rope_parameters": BASE}, {"rope": PRESETS["llama-3.1-8b"].rope}),
        *(
            (LLAMA, {"rope_scaling": ABSENT, "rope_parameters": rope}, {"rope": Rope(7e4)})
            for rope in ({"rope_type": "default", "rope_theta": 7e4}, {"rope_theta": 7e4})
        ),
        (LLAMA, {"torch_dtype": "float16"}, {"dtype": "float16"}),
        (LLAMA, {"torch_dtype": "float16", "dtype": "float32"}, {"dtype": "float32"}),
        (LLAMA, {"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        (LLAMA, {"torch_dtype": ABSENT}, {"dtype": "float32"}),
        (MISTRAL, {}, {"layer_windows": (4096,) * 32, "windows": (4096,) * 32}),
        (MISTRAL, {"sliding_window": None}, {"layer_windows": (), "windows": (None,) * 32}),
        (MISTRAL, {"layer_types": MIXED * 16}, {"layer_windows": (4096, None) * 16}),
        (changed(MISTRAL, sliding_window=ABSENT), {}, {"layer_windows": (4096,) * 32}),
        (QWEN3, {"sliding_window": 99, "layer_types": ["sliding_attention"] * 28}, {"layer_windows": ()}),
        (QWEN3, WINDOW | {"sliding_window": None}, {"layer_windows": ()}),
        (QWEN3, WINDOW, {"layer_windows": (None,) * 20 + (99,) * 8}),
        (QWEN3, WINDOW | {"max_window_layers": 0, "sliding_window": ABSENT}, {"layer_windows": (4096,) * 28}),
        (QWEN3, WINDOW | {"layer_types": MIXED * 14}, {"layer_windows": (99, None) * 14}),
        # An explicit head_dim needs no hidden size that the heads divide.
        (QWEN3, {"hidden_size": 1000}, {"head_dim": 128, "q_size": 2048, "kv_size": 1024}),
    ],
)
def test_what_keys_say(tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = load_model_config(write(tmp_path, changed(base, **changes)))
    assert {name: getattr(config, name) for name in expected} == expected


def test_older_llama_configs(tmp_path: Path) -> None:
    absent = ("num_key_value_heads", "attention_bias", "mlp_bias", "tie_word_embeddings")
    older = changed(LLAMA, rope_scaling=scaling(rope_type=ABSENT, type="llama3"), **dict.fromkeys(absent, ABSENT))
    expected = replace(PRESETS["llama-3.1-8b"], num_kv_heads=32, eos_token_ids=(128009,))
    assert load_model_config(write(tmp_path, older)) == expected


@pytest.mark.parametrize(
    ("in_config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (ABSENT, None, ()),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_eos_token_ids(tmp_path: Path, in_config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    folder = write(tmp_path, changed(LLAMA, eos_token_id=in_config), generation)
    assert load_model_config(folder).eos_token_ids == expected


WRONG: dict[str, tuple[Any, ...]] = {
    "architectures": (ABSENT, [], "LlamaForCausalLM", ["LlamaForCausalLM", "Qwen3ForCausalLM"]),
    "eos_token_id": (-1, 128256, "</s>", [1, 2.5]),
    "head_dim": (127, -2),
    "hidden_size": (ABSENT, None, 4096.0, "4096", 4100),
    "intermediate_size": (ABSENT, -1),
    "max_position_embeddings": (ABSENT,),
    "mlp_bias": (1,),
    "num_attention_heads": (ABSENT,),
    "num_hidden_layers": (ABSENT, 0),
    "num_key_value_heads": (7, 64),
    "rms_norm_eps": (ABSENT, 0, "1e-5", math.nan),
    "rope_scaling": ("llama3",),
    "rope_theta": (-1.0, math.inf),
    "tie_word_embeddings": ("no",),
    "vocab_size": (ABSENT, True),
}

REFUSED: list[tuple[dict[str, Any], str, Any, type[ModelError]]] = [
    *((LLAMA, key, value, ModelError) for key, values in WRONG.items() for value in values),
    *((LLAMA, "architectures", [name], UnsupportedModelError) for name in ("GPT2LMHeadModel", "DeepseekV3ForCausalLM")),
    (LLAMA, "hidden_act", "gelu", UnsupportedModelError),
    *((LLAMA, f"{kind}_logit_softcapping", 30.0, UnsupportedModelError) for kind in ("attn", "final")),
    *((base, "use_bidirectional_attention", True, UnsupportedModelError) for base in (LLAMA, GEMMA)),
    *((base, "mlp_bias", True, UnsupportedModelError) for base in (LLAMA, GRANITE)),
    *((base, "attention_bias", True, UnsupportedModelError) for base in (LLAMA, QWEN3, GEMMA, SMOLLM, OLMO, GRANITE)),
    (LLAMA, "use_sliding_window", True, UnsupportedModelError),
    *((base, "layer_types", MIXED[::-1], UnsupportedModelError) for base in (LLAMA, QWEN3)),
    (QWEN3, "layer_types", "full_attention", UnsupportedModelError),
    *((MISTRAL, "sliding_window", window, ModelError) for window in (0, "4096")),
    (LLAMA, "compression_config", {}, UnsupportedModelError),
    (LLAMA, "partial_rotary_factor", 0.5, UnsupportedModelError),
    *((LLAMA, "torch_dtype", dtype, UnsupportedModelError) for dtype in ("float8_e4m3fn", 16)),
    (GEMMA, "attn_logit_softcapping", 50.0, UnsupportedModelError),
    (GEMMA, "hidden_activation", "gelu", UnsupportedModelError),
    *((GEMMA, "layer_types", kinds, UnsupportedModelError) for kinds in (MIXED[:1], ["chunked_attention"] * 12)),
    (GEMMA, "query_pre_attn_scalar", 0, ModelError),
    *((PHI, "partial_rotary_factor", factor, ModelError) for factor in (1.5, 0.002)),
    (PHI, "sliding_window", -1, ModelError),
    *((SMOLLM, "no_rope_layers", layers, ModelError) for layers in ([1, 0], [2] * 12)),
    (SMOLLM, "use_sliding_window", True, UnsupportedModelError),
    (GRANITE, "logits_scaling", 0, ModelError),
    (QWEN | {"use_sliding_window": True}, "max_window_layers", -1, ModelError),
    (QWEN3_MOE, "mlp_only_layers", [3], UnsupportedModelError),
    (QWEN2_MOE, "decoder_sparse_step", 2, UnsupportedModelError),
    (QWEN3_MOE, "hidden_act", "gelu_pytorch_tanh", UnsupportedModelError),
    (QWEN3_MOE, "num_experts", 2000, ModelError),
    (QWEN3_MOE, "num_experts_per_tok", 129, ModelError),
    (QWEN2_MOE, "shared_expert_intermediate_size", 0, ModelError),
    (MIXTRAL, "num_experts_per_tok", 9, ModelError),
]


@pytest.mark.parametrize(("base", "key", "value", "error"), REFUSED)
def test_refused_key(tmp_path: Path, base: dict[str, Any], key: str, value: Any, error: type[ModelError]) -> None:
    folder = write(tmp_path, changed(base, **{key: value}))
    with pytest.raises(ModelError) as caught:
        load_model_config(folder)
    found = "no such key" if value is ABSENT else reprlib.repr(value)  # cuts long lists short
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {key} must be ")
    assert str(caught.value).endswith(f"found {found}")
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("rope", "key", "error"),
    [
        *((scaling(rope_type=kind), "rope_type", UnsupportedModelError) for kind in ("mrope", ["yarn"])),
        ({"type": "mrope", "factor": 2.0}, "type", UnsupportedModelError),
        ({"factor": 2.0}, "rope_type", UnsupportedModelError),
        ({"full_attention": {"rope_type": "default"}}, "rope_type", UnsupportedModelError),
        (scaling(partial_rotary_factor=0.25), "partial_rotary_factor", UnsupportedModelError),
        (scaling(factor=ABSENT), "factor", ModelError),
        *((scaling(low_freq_factor=low), "low_freq_factor", ModelError) for low in (0, 4.0)),
        (scaling(high_freq_factor="4"), "high_freq_factor", ModelError),
        (scaling(original_max_position_embeddings=0), "original_max_position_embeddings", ModelError),
        *(({"rope_type": kind}, "factor", ModelError) for kind in ("linear", "dynamic")),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate", ModelError),
        (
            {"rope_type": "yarn", "factor": 1e-308, "beta_fast": 1e308, "beta_slow": 1e-308, "attention_factor": 0},
            "attention_factor",
            ModelError,
        ),
        ({"rope_type": "longrope", "long_factor": [1.0] * 64}, "short_factor", ModelError),
        ({"rope_type": "longrope", "short_factor": [1.0] * 63}, "short_factor", ModelError),
        ({"rope_type": "longrope", "short_factor": [0.0] * 64}, "short_factor[0]", ModelError),
        ({"rope_type": "default", "rope_theta": 1.0}, "rope_theta", ModelError),
    ],
)
@pytest.mark.parametrize("outer_key", ["rope_scaling", "rope_parameters"])
def test_bad_rope(tmp_path: Path, rope: Any, key: str, error: type[ModelError], outer_key: str) -> None:
    folder = write(tmp_path, changed(LLAMA, **{"rope_scaling": ABSENT, outer_key: rope}))
    with pytest.raises(error) as caught:
        load_model_config(folder)
    assert f"config.json: {outer_key}.{key} must be " in str(caught.value)


def test_bad_head_dim(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"head_dim must be even.* it is 15"):
        load_model_config(write(tmp_path, changed(LLAMA, hidden_size=480)))
    with pytest.raises(ModelError, match="head_dim must be given"):
        load_model_config(write(tmp_path, changed(QWEN3, head_dim=ABSENT)))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        *((content, "is not valid JSON") for content in (b"{", b"", b"\xff\xfe\xfd")),
        (b"[1]", "must hold a JSON object; found list"),
        (b'{"eos_token_id": "</s>", "architectures": "</s>"}', "must be .*; found '</s>'"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_file(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (write(tmp_path, LLAMA) / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"/{name}.* {problem}"):
        load_model_config(tmp_path)


def test_missing_folder_or_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"^[^ ]*config\.json is missing"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_model_config(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        load_model_config(tmp_path / "config.json" / "file")


def test_resolve_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny") == FoundModel(PRESETS["tiny"], "tiny")
    write(tmp_path / "tiny", LLAMA)
    found = resolve_model("tiny")
    assert (found.config.num_layers, found.folder) == (32, Path("tiny"))
    presets = ", ".join(PRESETS)
    (tmp_path / "a-file").touch()
    for name, problem in {
        "nowhere": f"'nowhere': expected a folder with config.json, a hub id .* or .* {presets}",
        "./no/where": "unknown model './no/where': expected a folder",
        "Qwen/": "unknown model 'Qwen/': expected .* a hub id NAME/MODEL such as",
        "a-file": "unknown model 'a-file': expected a folder",
        "Llama-3.1-8": r"unknown model 'Llama-3.1-8': there is no such preset; did you mean llama-3\.1-8b\?",
        "models/Qwen3-0.6B-Q8_0.gguf": "is a GGUF file, which is not read: give the folder or the hub id",
    }.items():
        with pytest.raises(ModelError, match=problem):
            resolve_model(name)
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "model-q4_0.gguf").touch()
    with pytest.raises(ModelError, match=r"ggufs holds a GGUF file, which is not read, and no config\.json"):
        resolve_model("ggufs")
    for name in ("tiny", "nowhere"):
        with pytest.raises(ConfigError, match=f"revision=main is for a hub id .*, not for '{name}'"):
            resolve_model(name, "main")
    monkeypatch.chdir("tiny")
    assert resolve_model(".").name == "tiny"


# ---- as transformers 5 writes them ----

PUBLISHED = {
    "gemma": GEMMA,
    "gemma, scaled": GEMMA | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gemma, scaled beside newer keys": GEMMA
    | {"rope_scaling": {"factor": 8.0, "rope_type": "linear", "self": 1}, "rope_parameters": {"full_attention": BASE}},
    "gemma, by defaults": {
        key: value for key, value in GEMMA.items() if not {"rope", "attn", "window"} & set(key.split("_"))
    },
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
    "qwen with yarn beside newer keys": QWEN | {"rope_scaling": YARN, "rope_parameters": BASE},
    "qwen, linear": QWEN | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "mixtral": MIXTRAL,
    "mixtral with a window": MIXTRAL | {"sliding_window": 64},
    "qwen3 moe": QWEN3_MOE,
    "qwen3 moe with windows": QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 64},
    "qwen2 moe": QWEN2_MOE,
    "qwen2 moe with windows": QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 7},
    **{
        f"{base['model_type']}, by the classes' defaults": {
            **{key: value for key, value in base.items() if key in COMMON or key in GIVEN},
            "sliding_window": 64,
        }
        for base in (GEMMA, SMOLLM, OLMO, GRANITE, QWEN, MIXTRAL, QWEN3_MOE, QWEN2_MOE)
    },
    "phi, by default": {key: value for key, value in PHI.items() if key != "original_max_position_embeddings"},
    "phi, by another early name": PHI | {"rope_scaling": PHI["rope_scaling"] | {"type": "yarn"}},
    "qwen with windows": QWEN | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 7},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    published = load_model_config(write(tmp_path / "published", PUBLISHED[name]))
    AutoConfig.from_pretrained(tmp_path / "published").save_pretrained(tmp_path / "written")
    assert load_model_config(tmp_path / "written") == published


def test_yarn_extends_what_its_config_leaves_as_it_was(tmp_path: Path) -> None:
    for length, extended in ((10000, 4 * 8192), (40960, 40960)):
        config = PUBLISHED["qwen with yarn"] | {"max_position_embeddings": length}
        assert load_model_config(write(tmp_path, config)).max_position_embeddings == extended


def test_what_gemma_s_keys_mean(tmp_path: Path) -> None:
    model = load_model_config(write(tmp_path, PUBLISHED["gemma, scaled"]))
    local, whole = Rope(1e4), Rope(1e6, RopeDivisors((8.0,) * 128))
    assert model.layer_ropes == (*(local,) * 5, whole) * 2
    assert model.layer_windows == (*(512,) * 5, None) * 2
    assert model.tie_word_embeddings
    assert (model.attention_scale, model.embedding_multiplier) == (1 / 16, 1152**0.5)


def test_what_phi_s_keys_mean(tmp_path: Path) -> None:
    model = load_model_config(write(tmp_path, PHI))
    assert (model.rotary_dim, model.fused_projections) == (96, True)
    assert isinstance(model.rope.scaling, RopeDivisors)
    # √(1 + ln(32768 / 4096) / ln(4096))
    assert model.rope.scaling.attention_factor == pytest.approx(1.118034)


@pytest.mark.parametrize(
    ("theta", "original", "factor"),
    [
        (1e6, 32768, 4.0),  # Qwen's
        (1e4, 131072, 4.0),  # no frequency is slowed wholly
        (1e6, 32768, 0.8),
    ],
)
def test_yarn_of_published_sizes_is_that_of_transformers(theta: float, original: int, factor: float) -> None:
    entry = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    theirs = Qwen3Config(head_dim=128, max_position_embeddings=original, rope_parameters=entry)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    path = Path("config.json")
    rope = read_rope_entry(JsonObject(path, {"max_position_embeddings": original}), JsonObject(path, entry), 128)
    assert isinstance(rope.scaling, RopeDivisors)
    ours = theta ** (-torch.arange(0, 128, 2) / 128) / torch.tensor(rope.scaling.divisors)
    torch.testing.assert_close(ours, frequencies)
    assert rope.scaling.attention_factor == pytest.approx(attention_factor)
