"""Engines whose ranks are processes: the same tokens as one rank's, and no process left whatever happens."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import GREEDY, POLICIES, PROMPTS, fail_launches, make_engine, run_to_end, tokens_of

from bullet_graph import AsyncEngine, Engine, SamplingParams
from bullet_graph.config import EngineConfig
from bullet_graph.errors import CheckpointError, ConfigError, EngineDeadError, InsufficientMemoryError, PerfTableError
from bullet_graph.runtime import build, ranks, tensor_parallel
from bullet_graph.runtime.memory import with_kv_blocks
from bullet_graph.runtime.resolve import Runtime
from bullet_graph.runtime.step import Placement

KV_BLOCKS = 16
SETTINGS: dict[str, Any] = {"perf_table": "roofline", "kv_cache_bytes": KV_BLOCKS * 16 * 4 * 64 * 4 * 2}
SAMPLED = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=8, ignore_eos=True)


def make_ranked(num_ranks: int = 2, model: str = "tiny-moe", **settings: Any) -> Engine:
    return make_engine(model, tensor_parallel_size=num_ranks, **(SETTINGS | settings))


def followers() -> list[psutil.Process]:
    alive = (p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE)
    return [p for p in alive if ranks.FOLLOWER in " ".join(p.cmdline())]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Two ranks that divide the experts; rank 0 claims to have room for more blocks than the other has."""
    with pytest.MonkeyPatch.context() as patch:
        plan = build.plan_ledger
        patch.setattr(build, "plan_ledger", lambda *rest: with_kv_blocks(plan(*rest), KV_BLOCKS + 7))
        engine = make_ranked(expert_parallel=True)
    with engine:
        yield engine
    assert not followers()


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    with make_engine("tiny-moe", perf_table="roofline") as engine:
        yield engine


@pytest.fixture
def doomed() -> Iterator[Engine]:
    """An engine of two ranks for a test that makes it fail."""
    before = len(followers())
    with make_ranked(policy="auto") as engine:
        yield engine
    assert len(followers()) == before


def check_equal(engines: tuple[Engine, Engine], policy: str, prompts: Any, params: Any) -> None:
    """Both generate the same tokens under a policy."""
    found = []
    for each in engines:
        each.set_policy(policy)
        found.append([tokens_of(output) for output in each.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_under_every_policy(policy: str, engine: Engine, alone: Engine) -> None:
    check_equal((alone, engine), policy, PROMPTS, GREEDY)


@pytest.mark.usefixtures("short_slices")
def test_both_lanes(engine: Engine, alone: Engine) -> None:
    check_equal((alone, engine), "auto", PROMPTS, [GREEDY, SAMPLED] * 3)
    assert all(each.stats().lane_seconds["prefill"] > 0 for each in (alone, engine))


def test_the_tightest_rank_decides_how_many_blocks(engine: Engine) -> None:
    assert engine.memory.num_kv_blocks == KV_BLOCKS
    assert engine.stats().kv_blocks_total == KV_BLOCKS - 1
    assert engine.model_config.num_heads == 2, "the engine's model is the whole one"


def test_preemption_prefix_cache_and_aborts(engine: Engine, alone: Engine) -> None:
    long = replace(GREEDY, max_tokens=60)
    prompts = [[*PROMPTS[3][:20], *prompt[:10]] for prompt in PROMPTS]
    for each in (alone, engine):
        each.set_policy("mixed")
    expected = [tokens_of(output) for output in alone.generate(prompts, long, use_tqdm=False)]
    for name, prompt in [*enumerate(prompts), ("aborted", PROMPTS[0])]:
        engine.add_request(str(name), prompt, long)
    for _ in range(5):
        engine.step()
    engine.abort("aborted")
    outputs = run_to_end(engine)
    assert [tokens_of(outputs[str(i)][-1]) for i in range(len(prompts))] == expected
    stats = engine.stats()
    assert stats.num_preemptions
    assert stats.prefix_cache_hits
    assert not stats.kv_blocks_used


def test_logprobs_penalties_and_structure(engine: Engine, alone: Engine) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1, repetition_penalty=1.3),
        SamplingParams(temperature=1, seed=1, max_tokens=8, logit_bias={5: 3.0}, ignore_eos=True),
    ]
    check_equal((alone, engine), "mixed:16", [PROMPTS[2], PROMPTS[4]], params)


def test_asynchronously(engine: Engine, alone: Engine) -> None:
    """The last of those that share an engine."""

    async def run() -> None:
        engine.set_policy("auto")
        in_thread = AsyncEngine(engine)
        outputs = [output async for output in in_thread.generate(PROMPTS[0], GREEDY)]
        assert tokens_of(outputs[-1]) == tokens_of(alone.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0])
        followers()[-1].kill()
        async with asyncio.timeout(10):  # nothing runs, and it is told all the same
            while in_thread.failure is None:
                await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError, match="rank 1 "):
            async for _ in in_thread.generate(PROMPTS[0], GREEDY):
                pass
        in_thread.shutdown()

    asyncio.run(run())
    assert not followers()


