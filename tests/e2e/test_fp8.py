"""Engines with FP8 weights, keys and values: the same tokens in each policy, and scales of a checkpoint's cache."""

from pathlib import Path

import pytest
import torch
from checkpoints import Family, write_checkpoint
from engines import GREEDY, PROMPTS, make_engine, tokens_of
from fp8_checkpoints import write_fp8_checkpoint
from safetensors.torch import load_file, save_file

from bullet_graph import SamplingParams
from bullet_graph.errors import CheckpointError


def generated(model: str | Path, **settings: object) -> list[list[tuple[int, ...]]]:
    with make_engine(model, **settings) as engine:
        return [tokens_of(output) for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]


def scores(model: str | Path, **settings: object) -> torch.Tensor:
    """Log-probabilities of the tokens of a prompt."""
    with make_engine(model, **settings) as engine:
        (output,) = engine.generate(PROMPTS[-1], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])


@pytest.mark.parametrize(
    ("family", "form", "kv_cache_dtype"),
    [("qwen3", "fp8 block", "fp8"), ("qwen3", "compressed channel", "auto"), ("qwen3_moe", "fp8 block", "fp8")],
)
def test_every_policy_gives_the_same_tokens(tmp_path: Path, form: str, kv_cache_dtype: str, family: Family) -> None:
    write_fp8_checkpoint(tmp_path, form, family, head_dim=64, moe_intermediate_size=128)
    policies = ["serial", "mixed:7", "auto"]
    runs = [
        generated(tmp_path, policy=policy, perf_table="roofline", kv_cache_dtype=kv_cache_dtype) for policy in policies
    ]
    # What else is in the batch may change the last bit of an expert's product. Rounding to FP8 then makes it a step,
    # and the router another choice.
    least = len(PROMPTS) if family == "qwen3" else len(PROMPTS) / 2
    for other in runs[1:]:
        assert sum(a == b for a, b in zip(runs[0], other, strict=True)) >= least
    assert len({tokens for output in runs[0] for each in output for tokens in each}) > 20


@pytest.mark.parametrize(("family", "more"), [("mixtral", {}), ("qwen2_moe", {"shared_expert_intermediate_size": 96})])
def test_experts_that_are_quantized_while_loading(tmp_path: Path, family: Family, more: dict[str, int]) -> None:
    write_checkpoint(tmp_path, family, hidden_size=256, tokenizer=False, **more)
    plain, quantized = scores(tmp_path), scores(tmp_path, quantization="fp8")
    assert 0 < (quantized - plain).abs().mean() < 0.3 * plain.std()
    assert generated(tmp_path, quantization="fp8", policy="mixed:7") == generated(tmp_path, quantization="fp8")


def test_an_fp8_cache_has_room_for_more_tokens() -> None:
    tokens = {}
    for kv_cache_dtype in ("auto", "fp8"):
        with make_engine(kv_cache_dtype=kv_cache_dtype, kv_cache_bytes=2**22) as engine:
            tokens[kv_cache_dtype] = engine.memory.num_kv_blocks
    # float32 on the CPU.
    assert tokens["fp8"] == 4 * tokens["auto"]


def test_scales_of_a_checkpoint_s_cache(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "compressed tensor")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    plain = generated(tmp_path)
    # Values of 16 bits beyond FP8's range, and what brings them into it.
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight_scale"):
            tensor.mul_(1e4)
        elif name.endswith("o_proj.weight_scale"):
            tensor.mul_(1e-4)
    save_file(tensors, file)
    assert generated(tmp_path) == plain
    expected, saturated = scores(tmp_path), scores(tmp_path, kv_cache_dtype="fp8")
    scales = {f"model.layers.{i}.self_attn.v_scale": torch.tensor([9000.0]) for i in range(2)}
    save_file(tensors | scales, file)
    assert generated(tmp_path) == plain
    scaled = scores(tmp_path, kv_cache_dtype="fp8")
    assert 0 < (scaled - expected).abs().mean() < 0.3 * (saturated - expected).abs().mean()
    for wrong, problem in ((torch.ones(2), "must be one number"), (torch.zeros(1), "must be above 0; found 0.0")):
        save_file(tensors | {"model.layers.1.self_attn.k_scale": wrong}, file)
        with pytest.raises(CheckpointError, match=problem):
            generated(tmp_path, kv_cache_dtype="fp8")
