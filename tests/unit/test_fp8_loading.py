"""FP8 checkpoints of every form against what they hold, and 16-bit ones that are quantized while they are loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Family, write_checkpoint
from decoders import dummy_weights, read_weights
from fp8_checkpoints import FORMS, SIZES, change_config, compressed, dequantized, write_fp8_checkpoint
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from bullet_graph.errors import CheckpointError, ModelError, UnsupportedModelError
from bullet_graph.kernels.fp8 import FP8, quantize_weight
from bullet_graph.kernels.ops import Linear
from bullet_graph.models.config import with_padded_heads
from bullet_graph.models.layers import Mixture
from bullet_graph.models.presets import PRESETS, load_model_config
from bullet_graph.models.quantization import in_formats
from bullet_graph.models.weights import ModelWeights, checkpoint_views, put_quantized, scale_cached
from bullet_graph.perf.roofline import Fp8Weights

CPU = torch.device("cpu")
FILE = "model.safetensors"
BLOCKS = "fp8 block"


def projections(weights: ModelWeights) -> dict[str, Linear]:
    found = {}
    for index, layer in enumerate(weights.layers):
        found |= {f"{index}.qkv": layer.attention.qkv, f"{index}.o": layer.attention.o}
        found |= {f"{index}.gate_up": layer.mlp.gate_up, f"{index}.down": layer.mlp.down}
    return found


def stored_as(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A projection's weights in a checkpoint."""
    index, projection = name.split(".")
    modules = {
        "qkv": [f"self_attn.{each}_proj" for each in "qkv"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }[projection]
    return torch.cat([tensors[f"model.layers.{index}.{module}.weight"] for module in modules])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_held_as_it_is_stored(tmp_path: Path, form: str) -> None:
    expected = write_fp8_checkpoint(tmp_path, form)
    weights = read_weights(tmp_path)
    for name, linear in projections(weights).items():
        assert linear.weight.dtype is FP8
        assert linear.scale is not None
        assert linear.group == (128 if "block" in form else linear.weight.shape[1])
        torch.testing.assert_close(dequantized(linear), stored_as(name, expected), rtol=1e-6, atol=0)
    assert weights.lm_head.dtype == weights.embed.dtype == torch.float32
    assert torch.equal(weights.lm_head, expected["lm_head.weight"])


@pytest.mark.parametrize(("form", "block_size"), [(BLOCKS, [128, 128]), ("fp8 tensor inv", None)])
def test_transformers_dequantizes_to_the_same_weights(tmp_path: Path, form: str, block_size: list[int] | None) -> None:
    write_fp8_checkpoint(tmp_path, form)
    tensors = load_file(tmp_path / FILE)
    theirs = {
        name: _dequantize_fp8_weight(tensor, tensors[f"{name}_scale_inv"], block_size, torch.float32)
        for name, tensor in tensors.items()
        if tensor.dtype is FP8
    }
    for name, linear in projections(read_weights(tmp_path)).items():
        torch.testing.assert_close(dequantized(linear), stored_as(name, theirs), rtol=1e-6, atol=0)


def test_scales_follow_rows_that_are_held_in_another_order(tmp_path: Path) -> None:
    # Heads of 64 of which 48 are rotated, padded to 128: rows move, and scales with them.
    expected = write_fp8_checkpoint(tmp_path, "compressed channel", "phi3")
    config = load_model_config(tmp_path)
    plain = replace(config, fp8=None)
    tensors = {name: tensor.contiguous() for name, tensor in expected.items()}
    (tmp_path / "plain").mkdir()
    save_file(tensors, tmp_path / "plain" / FILE)
    for head_dims in ((), (128,)):
        quantized = read_weights(tmp_path, with_padded_heads(config, head_dims))
        reference = read_weights(tmp_path / "plain", with_padded_heads(plain, head_dims))
        for name, linear in projections(quantized).items():
            torch.testing.assert_close(dequantized(linear), projections(reference)[name].weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["compressed channel", BLOCKS])
def test_projections_that_stay_plain(tmp_path: Path, form: str) -> None:
    expected = write_fp8_checkpoint(tmp_path, form, plain=("down_proj", "q_proj", "k_proj", "v_proj"))
    quantization = FORMS[form][0]
    key = "ignore" if form != BLOCKS else "modules_to_not_convert"
    names = [r"re:.*self_attn\.[a-z]_proj", "re:.*lm_head"]
    change_config(tmp_path, quantization_config=quantization | {key: names})
    with pytest.raises(UnsupportedModelError, match=r"names, and expressions of letters"):
        load_model_config(tmp_path)
    names = ["lm_head", r"re:.*\.q_proj$", "re:.*k_proj", "v_proj"]
    names += ["model.layers.0.mlp.down_proj", "layers.1.mlp.down_proj"]
    change_config(tmp_path, quantization_config=quantization | {key: names})
    assert load_model_config(tmp_path).fp8 == Fp8Weights(form == BLOCKS, ("qkv", "down"), is_stored=True)
    for name, linear in projections(read_weights(tmp_path)).items():
        assert (linear.scale is None) == name.endswith(("qkv", "down"))
        torch.testing.assert_close(dequantized(linear), stored_as(name, expected), rtol=1e-6, atol=0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "awq": ({"quant_method": "awq", "bits": 4}, r"quant_method must be FP8 .*found 'awq'"),
    "nvfp4 of modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "found 'modelopt'"),
    "no method": ({}, "quant_method must be .* found no such key"),
    "other blocks": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size must be \[128, 128\]"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be e4m3"),
    "ue8m0": ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt must be float"),
    "int8": (compressed(strategy="channel", type="int"), r"type must be float.*found 'int'"),
    "4 bits": (compressed(strategy="channel", num_bits=4), "num_bits must be 8"),
    "groups": (compressed(strategy="group"), "strategy must be tensor, channel or block"),
    "small blocks": (compressed(strategy="block", block_structure=[64, 128]), "block_structure must be"),
    "packed": (compressed(strategy="channel") | {"format": "pack-quantized"}, "format must be float-quantized"),
    "weights alone": (
        compressed() | {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}},
        "input_activations must be an object",
    ),
    "some targets": (compressed() | {"config_groups": {"a": {"targets": ["re:.*q_proj"]}}}, "targets must be .*Linear"),
    "heads' scales": (
        compressed(strategy="tensor") | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "head"}},
        "one FP8 scale a layer",
    ),
    "a part of qkv": ({"quant_method": "fp8", "ignored_layers": ["q_proj"]}, "alike in all layers, and for all of"),
    "a layer": ({"quant_method": "fp8", "ignored_layers": ["model.layers.0"]}, "alike in all layers"),
    "everything": ({"quant_method": "fp8", "ignored_layers": ["re:.*mlp.*", "re:.*self_attn"]}, "all projections"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    quantization, problem = REFUSED[name]
    write_checkpoint(tmp_path, "llama", tokenizer=False)
    change_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ModelError, match=problem) as caught:
        load_model_config(tmp_path)
    if name != "weights alone":
        assert isinstance(caught.value, UnsupportedModelError)
        assert "16-bit checkpoint" in str(caught.value)


