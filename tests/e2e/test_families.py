"""Every model family and every scaling of RoPE against ``transformers`` on the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import EXPERT_FAMILIES, MORE_FAMILIES, Family, write_checkpoint
from engines import GREEDY, PROMPTS, Model, make_engine, prompt_scores, tokens_of
from fp8_checkpoints import write_fp8_checkpoint
from safetensors.torch import load_file, save_file

from bullet_graph import SamplingParams
from bullet_graph.errors import CheckpointError, ConfigError
from bullet_graph.kernels import ops
from bullet_graph.kernels.ops import route

SCORED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
LENGTHS = (1, 5, 17, 33, 70)

# Original lengths far below the prompts' lengths, so that scaling changes what tests see.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
ROPES: dict[str, tuple[Family, dict[str, Any]]] = {
    "linear": ("qwen3", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "dynamic": ("qwen2", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "yarn": ("qwen3", YARN),
    "yarn with all keys": (
        "qwen3",
        YARN | {"beta_fast": 8, "beta_slow": 0.5, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
    ),
    "yarn with an attention factor": ("smollm3", YARN | {"attention_factor": 1.3}),
    "longrope": ("phi3", LONG),
}


def check(model: Model, lengths: tuple[int, ...] = LENGTHS, policy: str = "mixed:7", **settings: Any) -> None:
    """Greedy tokens and their log-probabilities, held against one forward over what was generated."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, model.network.config.vocab_size, size=n).tolist() for n in lengths]
    with make_engine(model.folder, policy=policy, **settings) as engine:
        outputs = engine.generate(prompts, SCORED, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        expected = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == tuple(expected.argmax(-1).tolist())
        found = torch.tensor([entry.logprob for entry in output.outputs[0].logprobs])
        torch.testing.assert_close(found, expected.amax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_tokens_and_logprobs_equal(family: Family, tmp_path: Path) -> None:
    check(Model(tmp_path, write_checkpoint(tmp_path, family, num_layers=3, seed=1, tokenizer=False)))


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_under_every_policy(family: Family, tmp_path: Path) -> None:
    model = Model(tmp_path, write_checkpoint(tmp_path, family, num_layers=3, seed=1, tokenizer=False))
    for policy in ("mixed:7", "serial", "auto"):
        check(model, policy=policy, perf_table="roofline")


def test_a_router_skew_makes_some_experts_popular(monkeypatch: pytest.MonkeyPatch) -> None:
    most: dict[str, float] = {}
    for skew in ("uniform", "zipf:1"):
        chosen: list[torch.Tensor] = []

        def recorded(logits: torch.Tensor, top_k: int, *, seen: list[torch.Tensor] = chosen, **how: Any) -> Any:
            found = route(logits, top_k, **how)
            seen.append(found[1])
            return found

        monkeypatch.setattr(ops, "route", recorded)
        with make_engine("tiny-moe", policy="serial", router_skew=skew) as engine:
            engine.generate(np.random.default_rng(2).integers(0, 512, size=(8, 60)).tolist(), SCORED, use_tqdm=False)
        # The share of rows that take a layer's most popular expert, of the first layer.
        first = torch.cat(chosen[::4])
        most[skew] = float(torch.bincount(first.flatten()).max()) / len(first)
    # Four of sixteen: a quarter each, or nearly all.
    assert most["uniform"] < 0.5
    assert most["zipf:1"] > 0.9


def test_a_router_skew_needs_random_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    with pytest.raises(ConfigError, match="its weights are read from files: leave it out, or use"):
        make_engine(tmp_path, router_skew="zipf:1")
    with make_engine(tmp_path, router_skew="zipf:1", load_format="dummy") as engine:
        assert engine.model_config.router_bias


@pytest.mark.parametrize("family", ["llama", "qwen2", "granite", "phi3", "smollm3"])
@pytest.mark.usefixtures("padded_heads")
def test_heads_padded_for_kernels(family: Family, tmp_path: Path) -> None:
    model = Model(tmp_path, write_checkpoint(tmp_path, family, seed=1, tokenizer=False))
    with make_engine(tmp_path) as engine:
        assert engine.model_config.head_dim == 32
    check(model)


@pytest.mark.parametrize("name", ROPES)
def test_scaled_rope(name: str, tmp_path: Path) -> None:
    family, rope = ROPES[name]
    original = {"original_max_position_embeddings": 32} if name == "longrope" else {}
    network = write_checkpoint(tmp_path, family, seed=1, tokenizer=False, rope_parameters=rope, **original)
    model = Model(tmp_path, network)
    if name != "longrope":
        check(model)
        return
    # What the engine is made for decides which factors are used; transformers decides by each sequence.
    check(model, lengths=(33, 40, 70))
    check(model, lengths=(1, 5, 17), max_model_len=32)


# ---- FP8 weights, keys and values: the same tokens in each policy, and scales of a checkpoint's cache ----


def generated(model: str | Path, **settings: object) -> list[list[tuple[int, ...]]]:
    with make_engine(model, **settings) as engine:
        return [tokens_of(output) for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]


def check_most_equal(some: list[list[tuple[int, ...]]], others: list[list[tuple[int, ...]]]) -> None:
    """Other rows may change the last bit of an expert's product; rounded to FP8, it may change the router's choice."""
    assert sum(a == b for a, b in zip(some, others, strict=True)) >= len(PROMPTS) / 2


def scores(model: str | Path, **settings: object) -> torch.Tensor:
    """Log-probabilities of the tokens of a prompt."""
    with make_engine(model, **settings) as engine:
        return prompt_scores(engine, PROMPTS[-1])


@pytest.mark.parametrize(
    ("family", "form", "kv_cache_dtype"),
    [("qwen3", "fp8 block", "fp8"), ("qwen3", "compressed channel", "auto"), ("qwen3_moe", "fp8 block", "fp8")],
)
def test_every_policy_gives_the_same_tokens(tmp_path: Path, form: str, kv_cache_dtype: str, family: Family) -> None:
    write_fp8_checkpoint(tmp_path, form, family, head_dim=64, moe_intermediate_size=128)
    settings = {"perf_table": "roofline", "kv_cache_dtype": kv_cache_dtype}
    runs = [generated(tmp_path, policy=policy, **settings) for policy in ("serial", "mixed:7", "auto")]
    for other in runs[1:]:
        check_most_equal(runs[0], other)
        assert family != "qwen3" or runs[0] == other
    assert len({tokens for output in runs[0] for each in output for tokens in each}) > 20


@pytest.mark.parametrize(("family", "more"), [("mixtral", {}), ("qwen2_moe", {"shared_expert_intermediate_size": 96})])
def test_experts_that_are_quantized_while_loading(tmp_path: Path, family: Family, more: dict[str, int]) -> None:
    write_checkpoint(tmp_path, family, hidden_size=256, tokenizer=False, **more)
    plain, quantized = scores(tmp_path), scores(tmp_path, quantization="fp8")
    assert 0 < (quantized - plain).abs().mean() < 0.3 * plain.std()
    check_most_equal(generated(tmp_path, quantization="fp8", policy="mixed:7"), generated(tmp_path, quantization="fp8"))


def test_an_fp8_cache_has_room_for_more_tokens() -> None:
    tokens = {}
    for kv_cache_dtype in ("auto", "fp8"):
        with make_engine(kv_cache_dtype=kv_cache_dtype, kv_cache_bytes=2**22) as engine:
            tokens[kv_cache_dtype] = engine.memory.num_kv_blocks
    assert tokens["fp8"] == 4 * tokens["auto"]  # float32 on the CPU


def test_scales_of_a_checkpoint_s_cache(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "compressed tensor")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    plain = generated(tmp_path)
    # Values of 16 bits beyond FP8's range, and what brings them into it: powers of two, which change no last bit.
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight_scale"):
            tensor.mul_(2**13)
        elif name.endswith("o_proj.weight_scale"):
            tensor.mul_(2**-13)
    save_file(tensors, file)
    assert generated(tmp_path) == plain
    expected, saturated = scores(tmp_path), scores(tmp_path, kv_cache_dtype="fp8")
    save_file(tensors | {f"model.layers.{i}.self_attn.v_scale": torch.tensor([9000.0]) for i in range(2)}, file)
    assert generated(tmp_path) == plain
    scaled = scores(tmp_path, kv_cache_dtype="fp8")
    assert 0 < (scaled - expected).abs().mean() < 0.3 * (saturated - expected).abs().mean()
    for wrong, problem in ((torch.ones(2), "must be one number"), (torch.zeros(1), "must be above 0; found 0.0")):
        save_file(tensors | {"model.layers.1.self_attn.k_scale": wrong}, file)
        with pytest.raises(CheckpointError, match=problem):
            generated(tmp_path, kv_cache_dtype="fp8")
