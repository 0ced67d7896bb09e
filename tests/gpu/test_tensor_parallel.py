"""Ranks on GPUs of their own: tokens against ``transformers`` under every policy, and failures that end at once."""

import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from engines import run_to_end
from gpu_requests import GREEDY, open_engine, prompts
from held_sms import run_sums_behind_a_late_rank, run_sums_beside_held_sms
from noise import Checkpoint, check_against_transformers
from torch.multiprocessing.spawn import spawn

from bullet_graph import Engine, SamplingParams
from bullet_graph.config import EngineConfig
from bullet_graph.errors import EngineDeadError
from bullet_graph.runtime.profile import prepare_profile, profile_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def make(model: Checkpoint, policy: str, **settings: object) -> Engine:
    return open_engine(model.folder, policy, tensor_parallel_size=2, **settings)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_against_transformers(model: Checkpoint, cuda_graphs: bool) -> None:
    with make(model, "auto", cuda_graphs=cuda_graphs, decode_sms=(48,)) as engine:
        for policy in ("auto", "split:48", "mixed:64", "serial"):
            engine.set_policy(policy)
            for _ in range(2):
                check_against_transformers(engine.generate(prompts(), GREEDY, use_tqdm=False), model)
        assert engine.stats().kv_blocks_used == 0


def test_graphs_that_follow_in_idle_time(model: Checkpoint) -> None:
    with make(model, "mixed:64", ready="hot") as engine:
        outputs = engine.generate(prompts(), GREEDY, use_tqdm=False)
        while engine.prepare_next():
            pass
        assert not engine.stats().num_missing_graphs
        engine.generate(prompts(), GREEDY, use_tqdm=False)
    check_against_transformers(outputs, model)


def test_a_profile(model: Checkpoint, tmp_path: Path) -> None:
    settings: dict[str, object] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "decode_sms": (48,)}
    config = EngineConfig(
        model=str(model.folder),
        tensor_parallel_size=2,
        kv_cache_bytes=2**28,
        **settings,  # type: ignore[arg-type]
    )
    table = profile_model(prepare_profile(config), file=tmp_path / "table.json", time_budget_s=0)
    assert table.key.shape["num_ranks"] == 2
    with make(model, "auto", perf_table=str(tmp_path / "table.json"), decode_sms=(48,)) as engine:
        outputs = engine.generate(prompts(), GREEDY, use_tqdm=False)
    check_against_transformers(outputs, model)


def test_ranks_that_are_late_at_random(model: Checkpoint, request: pytest.FixtureRequest) -> None:
    """Both lanes at once, with pauses of up to 5 ms of either rank's host: no launch waits for ever, no sum is wrong.

    ``--steps 100000`` is the long form.
    """
    num_steps = request.config.getoption("--steps")
    pauses = random.Random(0)
    ended = threading.Event()

    def pause(pid: int) -> None:
        while not ended.wait(pauses.expovariate(100.0)):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(pauses.uniform(0.0, 0.005))
            os.kill(pid, signal.SIGCONT)

    names, outputs, lengths = itertools.count(), [], random.Random(1)
    with make(model, "split:48", max_num_batched_tokens=256) as engine:
        (process,) = engine._executor._ranks._processes  # type: ignore[union-attr]
        thread = threading.Thread(target=pause, args=(process.pid,))
        thread.start()
        try:
            while engine.stats().num_steps < num_steps:
                while engine.stats().num_waiting < 2:
                    prompt = [lengths.randrange(1000) for _ in range(lengths.choice((5, 40, 700)))]
                    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1)
                    engine.add_request(str(next(names)), prompt, params)
                outputs = [*outputs, *(one for one in engine.step() if one.finished)][-64:]
                if pauses.random() < 0.02:
                    time.sleep(pauses.uniform(0.0, 0.005))
        finally:
            ended.set()
            thread.join()
        assert engine.stats().policy_seconds["split"] > 0
    assert len(outputs) == 64
    check_against_transformers(outputs, model)


def test_sums_run_on_their_lanes_sms(tmp_path: Path) -> None:
    """While other kernels hold a lane's SMs, its sums wait; while they hold all others, its sums run."""
    spawn(run_sums_beside_held_sms, (tmp_path,), nprocs=2)


def test_sums_take_no_longer_behind_a_late_rank(tmp_path: Path) -> None:
    """Once all ranks are there, each reads the host's word no more."""
    spawn(run_sums_behind_a_late_rank, (tmp_path,), nprocs=2)


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