Q = "model.layers.1.self_attn.q_proj"
BROKEN: dict[str, tuple[str, dict[str, torch.Tensor], str]] = {
    "no scale": (f"{Q}.weight_scale", {}, rf"{Q}\.weight_scale are required"),
    "16 bits": ("", {f"{Q}.weight": torch.zeros(256, 256)}, rf"{Q}\.weight must be one of F8_E4M3; found F32"),
    "scale's shape": ("", {f"{Q}.weight_scale": torch.ones(2, 2)}, rf"{Q}\.weight_scale must have shape"),
    "scale's type": ("", {f"{Q}.weight_scale": torch.ones(256, 1).int()}, "must be one of F32, F16, BF16; found I32"),
    "zero point": ("", {f"{Q}.weight_zero_point": torch.zeros(256, 1)}, "weight_zero_point are present"),
    "norm": ("", {"model.norm.weight": torch.ones(256).to(FP8)}, "must be one of F32, F16, BF16; found F8_E4M3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint(tmp_path: Path, name: str) -> None:
    drop, add, problem = BROKEN[name]
    write_fp8_checkpoint(tmp_path, "compressed channel")
    tensors = load_file(tmp_path / FILE) | add
    save_file({name: tensor for name, tensor in tensors.items() if name != drop}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=problem):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"intermediate_size": 192}), ("phi3", {})],  # the second's rows are held in another order
)
def test_blocks_that_cross_modules_are_refused(tmp_path: Path, family: Family, changes: dict[str, int]) -> None:
    write_fp8_checkpoint(tmp_path, BLOCKS, family, **changes)
    with pytest.raises(UnsupportedModelError, match="multiples of 128 channels"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("scales", "k", "v"),
    [
        ({"k_scale": 3.0, "v_scale": [0.3]}, 4.0, 0.5),  # rounded up to powers of two
        ({"k_proj.k_scale": 0.3, "v_proj.v_scale": 2.0}, 0.5, 2.0),
        ({"k_proj.output_scale": 3.0, "v_proj.output_scale": 0.25}, 4.0, 0.25),
    ],
)
def test_scales_of_keys_and_values_go_into_the_weights(
    tmp_path: Path, scales: dict[str, Any], k: float, v: float
) -> None:
    write_fp8_checkpoint(tmp_path, "compressed channel")
    config = replace(load_model_config(tmp_path), fp8_kv=True)
    expected = read_weights(tmp_path, config)
    scale_cached(config, expected.layers[1], k, v)
    own = {f"model.layers.1.self_attn.{name}": torch.tensor(scale) for name, scale in scales.items()}
    save_file(load_file(tmp_path / FILE) | own, tmp_path / FILE)
    found = projections(read_weights(tmp_path, config))
    for name, linear in projections(expected).items():
        assert torch.equal(dequantized(found[name]), dequantized(linear)), name


