import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bullet_graph.errors import ConfigError, ModelError, UnsupportedModelError
from bullet_graph.models.presets import PRESETS, FoundModel, load_model_config, resolve_model
from bullet_graph.models.rope import Rope

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

ABSENT = object()


def write(folder: Path, config: Any, generation: Any = None) -> Path:
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
UNSCALED = {"rope": Rope(500000.0)}


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (LLAMA, {"rope_scaling": None}, UNSCALED),
        (LLAMA, {"rope_scaling": {"rope_type": "default"}}, UNSCALED),
        (LLAMA, {"rope_scaling": None, "partial_rotary_factor": 1.0}, UNSCALED),
        (LLAMA, {"rope_scaling": ABSENT, "rope_theta": ABSENT}, {"rope": Rope(10000.0)}),
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
        (changed(MISTRAL, sliding_window=ABSENT), {}, {"layer_windows": (4096,) * 32}),
        (QWEN3, {"sliding_window": 99, "layer_types": ["sliding_attention"] * 28}, {"layer_windows": ()}),
        (QWEN3, WINDOW | {"sliding_window": None}, {"layer_windows": ()}),
        (QWEN3, WINDOW, {"layer_windows": (None,) * 20 + (99,) * 8}),
        (QWEN3, WINDOW | {"max_window_layers": 0, "sliding_window": ABSENT}, {"layer_windows": (4096,) * 28}),
        (
            QWEN3,
            WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 14},
            {"layer_windows": (99, None) * 14},
        ),
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
    (LLAMA, "architectures", ["GPT2LMHeadModel"], UnsupportedModelError),
    (LLAMA, "architectures", ["DeepseekV3ForCausalLM"], UnsupportedModelError),
    (LLAMA, "hidden_act", "gelu", UnsupportedModelError),
    *((LLAMA, f"{kind}_logit_softcapping", 30.0, UnsupportedModelError) for kind in ("attn", "final")),
    (LLAMA, "use_bidirectional_attention", True, UnsupportedModelError),
    (LLAMA, "mlp_bias", True, UnsupportedModelError),
    (LLAMA, "attention_bias", True, UnsupportedModelError),
    (QWEN3, "attention_bias", True, UnsupportedModelError),
    (LLAMA, "use_sliding_window", True, UnsupportedModelError),
    (LLAMA, "layer_types", ["full_attention", "sliding_attention"], UnsupportedModelError),
    (QWEN3, "layer_types", ["full_attention", "sliding_attention"], UnsupportedModelError),
    (QWEN3, "layer_types", "full_attention", UnsupportedModelError),
    (MISTRAL, "sliding_window", 0, ModelError),
    (MISTRAL, "sliding_window", "4096", ModelError),
    (LLAMA, "compression_config", {}, UnsupportedModelError),
    (LLAMA, "partial_rotary_factor", 0.5, UnsupportedModelError),
    (LLAMA, "torch_dtype", "float8_e4m3fn", UnsupportedModelError),
    (LLAMA, "torch_dtype", 16, UnsupportedModelError),
]


@pytest.mark.parametrize(("base", "key", "value", "error"), REFUSED)
def test_refused_key(tmp_path: Path, base: dict[str, Any], key: str, value: Any, error: type[ModelError]) -> None:
    folder = write(tmp_path, changed(base, **{key: value}))
    with pytest.raises(ModelError) as caught:
        load_model_config(folder)
    found = "no such key" if value is ABSENT else repr(value)
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
        (scaling(low_freq_factor=0), "low_freq_factor", ModelError),
        (scaling(low_freq_factor=4.0), "low_freq_factor", ModelError),
        (scaling(high_freq_factor="4"), "high_freq_factor", ModelError),
        (scaling(original_max_position_embeddings=0), "original_max_position_embeddings", ModelError),
        ({"rope_type": "linear"}, "factor", ModelError),
        ({"rope_type": "dynamic"}, "factor", ModelError),
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
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe\xfd", "is not valid JSON"),
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
    (tmp_path / "tiny").mkdir()
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
