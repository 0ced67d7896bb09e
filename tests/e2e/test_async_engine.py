"""AsyncEngine on the CPU: many requests at once, leaving early, failures, several event loops."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator

import pytest
from engines import GREEDY, Model, at_any_depth, make_engine, tokens_of

from bullet_graph import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    OutputKind,
    PromptError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from bullet_graph.runtime.cpu import CpuExecutor

PROMPT = [5, 17, 300, 8]
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture
async def engine(model: Model) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(make_engine(model.folder, max_num_seqs=4, arm="mixed:16")) as engine:
        yield engine
        await idle(engine)
    assert not engine_threads()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bullet-graph-engine"]


async def collect(
    engine: AsyncEngine, prompt: object, params: SamplingParams = GREEDY, **options: object
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]  # type: ignore[arg-type]


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing to do; all blocks must be free then."""
    deadline = time.monotonic() + 20
    while engine.engine.has_unfinished_requests() or engine.engine.stats().kv_blocks_used:
        assert time.monotonic() < deadline, engine.engine.stats()
        await asyncio.sleep(0.002)
    assert engine.engine.stats().num_running == engine.engine.stats().num_waiting == 0


# ---- many at once ----


async def test_outputs_come_as_they_grow(engine: AsyncEngine, model: Model) -> None:
    outputs = await collect(engine, PROMPT, request_id="mine")
    expected = model.greedy(PROMPT, 12)
    assert [output.outputs[0].token_ids for output in outputs] == [expected[:n] for n in range(1, 13)]
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert {output.request_id for output in outputs} == {"mine"}


@at_any_depth
async def test_many_at_once_equal_each_alone(model: Model) -> None:
    prompts = [[n, 2 * n + 1, 7] * (1 + n % 4) for n in range(12)]
    params = [
        SamplingParams(seed=n, max_tokens=3 + n, ignore_eos=True, temperature=n % 3, n=1 + n % 2)
        for n in range(12)
    ]
    with make_engine(model.folder) as alone:
        expected = [
            tokens_of(alone.generate(prompt, param, use_tqdm=False)[0])
            for prompt, param in zip(prompts, params, strict=True)
        ]
    async with AsyncEngine(make_engine(model.folder, max_num_seqs=5, arm="mixed:9")) as engine:
        streams = await asyncio.gather(
            *(collect(engine, prompt, param) for prompt, param in zip(prompts, params, strict=True))
        )
    assert [tokens_of(outputs[-1]) for outputs in streams] == expected
    assert len({outputs[0].request_id for outputs in streams}) == 12


async def test_text_prompts_and_default_params(engine: AsyncEngine) -> None:
    outputs = [output async for output in engine.generate("The dog sleeps")]
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].text


async def test_deltas_join_to_the_whole(engine: AsyncEngine) -> None:
    params = SamplingParams(seed=8, max_tokens=20, logprobs=1, stop="e")
    (final,) = await collect(engine, PROMPT, params, output_kind=OutputKind.FINAL_ONLY)
    deltas = [o.outputs[0] for o in await collect(engine, PROMPT, params, output_kind=OutputKind.DELTA)]
    whole = final.outputs[0]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
    assert sum((delta.logprobs or () for delta in deltas), ()) == whole.logprobs
    assert deltas[-1].finish_reason == whole.finish_reason


async def test_the_event_loop_goes_on_while_the_engine_works(engine: AsyncEngine) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await collect(engine, PROMPT)
    ticking.cancel()
    assert ticks > 12


# ---- leaving early ----


async def test_cancelling_a_task_aborts_its_request_alone(engine: AsyncEngine, model: Model) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in engine.generate(PROMPT, LONG):
            started.set()

    victim = asyncio.create_task(consume())
    other = asyncio.create_task(collect(engine, [9, 9]))
    await started.wait()
    victim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await victim
    assert tokens_of((await other)[-1]) == [model.greedy([9, 9], 12)]
    await idle(engine)


async def test_cancelling_before_the_first_output(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(8)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await idle(engine)


async def test_breaking_out_aborts(engine: AsyncEngine) -> None:
    async for output in engine.generate(PROMPT, LONG):
        if len(output.outputs[0].token_ids) == 3:
            break
    await idle(engine)
    assert engine.engine.stats().num_steps < 100


async def test_closing_the_generator_aborts(engine: AsyncEngine) -> None:
    generator = engine.generate(PROMPT, LONG)
    await anext(generator)
    await generator.aclose()  # type: ignore[attr-defined]
    await idle(engine)


async def test_a_timeout_aborts(engine: AsyncEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await asyncio.gather(*(collect(engine, PROMPT, LONG) for _ in range(30)))
    await idle(engine)


async def test_an_id_can_be_used_again_right_after_its_request_was_left(
    engine: AsyncEngine, model: Model
) -> None:
    # The abort must not end the new request of the same id.
    for _ in range(20):
        generator = engine.generate(PROMPT, LONG, "same")
        await anext(generator)
        await generator.aclose()  # type: ignore[attr-defined]
        outputs = await collect(engine, [9, 9], request_id="same")
        assert tokens_of(outputs[-1]) == [model.greedy([9, 9], 12)]


# ---- bad requests ----


async def test_a_bad_request_raises_in_its_own_generator_only(engine: AsyncEngine, model: Model) -> None:
    bad: list[object] = [[], [5000], [1] * 500, [1.5], None]
    results = await asyncio.gather(
        *(collect(engine, prompt) for prompt in [PROMPT, *bad, PROMPT]), return_exceptions=True
    )
    for result in (results[0], results[-1]):
        assert isinstance(result, list)
        assert tokens_of(result[-1]) == [model.greedy(PROMPT, 12)]
    assert [type(result) for result in results[1:-1]] == [PromptError] * 5


async def test_params_of_another_type_raise_in_their_own_generator_only(engine: AsyncEngine) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        await collect(engine, PROMPT, {"temperature": 0})  # type: ignore[arg-type]
    assert (await collect(engine, PROMPT))[-1].finished


async def test_an_unforeseen_error_raises_in_its_own_generator_only(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine._admission, "token_ids", failing)
        with pytest.raises(ZeroDivisionError):
            await collect(engine, PROMPT)
    assert (await collect(engine, PROMPT))[-1].finished


async def test_an_id_in_use_is_refused_and_its_request_goes_on(engine: AsyncEngine, model: Model) -> None:
    # Long: the second request must come while the first is under way.
    generator = engine.generate(PROMPT, LONG, "same")
    await anext(generator)
    with pytest.raises(RequestError, match="'same' is in use"):
        await collect(engine, [1], request_id="same")
    last = [output async for output in generator][-1]
    assert tokens_of(last) == [model.greedy(PROMPT, 100)]


# ---- shutdown and failure ----


@pytest.mark.parametrize("in_thread", [False, True])
async def test_shutdown_ends_the_streams_with_an_error(model: Model, in_thread: bool) -> None:
    engine = AsyncEngine(make_engine(model.folder, max_num_seqs=2))
    tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(5)]
    await asyncio.sleep(0.01)
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

    def failing(self: CpuExecutor, step: object) -> int:
        if next(calls, None) is None:
            raise error
        return launch(self, step)  # type: ignore[arg-type]

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


def test_a_loop_that_ends_takes_its_requests_with_it(model: Model) -> None:
    engine = AsyncEngine(make_engine(model.folder))

    async def leave_behind() -> None:
        task = asyncio.create_task(collect(engine, PROMPT, LONG))
        await asyncio.sleep(0.01)
        assert not task.done()

    asyncio.run(leave_behind())
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
