"""Every model family and every scaling of RoPE against ``transformers`` on the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import EXPERT_FAMILIES, MORE_FAMILIES, Family, write_checkpoint
from engines import Model, make_engine

from bullet_graph import SamplingParams
from bullet_graph.errors import ConfigError
from bullet_graph.kernels import ops
from bullet_graph.kernels.ops import route

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
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
        outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
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
            engine.generate(np.random.default_rng(2).integers(0, 512, size=(8, 60)).tolist(), GREEDY, use_tqdm=False)
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