# ---- quantized while loading ----


def test_a_plain_checkpoint_is_quantized_by_channel(tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path, "qwen2", tokenizer=False, dtype=torch.bfloat16, **SIZES).state_dict()
    config = in_formats(load_model_config(tmp_path), quantization="fp8", kv_cache_dtype="auto")
    assert config.fp8 == Fp8Weights()
    for name, linear in projections(read_weights(tmp_path, config)).items():
        values, scale = quantize_weight(stored_as(name, state).float(), blocks=False)
        assert torch.equal(linear.weight.float(), values.float())
        assert linear.scale is not None
        assert torch.equal(linear.scale, scale)
        assert (linear.bias is None) == (not name.endswith("qkv"))


@pytest.mark.parametrize("blocks", [True, False])
def test_weights_are_quantized_some_rows_at_a_time(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bullet_graph.models.weights._MOST_ELEMENTS", 150 * 200)  # 128 rows, and no part of a block
    source = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    expected = quantize_weight(source, blocks=blocks)
    values, scales = (torch.zeros_like(tensor) for tensor in expected)
    put_quantized(source, values, scales)
    assert torch.equal(values.float(), expected[0].float())
    assert torch.equal(scales, expected[1])


def test_dummy_weights_are_those_of_16_bits_quantized() -> None:
    config = replace(PRESETS["tiny"], fp8=Fp8Weights(plain=("o",)))
    plain = projections(dummy_weights(replace(config, fp8=None), dtype=torch.bfloat16, device=CPU, seed=3))
    for name, linear in projections(dummy_weights(config, dtype=torch.bfloat16, device=CPU, seed=3)).items():
        if name.endswith("o"):
            assert torch.equal(linear.weight, plain[name].weight)
        else:
            expected = plain[name].weight.float()
            assert 0 < (dequantized(linear) - expected).norm() / expected.norm() < 0.03


def test_settings() -> None:
    assert in_formats(PRESETS["tiny"], quantization=None, kv_cache_dtype="auto") == PRESETS["tiny"]
    stored = replace(PRESETS["tiny"], fp8=Fp8Weights(blocks=True, is_stored=True))
    assert in_formats(stored, quantization="fp8", kv_cache_dtype="fp8") == replace(stored, fp8_kv=True)
    assert PRESETS["qwen3-8b-fp8"] == replace(PRESETS["qwen3-8b"], fp8=Fp8Weights())


# ---- experts ----

EXPERT_SIZES = {"moe_intermediate_size": 128}
SHARED_SIZES = EXPERT_SIZES | {"shared_expert_intermediate_size": 256}


def held(weights: ModelWeights, block: str, names: tuple[str, str, str]) -> dict[str, torch.Tensor]:
    """All experts' weights in float32, by the checkpoint's names."""
    found = {}
    for index, layer in enumerate(weights.layers):
        mixture, prefix = layer.mlp, f"model.layers.{index}"
        assert isinstance(mixture, Mixture)
        assert mixture.experts.router.scale is None
        assert mixture.experts.gate_up.weight.dtype == mixture.experts.down.weight.dtype == FP8
        parts = [
            (f"{prefix}.{block}.experts.{i}", *both)
            for i, both in enumerate(
                zip(*map(dequantized, (mixture.experts.gate_up, mixture.experts.down)), strict=True)
            )
        ]
        if mixture.shared is not None:
            shared = dequantized(mixture.shared.gate_up), dequantized(mixture.shared.down)
            parts.append((f"{prefix}.mlp.shared_expert", *shared))
        for name, gate_up, down in parts:
            for part, tensor in zip(names, (*gate_up.chunk(2), down), strict=True):
                found[f"{name}.{part}.weight"] = tensor
    return found


@pytest.mark.parametrize("form", [BLOCKS, "fp8 tensor", "compressed channel"])
@pytest.mark.parametrize(
    ("family", "sizes", "block", "names"),
    [
        ("qwen3_moe", EXPERT_SIZES, "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("qwen2_moe", SHARED_SIZES, "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", {}, "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_experts_are_held_as_they_are_stored(
    tmp_path: Path, form: str, family: Family, sizes: dict[str, int], block: str, names: tuple[str, str, str]
) -> None:
    if form == BLOCKS:
        sizes = {**sizes, "num_attention_heads": 2, "head_dim": 128}
    expected = write_fp8_checkpoint(tmp_path, form, family, **sizes)
    routers = ["re:.*mlp.gate$", "re:.*shared_expert_gate", "lm_head", "model.layers.0.block_sparse_moe.gate"]
    key = "ignore" if form.startswith("compressed") else "modules_to_not_convert"
    change_config(tmp_path, quantization_config=FORMS[form][0] | {key: routers})
    weights = read_weights(tmp_path)
    found = held(weights, block, names)
    assert len(found) == sum(".experts." in name or "shared_expert." in name for name in expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=0)
    views = dict(checkpoint_views(load_model_config(tmp_path), weights))
    for name in (f"model.layers.1.{block}.gate.weight", "lm_head.weight"):
        assert torch.equal(views[name], expected[name])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_are_quantized_while_they_are_loaded(tmp_path: Path, family: Family) -> None:
    write_checkpoint(tmp_path, family, tokenizer=False)
    config = load_model_config(tmp_path)
    plain = read_weights(tmp_path)
    weights = read_weights(tmp_path, in_formats(config, quantization="fp8", kv_cache_dtype="auto"))
    for layer, expected in zip(weights.layers, plain.layers, strict=True):
        found, own = layer.mlp.experts, expected.mlp.experts
        assert torch.equal(found.router.weight, own.router.weight)
        for linear, wanted in ((found.gate_up, own.gate_up), (found.down, own.down)):
            for index, weight in enumerate(wanted.weight):
                values, scale = quantize_weight(weight, blocks=False)
                assert torch.equal(linear.weight[index].float(), values.float())
                assert torch.equal(linear.scale[index], scale)


def test_experts_that_are_refused(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "fp8 tensor", "qwen3_moe", **EXPERT_SIZES)
    some = {"modules_to_not_convert": ["model.layers.0.mlp.experts.3"]}
    change_config(tmp_path, quantization_config=FORMS["fp8 tensor"][0] | some)
    with pytest.raises(UnsupportedModelError, match="alike in all layers"):
        load_model_config(tmp_path)
    change_config(tmp_path, quantization_config=FORMS[BLOCKS][0], moe_intermediate_size=96)
    with pytest.raises(UnsupportedModelError, match=r"multiples of 128 .* intermediate_size 96"):
        read_weights(tmp_path)
    change_config(tmp_path, quantization_config=FORMS["fp8 tensor"][0], num_experts=7, moe_intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"experts\.6\.gate_proj"):
        read_weights(tmp_path)
