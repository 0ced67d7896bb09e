"""Interrupts and failures between the slices of a prefill."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from async_engines import collect
from engines import GREEDY, Model, at_any_depth, run_to_end, tokens_of
from policies import PROMPT, PROMPTS, fail_launches, make, short_slices

from bullet_graph import AsyncEngine, Engine, EngineDeadError
from bullet_graph.runtime.cpu import CpuExecutor


@at_any_depth
@short_slices
@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_an_interrupt_in_the_middle_of_a_prefill_leaves_a_usable_engine(
    model: Model, monkeypatch: pytest.MonkeyPatch, expected: list[tuple[int, ...]], num_good: int
) -> None:
    with make(model, max_num_seqs=2) as engine:
        with monkeypatch.context() as patch:
            fail_launches(patch, num_good, KeyboardInterrupt(), "prefill")
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        executor = engine._executor
        assert isinstance(executor, CpuExecutor)
        assert executor._results == {}
        del executor
        assert run_to_end(engine) == {}
        assert engine.stats().kv_blocks_used == 0
        outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [tokens_of(output)[0] for output in outputs] == expected
        assert engine.stats().kv_blocks_used == 0


@pytest.fixture
def dead_engine(
    monkeypatch: pytest.MonkeyPatch, one_layer_at_a_time: None
) -> Iterator[tuple[Engine, Exception]]:
    """An engine whose prefill lane failed between two slices, and why."""
    del one_layer_at_a_time
    error = RuntimeError("lane is on fire")
    engine = make()
    engine.add_request("a", PROMPTS[0], GREEDY)
    while not any(output.outputs[0].token_ids for output in engine.step()):
        pass
    engine.add_request("b", PROMPTS[3], GREEDY)
    with monkeypatch.context() as patch:
        fail_launches(patch, 1, error, "prefill")
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            run_to_end(engine)
    assert caught.value.__cause__ is error
    yield engine, error
    engine.shutdown()


def test_a_lane_that_fails_ends_the_engine_with_the_cause(dead_engine: tuple[Engine, Exception]) -> None:
    engine, error = dead_engine
    for call in (
        lambda: engine.generate(PROMPT, use_tqdm=False),
        lambda: engine.add_request("c", PROMPT),
        lambda: engine.set_policy("mixed"),
        engine.step,
    ):
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            call()
        assert caught.value.__cause__ is error


def test_an_engine_whose_lane_failed_gives_its_memory_back(dead_engine: tuple[Engine, Exception]) -> None:
    engine, _ = dead_engine
    executor = engine._executor
    assert isinstance(executor, CpuExecutor)
    decoder = executor._decoder
    references = [weakref.ref(t) for t in (decoder.weights.embed, decoder.cache._data, decoder.cos_sin)]
    references.append(weakref.ref(executor._forwards["prefill"].hidden.residual))
    del executor, decoder
    engine.shutdown()
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


@short_slices
async def test_streams_learn_that_the_prefill_lane_failed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("lane is on fire")
    fail_launches(monkeypatch, 3, error, "prefill")
    engine = AsyncEngine(make(model, max_num_seqs=2))
    async with asyncio.timeout(20):
        results = await asyncio.gather(
            *(collect(engine, prompt) for prompt in PROMPTS), return_exceptions=True
        )
        results += await asyncio.gather(collect(engine, PROMPT), return_exceptions=True)
    failures = [result for result in results if isinstance(result, EngineDeadError)]
    assert len(failures) >= len(PROMPTS) - 1
    assert all("on fire" in str(failure) and failure.__cause__ is error for failure in failures)
    assert isinstance(results[-1], EngineDeadError)
    engine.shutdown()
