"""AsyncEngine on the CPU: many requests at once, leaving early, bad requests, shutdown, failures, event loops."""

import asyncio
import gc
import inspect
import re
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from engines import Gate, Model, collect, engine_threads, fail_launches, idle, make_engine, tokens_of
from programs import printed_by

import bullet_graph
from bullet_graph import (
    AsyncEngine,
    ConfigError,
    Engine,
    EngineDeadError,
    PromptError,
    RequestError,
    RequestOutput,
    SamplingParams,
    Slo,
)
from bullet_graph.runtime.cpu import CpuExecutor

PROMPT = [5, 17, 300, 8]
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture
async def engine(model: Model) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(make_engine(model.folder, max_num_seqs=4, policy="mixed:16")) as engine:
        yield engine
        await idle(engine)
    assert not engine_threads()


# ---- making one ----


async def test_it_is_made_as_an_engine_is(model: Model) -> None:
    async with AsyncEngine(str(model.folder), device="cpu", policy="mixed:16", max_num_seqs=4) as engine:
        assert tokens_of((await collect(engine, PROMPT))[-1]) == [model.greedy(PROMPT, 12)]
    assert inspect.signature(AsyncEngine) == inspect.signature(Engine)
    with make_engine(model.folder) as made, pytest.raises(ConfigError, match="leave out seed"):
        AsyncEngine(made, seed=3)


