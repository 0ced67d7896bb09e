"""Shares of a model: ranks in threads generate what one rank generates, for every family and way to divide it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import EXPERT_FAMILIES, FAMILIES, MORE_FAMILIES, Family, write_checkpoint
from engines import make_engine, prompt_scores
from fp8_checkpoints import FORMS, write_fp8_checkpoint
from ranks_in_threads import use_threads
from safetensors import safe_open

from bullet_graph import SamplingParams
from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError, UnsupportedModelError
from bullet_graph.models import checkpoint, sharding
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS, load_model_config
from bullet_graph.models.quantization import in_formats
from bullet_graph.models.sharding import shard
from bullet_graph.models.weights import checkpoint_views, fill_dummy, zero_weights
from bullet_graph.perf.roofline import kv_cache_bytes_per_token

SAMPLED = [
    SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1, seed=3, max_tokens=10, ignore_eos=True, logprobs=1, top_p=0.9),
]
LENGTHS = (1, 5, 17, 33, 70)
FP8_SIZES = {"hidden_size": 256, "intermediate_size": 512}

Ranks = Callable[..., None]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return use_threads(monkeypatch)


def check(
    ranks: Ranks, model: str | Path, *sizes: int, expert_parallel: Sequence[bool] = (False,), **settings: Any
) -> None:
    """Tokens of one rank and of several are the same, their log-probabilities nearly."""
    settings = {"policy": "mixed:7"} | settings
    found = []
    for size, by_expert in ((1, False), *itertools.product(sizes, expert_parallel)):
        ranks(size, by_expert)
        with make_engine(model, **settings) as engine:
            rng = np.random.default_rng(5)
            prompts = [rng.integers(0, engine.model_config.vocab_size, size=n).tolist() for n in LENGTHS]
            params = [SAMPLED[i % 2] for i in range(len(prompts))]
            outputs = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]
        found.append(([o.token_ids for o in outputs], [entry.logprob for o in outputs for entry in o.logprobs]))
    for tokens, logprobs in found[1:]:
        assert tokens == found[0][0]
        np.testing.assert_allclose(logprobs, found[0][1], atol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES])
def test_every_family(family: Family, ranks: Ranks, tmp_path: Path) -> None:
    # Four ranks hold two key heads, each of them twice.
    has_experts = family in EXPERT_FAMILIES
    experts = {"num_local_experts" if family == "mixtral" else "num_experts": 8} if has_experts else {}
    write_checkpoint(tmp_path, family, seed=1, tokenizer=False, **experts)
    sizes = {"llama": (2, 4), "phi3": (4,), "qwen2_moe": (2, 4)}.get(family, (2,))
    check(ranks, tmp_path, *sizes, expert_parallel=(False, True) if has_experts else (False,))


def test_vocabularies_that_no_number_divides_and_tied_embeddings(ranks: Ranks, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", seed=1, vocab_size=323, tie=True, tokenizer=False)
    check(ranks, tmp_path, 2, 4)


@pytest.mark.parametrize("family", ["llama", "phi3", "smollm3"])
@pytest.mark.usefixtures("padded_heads")
def test_heads_padded_for_kernels(family: Family, ranks: Ranks, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, seed=1, tokenizer=False)
    check(ranks, tmp_path, 2)


@pytest.mark.parametrize(("by_expert", "skew"), [(False, "uniform"), (True, "zipf:1")])
def test_random_weights_are_the_same_in_parts(by_expert: bool, skew: str, ranks: Ranks) -> None:
    check(ranks, "tiny-moe", 2, expert_parallel=[by_expert], router_skew=skew)


@pytest.mark.parametrize(
    ("family", "form"),
    # Blocks of phi3's rows are held in another order.
    [("qwen2_moe", form) for form in ("fp8 block", "fp8 tensor", "compressed channel", "while loading", "random")]
    + [("llama", "fp8 block"), ("llama", "random"), ("phi3", "fp8 tensor"), ("phi3", "compressed channel")]
    + [("phi3", "while loading")],
)
def test_fp8_weights_and_their_scales(form: str, family: Family, tmp_path: Path) -> None:
    sizes = {"head_dim": 128, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    sizes = FP8_SIZES | (sizes if family != "phi3" else {})
    if form in FORMS:
        write_fp8_checkpoint(tmp_path, form, family, **sizes)
    else:
        write_checkpoint(tmp_path, family, tokenizer=False, **sizes)
    model = in_formats(load_model_config(tmp_path), quantization="fp8", kv_cache_dtype="auto")
    filled = []
    ways = itertools.product(range(2), (False, True) if family == "qwen2_moe" else (False,))
    for config in (model, *(shard(model, 2, rank, expert_parallel=whole) for rank, whole in ways)):
        weights = zero_weights(config, dtype=torch.float32, device=torch.device("cpu"))
        if form == "random":
            list(fill_dummy(config, weights, seed=1))
        else:
            with checkpoint.open_checkpoint(tmp_path, config) as opened:
                list(opened.fill(weights))
        filled.append((config, dict(checkpoint_views(config, weights))))
    whole = filled[0][1]
    assert any(name.endswith("_scale") for name in whole)
    for config, views in filled[1:]:
        for name, view in views.items():
            part = sharding.part_of(config, name, tuple(whole[name].shape))
            expected = whole[name] if part is None else part.of(whole[name])
            # A rank that quantizes sees a part of the columns, and so scales of its own.
            is_whole = config.expert_parallel and ".experts." in name
            if form != "while loading" or is_whole or name.split(".")[-2] not in ("o_proj", "down_proj"):
                assert torch.equal(view.float(), expected.float()), name


def test_fp8_in_blocks_computes_the_same(ranks: Ranks, tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "fp8 block", "llama", head_dim=128, **FP8_SIZES)
    scores = []
    for size in (1, 2):
        ranks(size)
        with make_engine(tmp_path) as engine:
            scores.append(prompt_scores(engine, range(90)))
    # Another order of sums; rounding to FP8 makes it steps.
    assert (scores[1] - scores[0]).abs().mean() < 0.02 * scores[0].std()


def test_fp8_blocks_that_cannot_be_divided(ranks: Ranks, tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "fp8 block", "llama", head_dim=64, **FP8_SIZES)
    ranks(2)
    with pytest.raises(UnsupportedModelError, match="a rank of 2 has q_size 128, kv_size 64, intermediate_size 256"):
        make_engine(tmp_path)


def test_a_rank_reads_its_own_part_alone(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "phi3", seed=1, tokenizer=False)
    read = []
    of = sharding.Part.of

    def recorded(part: sharding.Part, tensor: Any) -> torch.Tensor:
        found = of(part, tensor)
        read.append((type(tensor).__name__, found.numel()))
        return found

    monkeypatch.setattr(sharding.Part, "of", recorded)
    ranks(2)
    with make_engine(tmp_path) as engine:
        weights = engine.memory.weights_bytes // 4
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        whole = sum(file.get_tensor(name).numel() for name in file.keys() if file.get_tensor(name).dim() == 2)  # noqa: SIM118
    assert {kind for kind, _ in read} == {"PySafeSlice"}
    assert sum(size for _, size in read) == whole
    assert whole / 2 < weights < whole / 2 + 1000  # norms are whole


def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    read: list[str] = []
    read_tensor = checkpoint._StoredTensor.read

    def recorded(stored: Any, name: str, part: Any) -> torch.Tensor:
        read.append(name)
        return read_tensor(stored, name, part)

    monkeypatch.setattr(checkpoint._StoredTensor, "read", recorded)
    model = load_model_config(tmp_path)
    for rank in range(2):
        config = shard(model, 2, rank, expert_parallel=True)
        weights = zero_weights(config, dtype=torch.float32, device=torch.device("cpu"))
        with checkpoint.open_checkpoint(tmp_path, config) as opened:
            list(opened.fill(weights))
        assert config.weight_bytes(4) == sum(view.nbytes for _, view in checkpoint_views(config, weights))
    experts = [name.split(".")[5] for name in read if ".experts." in name]
    half = len(experts) // 2
    assert set(experts[:half]) | set(experts[half:]) == {str(index) for index in range(model.num_experts)}
    assert not set(experts[:half]) & set(experts[half:])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_parts_have_the_shapes_of_a_ranks_weights(name: str, num_ranks: int) -> None:
    model = replace(PRESETS[name], num_layers=1, num_experts=min(PRESETS[name].num_experts, 8))
    if model.num_heads % num_ranks:
        pytest.skip("ranks are more than heads")
    whole = dict(checkpoint_views(model, meta(model)))
    own = [shard(model, num_ranks, rank) for rank in range(num_ranks)]
    by_expert = [shard(model, num_ranks, 1, expert_parallel=True)] if model.num_experts else []
    for config in own + by_expert:
        for each, view in checkpoint_views(config, meta(config)):
            part = sharding.part_of(config, each, tuple(whole[each].shape))
            assert view.shape == (whole[each] if part is None else part.of(whole[each])).shape, each
    least = max(model.num_kv_heads, num_ranks) // num_ranks
    assert kv_cache_bytes_per_token(own[0], dtype_bytes=2) == model.num_layers * 4 * model.head_dim * least


def meta(config: ModelConfig) -> Any:
    return zero_weights(config, dtype=torch.float32, device=torch.device("meta"))


def test_what_cannot_be_divided_names_the_numbers() -> None:
    tiny = PRESETS["tiny"]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 .* 2 query heads: take"):
        shard(tiny, 4, 0)
    with pytest.raises(ConfigError, match="12 query heads, 100 intermediate columns, 6 key heads"):
        shard(replace(tiny, num_heads=12, num_kv_heads=6, intermediate_size=100), 8, 0)
    with pytest.raises(ConfigError, match="2 query heads, 98 intermediate columns of an expert: "):
        shard(replace(PRESETS["tiny-moe"], expert_intermediate_size=98), 4, 0)
    with pytest.raises(ConfigError, match="the ranks share, but the model has 15 experts: take"):
        shard(replace(PRESETS["tiny-moe"], num_experts=15), 2, 0, expert_parallel=True)
    with pytest.raises(
        ConfigError, match="expert_parallel divides experts, but LlamaForCausalLM has none: leave it out"
    ):
        shard(tiny, 2, 0, expert_parallel=True)
    with pytest.raises(ConfigError, match="needs several ranks, found 1: pass tensor_parallel_size"):
        EngineConfig(model="tiny-moe", expert_parallel=True)
