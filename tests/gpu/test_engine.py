"""The whole engine on the GPU: tokens against ``transformers``, memory, preemption, good manners, grammars."""

import logging
import os
import re
import signal
import subprocess
import sys
from unittest.mock import Mock

import psutil
import pytest
import torch
from gpu_requests import GREEDY, LENGTHS, open_engine, prompts
from noise import Checkpoint, check_against_transformers

from bullet_graph import Engine, PerfTableWarning, SamplingParams, StructuredOutputs
from bullet_graph.runtime.cuda import CudaExecutor

CUBLAS_WORKSPACE_BYTES = 34 * 2**20


@pytest.mark.parametrize("policy", ["serial", "mixed", "mixed:64", "split:48", "auto"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_against_transformers(model: Checkpoint, policy: str, cuda_graphs: bool) -> None:
    with open_engine(model.folder, policy, cuda_graphs=cuda_graphs) as engine:
        outputs = engine.generate(prompts(), GREEDY, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [GREEDY.max_tokens] * len(LENGTHS)
        assert engine.stats().kv_blocks_used == 0
    check_against_transformers(outputs, model)


@pytest.mark.parametrize("policy", ["serial", "mixed:64", "split:48"])
def test_scores_of_prompts_against_transformers(model: Checkpoint, policy: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=2)
    with open_engine(model.folder, policy) as engine:
        outputs = engine.generate(prompts(), [params, GREEDY] * (len(LENGTHS) // 2), use_tqdm=False)
    errors, noise = [], []
    for output in outputs[2::2]:
        ids = torch.tensor([output.prompt_token_ids], device="cuda")
        with torch.inference_mode():
            exact, rounded = (net(ids).logits[0, :-1].float().log_softmax(-1) for net in (model.exact, model.rounded))
        chosen = exact.gather(-1, ids[0, 1:, None])[:, 0]
        assert output.prompt_logprobs is not None
        entries = [entry for entry in output.prompt_logprobs if entry is not None]
        assert [entry.token_id for entry in entries] == ids[0, 1:].tolist()
        errors.append(torch.tensor([entry.logprob for entry in entries], device="cuda") - chosen)
        noise.append(rounded.gather(-1, ids[0, 1:, None])[:, 0] - chosen)
        best = torch.tensor([entry.top[0][1] for entry in entries], device="cuda")
        torch.testing.assert_close(best, exact.max(-1).values, atol=0.1, rtol=0.05)
    rms_error, rms_noise = (torch.cat(values).square().mean().sqrt() for values in (errors, noise))
    assert rms_error < 1.5 * rms_noise
    check_against_transformers(outputs[1::2], model)


def test_preemption_loses_nothing(model: Checkpoint) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1)
    with Engine(
        str(model.folder), max_num_seqs=6, max_model_len=720, kv_cache_bytes=60 * 3 * 2 * 16 * 256 * 2
    ) as engine:
        outputs = engine.generate(prompts(), params, use_tqdm=False)
        stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.kv_blocks_used == 0
    check_against_transformers(outputs, model)


@pytest.mark.parametrize("policy", ["mixed:64", "split:48"])
def test_an_interrupt_loses_the_requests_and_nothing_else(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    with open_engine(model.folder, policy) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(CudaExecutor, "wait", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.generate(prompts(), GREEDY, use_tqdm=False)
        assert isinstance(engine._executor, CudaExecutor)
        assert engine._executor._pending == {}
        outputs = engine.generate(prompts(), GREEDY, use_tqdm=False)
        assert engine.stats().kv_blocks_used == 0
    check_against_transformers(outputs, model)


def test_an_engine_that_is_ready_early_captures_the_rest(model: Checkpoint) -> None:
    """While it serves, and then while it is idle; another graph may round otherwise, but no worse."""
    with Engine(str(model.folder), max_num_seqs=32, kv_cache_bytes=2**28, ready="hot") as engine:
        at_first = engine.stats().num_missing_graphs
        check_against_transformers(engine.generate(prompts(), GREEDY, use_tqdm=False), model)
        assert 0 < engine.stats().num_missing_graphs < at_first
        while engine.prepare_next():
            pass
        assert engine.stats().num_missing_graphs == 0
        check_against_transformers(engine.generate(prompts(), GREEDY, use_tqdm=False), model)
        seconds = engine.start_report.seconds
    assert {"partitions", "weights", "kernels", "decode graphs", "first token"} <= seconds.keys()


def test_seeded_sampling_repeats(model: Checkpoint) -> None:
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True, n=2)
    with Engine(str(model.folder), max_num_seqs=8, kv_cache_bytes=2**28) as engine:
        first, second = (engine.generate([[1, 2, 3]], params, use_tqdm=False)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids


def test_shutdown_gives_the_memory_back_and_no_process_is_left(model: Checkpoint) -> None:
    free, kv_cache_bytes = [], 2**30
    allocated = torch.cuda.memory_allocated()
    for engines in range(1, 4):
        with Engine(str(model.folder), max_num_seqs=8, kv_cache_bytes=kv_cache_bytes) as engine:
            engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
            assert torch.cuda.memory_allocated() > allocated + kv_cache_bytes
            assert psutil.Process().children(recursive=True) == []
        # torch keeps a cuBLAS workspace for each stream it has seen; nothing else may stay.
        assert torch.cuda.memory_allocated() <= allocated + engines * CUBLAS_WORKSPACE_BYTES
        free.append(torch.cuda.mem_get_info()[0])
    # The first engine loads kernels that stay with the process; later ones leave nothing else behind.
    assert free[1] - free[2] <= 2 * CUBLAS_WORKSPACE_BYTES


def test_the_process_is_left_as_it_was(model: Checkpoint) -> None:
    def state() -> tuple[object, ...]:
        handlers = tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD))
        root = logging.getLogger()
        return dict(os.environ), handlers, tuple(root.handlers), root.level, torch.get_default_dtype()

    before = state()
    with Engine(str(model.folder), max_num_seqs=8, kv_cache_bytes=2**28) as engine:
        engine.generate([[1, 2, 3]] * 3, GREEDY, use_tqdm=False)
    assert state() == before


def test_auto_without_a_table_serves_in_fixed_chunks(model: Checkpoint) -> None:
    with pytest.warns(PerfTableWarning, match="forwards have at most 512 rows"):
        engine = Engine(str(model.folder), policy="auto", max_num_seqs=4, kv_cache_bytes=2**28)
    with engine:
        outputs = engine.generate([[1] * 900, [2] * 30], GREEDY, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [24, 24]
        assert set(engine.stats().policy_shares) <= {"mixed", "solo"}


FORKED = """
import os, sys
import torch
from bullet_graph import DeviceError, Engine

torch.zeros(1, device="cuda")
if os.fork() == 0:
    try:
        Engine(sys.argv[1])
    except DeviceError as error:
        print("spawn" in str(error), flush=True)
    os._exit(0)
os.wait()
"""


def test_an_engine_in_a_fork_of_a_process_that_used_the_gpu_is_refused(model: Checkpoint) -> None:
    script = [sys.executable, "-c", FORKED, str(model.folder)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n", done.stderr


# ---- structured outputs: captured decode steps with masks, among free rows ----

PATTERN = "[a-z]{3}-[0-9]{20,30}(x|yz)"
FREE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("policy", ["serial", "mixed:64", "auto"])
def test_outputs_follow_their_grammar_among_free_rows(policy: str) -> None:
    follows = StructuredOutputs(regex=PATTERN)
    coded = [
        SamplingParams(seed=i, temperature=i % 2, n=3, max_tokens=80, structured_outputs=follows) for i in range(8)
    ]
    prompts = [[(7 * i + j) % 500 for j in range(20 + 90 * i)] for i in range(8)]
    with Engine(
        "tiny", device="cuda", policy=policy, perf_table="roofline", max_model_len=1024, max_num_seqs=24
    ) as engine:
        outputs = engine.generate(prompts * 2, [*coded, *[FREE] * 8], use_tqdm=False)
        assert engine.stats().kv_blocks_used == 0
    for output in outputs[:8]:
        assert all(re.fullmatch(PATTERN, sample.text) for sample in output.outputs), output
        assert {sample.finish_reason for sample in output.outputs} == {"stop"}
    assert all(len(output.outputs[0].token_ids) == 40 for output in outputs[8:])