# ---- failures ----


def end(engine: Engine, act: Callable[[psutil.Process], object], message: str) -> None:
    """Let something happen to the last rank in the middle of a batch: all requests fail, with this message."""
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY)
    for _ in range(3):
        engine.step()
    mine, start_s = engine._executor._ranks._processes, time.monotonic()  # type: ignore[union-attr]
    act(psutil.Process(mine[-1].pid))
    with pytest.raises(EngineDeadError, match=message):
        run_to_end(engine)
    assert time.monotonic() - start_s < 10
    with pytest.raises(EngineDeadError, match=message):
        engine.generate(PROMPTS[0], GREEDY)
    engine.shutdown()
    assert all(process.poll() is not None for process in mine)


def test_a_killed_rank_of_four(tmp_path: Path) -> None:
    from checkpoints import write_checkpoint  # noqa: PLC0415 - transformers is slow to import

    write_checkpoint(tmp_path, "llama", tokenizer=False)
    params = [replace(GREEDY, max_tokens=4), SAMPLED]
    with make_engine(tmp_path) as one:
        expected = [tokens_of(output) for output in one.generate(PROMPTS[:2], params, use_tqdm=False)]
    engine = make_engine(tmp_path, tensor_parallel_size=4)
    assert [tokens_of(output) for output in engine.generate(PROMPTS[:2], params, use_tqdm=False)] == expected
    end(engine, psutil.Process.kill, r"rank 3 \(process \d+\) ended with signal 9, and without a message")


def test_a_hanging_rank(doomed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LAUNCH_TIMEOUT_S", 1.0)
    end(doomed, psutil.Process.suspend, "made no progress for 1 s; rank 1 is behind")


def test_a_rank_that_raises(doomed: Engine) -> None:
    others = doomed._executor._ranks  # type: ignore[union-attr]
    end(doomed, lambda _: others.send("launch", None, Placement()), "rank 1 failed: AttributeError: 'NoneType'")


def test_rank_0_raises(doomed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_launches(monkeypatch, 3, RuntimeError("out of something"))
    end(doomed, lambda _: None, "out of something")


def test_an_interrupt_in_the_middle_of_a_launch(doomed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_launches(monkeypatch, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        doomed.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="an interrupt left the ranks in the middle of a launch"):
        doomed.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_an_error_of_a_start_is_the_rank_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = tensor_parallel.of_rank

    def without_weights(config: EngineConfig, runtime: Runtime, rank: int) -> Runtime:
        found = of_rank(config, runtime, rank)
        return replace(found, folder=tmp_path) if rank else found

    before = len(followers())
    monkeypatch.setattr(tensor_parallel, "of_rank", without_weights)
    with pytest.raises(CheckpointError, match=f"rank 1: {tmp_path} must hold model.safetensors"):
        make_ranked()
    assert len(followers()) == before


def test_what_is_refused() -> None:
    for error, settings, message in (
        (ConfigError, {"num_ranks": 4}, "tensor_parallel_size=4 must divide .* 2 query heads"),
        (PerfTableError, {"perf_table": "a.json"}, "tables are measured on GPUs, but the device is the CPU"),
        (InsufficientMemoryError, {"kv_cache_bytes": 1000}, "short by"),
    ):
        before = len(followers())
        with pytest.raises(error, match=message):
            make_ranked(**settings)  # type: ignore[arg-type]
        assert len(followers()) == before


_LONG = """
import signal
from bullet_graph import Engine, SamplingParams
# A shell may start what runs in the background without interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
engine = Engine("tiny", device="cpu", tensor_parallel_size=2)
ranks = engine._executor._ranks
print(ranks.folder, *(process.pid for process in ranks._processes), flush=True)
try:
    engine.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=10_000, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_engine_s_process(how: signal.Signals) -> None:
    # From a text: no rank imports the program's main module.
    command = [sys.executable, "-c", _LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        folder, *pids = process.stdout.readline().split()
        others = [psutil.Process(int(pid)) for pid in pids]
        time.sleep(0.5)
        process.send_signal(how)
        try:
            rest, _ = process.communicate(timeout=20)
        finally:
            process.kill()
        assert process.returncode == (-9 if how == signal.SIGKILL else 0)
    assert rest == ("" if how == signal.SIGKILL else "interrupted\n")
    assert others
    assert not psutil.wait_procs(others, timeout=5)[1]
    assert not Path(folder).exists()


def test_a_collective_under_way_does_not_abort_the_program_at_its_end() -> None:
    program = """if True:
        import time, torch
        from bullet_graph import Engine
        engine = Engine("tiny", device="cpu", tensor_parallel_size=2)
        ranks = engine._executor._ranks
        def begin(inner):
            inner._group.allreduce([torch.zeros(1)]).get_future().then(lambda _: time.sleep(1))
        begin(ranks.communicators["decode"]._inner)
        ranks._processes[0].kill()
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