@pytest.mark.parametrize("page", ["README.md", "bullet_graph/serve/README.md"])
def test_the_example_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(bullet_graph.__file__).parents[1].joinpath(page).read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (example,) = [example for example in examples if "asyncio" in example]
    exec(compile(example, page, "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 2


# ---- many at once ----


async def test_outputs_come_as_they_grow(engine: AsyncEngine, model: Model) -> None:
    before_s = engine.engine.now()
    outputs = await collect(engine, PROMPT, request_id="mine")
    expected = model.greedy(PROMPT, 12)
    assert [output.outputs[0].token_ids for output in outputs] == [expected[:n] for n in range(1, 13)]
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert {output.request_id for output in outputs} == {"mine"}
    metrics = outputs[-1].metrics
    assert before_s <= metrics.arrival_s <= metrics.first_scheduled_s <= metrics.token_times_s[0]


@pytest.mark.usefixtures("depth")
async def test_many_at_once_equal_each_alone(model: Model) -> None:
    prompts = [[n, 2 * n + 1, 7] * (1 + n % 4) for n in range(12)]
    params = [
        SamplingParams(seed=n, max_tokens=3 + n, ignore_eos=True, temperature=n % 3, n=1 + n % 2) for n in range(12)
    ]
    with make_engine(model.folder) as alone:
        expected = [
            tokens_of(alone.generate(prompt, param, use_tqdm=False)[0])
            for prompt, param in zip(prompts, params, strict=True)
        ]
    async with AsyncEngine(make_engine(model.folder, max_num_seqs=5, policy="mixed:9")) as engine:
        streams = await asyncio.gather(
            *(collect(engine, prompt, param) for prompt, param in zip(prompts, params, strict=True))
        )
    assert [tokens_of(outputs[-1]) for outputs in streams] == expected
    assert len({outputs[0].request_id for outputs in streams}) == 12


async def test_a_step_wakes_the_event_loop_once_however_many_it_serves(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    call_soon = Mock(wraps=loop.call_soon_threadsafe)
    monkeypatch.setattr(loop, "call_soon_threadsafe", call_soon)
    tokens = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    await asyncio.gather(*(collect(engine, [n, 7], tokens) for n in range(1, 5)))
    assert 20 <= call_soon.call_count <= engine.engine.stats().num_steps


async def test_the_event_loop_goes_on_while_the_engine_works(engine: AsyncEngine, gate: Gate) -> None:
    task = asyncio.create_task(collect(engine, PROMPT))
    for _ in range(20):
        await asyncio.sleep(0.001)
    # All the while the engine has been within a step.
    assert not task.done()
    gate.open()
    assert (await task)[-1].finished


# ---- leaving early ----


async def test_cancelling_a_task_aborts_its_request_alone(engine: AsyncEngine, model: Model, gate: Gate) -> None:
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
    gate.open()
    assert tokens_of((await other)[-1]) == [model.greedy([9, 9], 12)]
    await idle(engine)


@pytest.mark.parametrize("closes", [False, True], ids=["break", "aclose"])
async def test_leaving_the_generator_aborts(engine: AsyncEngine, gate: Gate, closes: bool) -> None:
    generator = engine.generate(PROMPT, LONG)
    async for _ in generator:
        break
    if closes:
        await generator.aclose()  # type: ignore[attr-defined]
    del generator
    # The interpreter lets go of the generator, and the event loop closes it.
    await asyncio.sleep(0.01)
    gate.open()
    await idle(engine)
    assert engine.engine.stats().num_steps < 100


async def test_aborting_by_id_ends_the_generator_that_waits(engine: AsyncEngine, gate: Gate) -> None:
    task = asyncio.create_task(collect(engine, PROMPT, LONG, request_id="mine"))
    while not engine.stats.num_steps:
        await asyncio.sleep(0.002)
    engine.abort("nonesuch")
    engine.abort("mine")
    assert all(not output.finished for output in await asyncio.wait_for(task, 20))
    gate.open()


async def test_an_id_can_be_used_again_right_after_its_request_was_left(engine: AsyncEngine, model: Model) -> None:
    # The abort must not end the new request of the same id.
    for _ in range(20):
        generator = engine.generate(PROMPT, LONG, "same")
        await anext(generator)
        await generator.aclose()  # type: ignore[attr-defined]
        assert tokens_of((await collect(engine, [9, 9], request_id="same"))[-1]) == [model.greedy([9, 9], 12)]


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


async def test_an_unforeseen_error_raises_in_its_own_generator_only(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine._admission, "_token_ids", failing)
        with pytest.raises(ZeroDivisionError):
            await collect(engine, PROMPT)
    assert (await collect(engine, PROMPT))[-1].finished


async def test_an_id_in_use_is_refused_and_its_request_goes_on(engine: AsyncEngine, model: Model) -> None:
    hold = threading.Event()
    # Keep the engine's thread busy until both requests have come.
    engine._commands.put(hold.wait)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(collect(engine, ids, request_id="same")) for ids in (PROMPT, [1])]
    await asyncio.sleep(0)
    hold.set()
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, list)
    assert tokens_of(first[-1]) == [model.greedy(PROMPT, 12)]
    assert isinstance(second, RequestError)
    assert "'same' is in use" in str(second)


# ---- another policy ----


async def test_the_policy_changes_between_requests(model: Model) -> None:
    async with AsyncEngine(make_engine(model.folder, policy="mixed:16")) as engine:
        expected = tokens_of((await collect(engine, PROMPT))[-1])
        for policy in ("serial:16", "mixed:4"):
            await idle(engine)
            await engine.set_policy(policy, Slo(ttft_ms=1e6))
            output = (await collect(engine, PROMPT))[-1]
            assert tokens_of(output) == expected
            assert (str(engine.engine.config.policy), output.slo) == (policy, Slo(ttft_ms=1e6))


async def test_a_policy_that_cannot_be_is_an_error_of_the_caller(model: Model) -> None:
    async with AsyncEngine(make_engine(model.folder, policy="mixed:16")) as engine:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        with pytest.raises(RequestError, match="finish or abort them first"):
            await engine.set_policy("serial:8")
        await stream.aclose()
        await idle(engine)
        with pytest.raises(ConfigError, match="needs a performance table"):
            await engine.set_policy("split")
        assert len(await collect(engine, PROMPT)) == 12
    with pytest.raises(EngineDeadError, match="shut down"):
        await engine.set_policy("serial:8")


async def test_nobody_waits_for_a_cancelled_change(engine: AsyncEngine, gate: Gate) -> None:
    request = asyncio.create_task(collect(engine, PROMPT))
    await asyncio.sleep(0.01)
    change = asyncio.create_task(engine.set_policy("serial:8"))
    await asyncio.sleep(0.01)
    change.cancel()
    gate.open()
    assert len(await request) == 12
    assert str(engine.engine.config.policy) == "mixed:16"


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


def test_a_program_may_end_while_its_engine_works() -> None:
    program = """
        import asyncio
        from bullet_graph import AsyncEngine, SamplingParams
        engine = AsyncEngine("tiny", device="cpu")
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=10_000, ignore_eos=True))
        asyncio.new_event_loop().run_until_complete(anext(stream))
    """
    assert printed_by(program) == ""


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


async def test_a_failure_reaches_all_streams_and_later_ones(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("on fire")
    fail_launches(monkeypatch, 4, error)
    engine = AsyncEngine(make_engine(model.folder, max_num_seqs=2))
    async with asyncio.timeout(20):
        results = await asyncio.gather(*(collect(engine, PROMPT, LONG) for _ in range(5)), return_exceptions=True)
    monkeypatch.undo()
    results += await asyncio.gather(collect(engine, PROMPT), return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineDeadError)
        assert "on fire" in str(result)
        assert result.__cause__ is error
    engine.shutdown()


@pytest.mark.parametrize(("owner", "name"), [(CpuExecutor, "launch"), (Engine, "stats")])
async def test_streams_end_even_if_the_device_cannot_shut_down(
    model: Model, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    unhandled, engine = [], AsyncEngine(make_engine(model.folder))
    monkeypatch.setattr(threading, "excepthook", unhandled.append)

    def failing(*_: object) -> None:
        raise OSError("lost")

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(CpuExecutor, "shutdown", failing)
    async with asyncio.timeout(20):
        with pytest.raises(EngineDeadError, match="lost"):
            await collect(engine, PROMPT)
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="lost"):
            await collect(engine, PROMPT)
    assert [args.exc_type for args in unhandled] == [OSError]


# ---- event loops ----


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
    engine = AsyncEngine(make_engine(model.folder))
    step = Mock(wraps=engine.engine.step)
    monkeypatch.setattr(engine.engine, "step", step)
    asyncio.run(collect(engine, PROMPT))
    before = step.call_count
    time.sleep(0.05)
    assert step.call_count == before > 0
    engine.shutdown()


# ---- given up from outside ----


async def test_failing_from_outside_reaches_all_even_if_the_thread_is_stuck(model: Model, gate: Gate) -> None:
    engine = AsyncEngine(make_engine(model.folder, max_num_seqs=2))
    tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(5)]
    async with asyncio.timeout(20):
        # On a busy machine, the loop itself may seem to stall before.
        while "decode lane: a decode step of 2 rows" not in (engine.stalled(0.05) or ""):
            await asyncio.sleep(0.01)
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
        async for _ in engine.generate("The dog sleeps"):
            pass
        assert engine.stats == engine.engine.stats()
        assert engine.stats.num_steps > 0
        assert engine.stats.lane_sms == engine.stats.lane_sm_seconds == {}
        assert engine.stats.lane_seconds["decode"] > 0
