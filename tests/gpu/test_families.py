"""Every model family on the GPU in bfloat16 against ``transformers`` in float32: decode graphs, piecewise, eager."""

from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import EXPERT_FAMILIES, FAMILIES, MORE_FAMILIES, Family, write_checkpoint
from gpu_requests import GREEDY
from noise import Checkpoint, check_against_transformers

from bullet_graph import Engine

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
HEADS: dict[Family, dict[str, Any]] = {
    "gemma3": {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 256},
    "granite": {"attention_multiplier": 1 / 64},
    # Heads of 96, as Phi-3-mini has, which are padded to 128.
    "phi3": {"hidden_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 192},
}
"""Heads of 64 but for these."""


@pytest.fixture(scope="module", params=FAMILIES + MORE_FAMILIES + EXPERT_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    changes = SHAPE | HEADS.get(family, {})
    write_checkpoint(folder, family, num_layers=4, dtype=torch.bfloat16, tokenizer=False, **changes)
    return Checkpoint.read(folder)


@pytest.mark.parametrize("policy", ["serial", "mixed:256"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_against_transformers(model: Checkpoint, policy: str, cuda_graphs: bool) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 320, size=length).tolist() for length in (1, 5, 17, 100, 255, 600, 33)]
    limits = {"max_num_seqs": 6, "kv_cache_bytes": 2**28, "max_model_len": 1024}
    with Engine(str(model.folder), policy=policy, cuda_graphs=cuda_graphs, **limits) as engine:
        outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
        assert engine.stats().kv_blocks_used == 0
    check_against_transformers(outputs, model)
