"""Ranks on GPUs of their own: tokens against ``transformers`` under every policy, and failures that end at once."""

import time
from pathlib import Path

import pytest
import torch
from engines import run_to_end
from gpu_requests import GREEDY, prompts
from noise import Checkpoint, check_against_transformers

from bullet_graph import Engine
from bullet_graph.config import EngineConfig
from bullet_graph.errors import EngineDeadError
from bullet_graph.runtime.profile import prepare_profile, profile_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def make(model: Checkpoint, policy: str, **settings: object) -> Engine:
    return Engine(
        str(model.folder),
        policy=policy,
        tensor_parallel_size=2,
        max_num_seqs=6,
        kv_cache_bytes=2**28,
        **{"perf_table": "roofline", **settings},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("policy", ["serial", "mixed:64", "split:48", "auto"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_against_transformers(model: Checkpoint, policy: str, cuda_graphs: bool) -> None:
    with make(model, policy, cuda_graphs=cuda_graphs) as engine:
        outputs = engine.generate(prompts(), GREEDY, use_tqdm=False)
        again = engine.generate(prompts(), GREEDY, use_tqdm=False)
        assert engine.stats().kv_blocks_used == 0
    check_against_transformers(outputs, model)
    check_against_transformers(again, model)


def test_graphs_that_follow_in_idle_time(model: Checkpoint) -> None:
    with make(model, "mixed:64", ready="hot") as engine:
        outputs = engine.generate(prompts(), GREEDY, use_tqdm=False)
        while engine.prepare_next():
            pass
        assert not engine.stats().num_missing_graphs
        engine.generate(prompts(), GREEDY, use_tqdm=False)
    check_against_transformers(outputs, model)


def test_a_profile(model: Checkpoint, tmp_path: Path) -> None:
    settings: dict[str, object] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "decode_sms": (48,)}
    config = EngineConfig(
        model=str(model.folder),
        tensor_parallel_size=2,
        kv_cache_bytes=2**28,
        **settings,  # type: ignore[arg-type]
    )
    table = profile_model(prepare_profile(config), file=tmp_path / "table.json", time_budget_s=20)
    assert table.key.shape["num_ranks"] == 2
    with make(model, "auto", perf_table=str(tmp_path / "table.json"), decode_sms=(48,)) as engine:
        outputs = engine.generate(prompts(), GREEDY, use_tqdm=False)
    check_against_transformers(outputs, model)


def test_a_killed_rank_ends_every_request(model: Checkpoint) -> None:
    engine = make(model, "auto")
    free = torch.cuda.mem_get_info(0)[0]
    for index, prompt in enumerate(prompts()):
        engine.add_request(str(index), prompt, GREEDY)
    for _ in range(3):
        engine.step()
    (process,) = engine._executor._ranks._processes  # type: ignore[union-attr]
    process.kill()
    start_s = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* ended with signal 9"):
        run_to_end(engine)
    assert time.monotonic() - start_s < 10
    engine.shutdown()
    assert torch.cuda.mem_get_info(0)[0] > free
