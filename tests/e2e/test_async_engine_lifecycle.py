"""AsyncEngine on the CPU: shutdown, failures, several event loops."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
from async_engines import Gate, collect, engine_threads, idle
from engines import Model, make_engine, tokens_of

from bullet_graph import AsyncEngine, Engine, EngineDeadError, RequestOutput, SamplingParams
from bullet_graph.runtime.cpu import CpuExecutor

PROMPT = [5, 17, 300, 8]
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


# ---- shutdown and failure ----


@pytest.mark.parametrize("in_thread", [False, True])
async def test_shutdown_ends_the_streams_with_an_error(model: Model, gate: Gate, in_thread: bool) -> None:
    engine = AsyncEngine(make_engine(model.folder, max_num_seqs=2))
    tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(5)]
    await asyncio.sleep(0.01)
    # A step is under way, and the event loop may be the one that waits for its end.
    threading.Timer(0.05, gate.open).start()
    if in_thread:
        await asyncio.to_thread(engine.shutdown)
    else:
        engine.shutdown()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 5
    assert all("shut down" in str(result) for result in results)
    assert len({id(result) for result in results}) == 5
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(engine, PROMPT)
    engine.shutdown()
    assert not engine_threads()


async def test_shutdown_gives_the_memory_back(model: Model) -> None:
    engine = AsyncEngine(make_engine(model.folder))
    await collect(engine, PROMPT)
    executor = engine.engine._executor
    assert isinstance(executor, CpuExecutor)
    reference = weakref.ref(executor._decoder.cache)
    del executor
    await asyncio.to_thread(engine.shutdown)
    gc.collect()
    assert reference() is None


async def test_leaving_the_context_shuts_down(model: Model) -> None:
    async with AsyncEngine(make_engine(model.folder)) as engine:
        assert (await collect(engine, PROMPT))[-1].finished
    with pytest.raises(EngineDeadError):
        await collect(engine, PROMPT)
    with pytest.raises(EngineDeadError):
        engine.engine.step()


async def test_requests_that_race_with_shutdown_all_get_an_answer(model: Model) -> None:
    for delay in range(4):
        engine = AsyncEngine(make_engine(model.folder))
        tasks = [asyncio.create_task(collect(engine, PROMPT)) for _ in range(4)]
        stopping = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        for _ in range(delay):
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(collect(engine, PROMPT)) for _ in range(4)]
        async with asyncio.timeout(20):
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await stopping
        assert all(isinstance(result, (list, EngineDeadError)) for result in results)


async def test_a_failure_reaches_all_streams_and_later_ones(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("on fire")
    launch = CpuExecutor.launch
    calls = iter(range(4))

    def failing(self: CpuExecutor, step: object, placement: object) -> int:
        if next(calls, None) is None:
            raise error
        return launch(self, step, placement)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuExecutor, "launch", failing)
    engine = AsyncEngine(make_engine(model.folder, max_num_seqs=2))
    async with asyncio.timeout(20):
        results = await asyncio.gather(
            *(collect(engine, PROMPT, LONG) for _ in range(5)), return_exceptions=True
        )
    monkeypatch.undo()
    results += await asyncio.gather(collect(engine, PROMPT), return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineDeadError)
        assert "on fire" in str(result)
        assert result.__cause__ is error
    engine.shutdown()


async def test_streams_end_even_if_the_device_cannot_be_shut_down(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhandled = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)

    def failing(*_: object) -> None:
        raise OSError("lost")

    monkeypatch.setattr(CpuExecutor, "launch", failing)
    monkeypatch.setattr(CpuExecutor, "shutdown", failing)
    engine = AsyncEngine(make_engine(model.folder))
    async with asyncio.timeout(20):
        with pytest.raises(EngineDeadError, match="lost"):
            await collect(engine, PROMPT)
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="lost"):
            await collect(engine, PROMPT)
    assert [args.exc_type for args in unhandled] == [OSError]


# ---- event loops ----


def test_one_engine_serves_one_event_loop_after_another(model: Model) -> None:
    engine = AsyncEngine(make_engine(model.folder))
    for _ in range(3):
        outputs = asyncio.run(collect(engine, PROMPT))
        assert tokens_of(outputs[-1]) == [model.greedy(PROMPT, 12)]
    engine.shutdown()


def test_a_loop_that_ends_takes_its_requests_with_it(model: Model, gate: Gate) -> None:
    engine = AsyncEngine(make_engine(model.folder))

    async def leave_behind() -> None:
        task = asyncio.create_task(collect(engine, PROMPT, LONG))
        await asyncio.sleep(0.01)
        assert not task.done()

    asyncio.run(leave_behind())
    gate.open()
    asyncio.run(idle(engine))
    assert tokens_of(asyncio.run(collect(engine, PROMPT))[-1]) == [model.greedy(PROMPT, 12)]
    engine.shutdown()


def test_a_loop_closed_under_a_request_does_not_hurt_the_engine(model: Model) -> None:
    engine = AsyncEngine(make_engine(model.folder))
    loop = asyncio.new_event_loop()
    generator = engine.generate(PROMPT, LONG)
    loop.run_until_complete(anext(generator))
    loop.close()
    assert tokens_of(asyncio.run(collect(engine, PROMPT))[-1]) == [model.greedy(PROMPT, 12)]
    engine.shutdown()


def test_two_loops_in_two_threads_at_once(model: Model) -> None:
    engine = AsyncEngine(make_engine(model.folder))
    results: dict[int, RequestOutput] = {}

    def work(first: int) -> None:
        results[first] = asyncio.run(collect(engine, [first, 2, 3]))[-1]

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.shutdown()
    assert {first: tokens_of(output) for first, output in results.items()} == {
        first: [model.greedy([first, 2, 3], 12)] for first in (1, 2)
    }


def test_the_thread_waits_without_work(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    step = Engine.step

    def count(self: Engine) -> list[RequestOutput]:
        nonlocal steps
        steps += 1
        return step(self)

    monkeypatch.setattr(Engine, "step", count)
    engine = AsyncEngine(make_engine(model.folder))
    asyncio.run(collect(engine, PROMPT))
    before = steps
    time.sleep(0.05)
    assert steps == before
    engine.shutdown()


# ---- given up from outside ----


async def test_failing_from_outside_reaches_all_even_if_the_thread_is_stuck(model: Model, gate: Gate) -> None:
    engine = AsyncEngine(make_engine(model.folder, max_num_seqs=2))
    tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(5)]
    while engine.stalled(0.05) is None:
        await asyncio.sleep(0.01)
    stalled = engine.stalled(0.05)
    assert stalled is not None
    assert "decode lane: a decode step of 2 rows" in stalled
    # One that the engine's thread has not seen yet.
    tasks.append(asyncio.create_task(collect(engine, PROMPT, LONG)))
    await asyncio.sleep(0)
    assert engine.failure is None
    engine.fail("given up")
    engine.fail("again")
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, collect(engine, PROMPT), return_exceptions=True)
    assert [str(result) for result in results] == ["given up"] * 7
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert str(engine.failure) == "given up"
    assert not engine.shutdown(0.05)
    gate.open()
    assert engine.shutdown(20)
    assert engine.stalled(0.0) is None
    assert not engine_threads()


async def test_a_loop_stuck_between_launches_is_told(model: Model) -> None:
    hold = threading.Event()
    async with AsyncEngine(make_engine(model.folder)) as engine:
        await collect(engine, PROMPT)
        time.sleep(0.1)
        assert engine.stalled(0.05) is None  # it only waits for work
        engine._commands.put(hold.wait)  # type: ignore[arg-type]
        time.sleep(0.1)
        stalled = engine.stalled(0.05)
        assert stalled is not None
        assert stalled.startswith("engine loop: between two launches, nothing has happened for 0.")
        hold.set()
        await collect(engine, PROMPT)
        assert engine.stalled(5) is None


async def test_the_counters_are_those_after_the_last_step(model: Model) -> None:
    async with AsyncEngine(make_engine(model.folder)) as engine:
        assert engine.stats.num_steps == 0
        await collect(engine, PROMPT)
        assert engine.stats == engine.engine.stats()
        assert engine.stats.num_steps > 0
        assert engine.stats.lane_sms == engine.stats.lane_sm_seconds == {}
        assert engine.stats.lane_seconds["decode"] > 0
