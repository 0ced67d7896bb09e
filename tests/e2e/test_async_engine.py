"""AsyncEngine on the CPU: many requests at once, leaving early, bad requests."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from async_engines import Gate, collect, engine_threads, idle
from engines import Model, at_any_depth, make_engine, tokens_of

from bullet_graph import (
    AsyncEngine,
    ConfigError,
    EngineDeadError,
    OutputKind,
    PromptError,
    RequestError,
    SamplingParams,
    Slo,
)

PROMPT = [5, 17, 300, 8]
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture
async def engine(model: Model) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(make_engine(model.folder, max_num_seqs=4, policy="mixed:16")) as engine:
        yield engine
        await idle(engine)
    assert not engine_threads()


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
    calls = 0
    call_soon = loop.call_soon_threadsafe

    def counting(*arguments):
        nonlocal calls
        calls += 1
        return call_soon(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    tokens = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    await asyncio.gather(*(collect(engine, [n, 7], tokens) for n in range(1, 5)))
    assert 20 <= calls <= engine.engine.stats().num_steps


async def test_outputs_go_to_the_loop_of_their_caller(engine: AsyncEngine) -> None:
    here = asyncio.create_task(collect(engine, PROMPT, LONG))
    there = await asyncio.to_thread(lambda: asyncio.run(collect(engine, PROMPT, LONG)))
    assert (await here)[-1].outputs[0].token_ids == there[-1].outputs[0].token_ids


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


async def test_the_event_loop_goes_on_while_the_engine_works(engine: AsyncEngine, gate: Gate) -> None:
    task = asyncio.create_task(collect(engine, PROMPT))
    for _ in range(20):
        await asyncio.sleep(0.001)
    # All the while the engine has been within a step.
    assert not task.done()
    gate.open()
    assert (await task)[-1].finished


# ---- leaving early ----


async def test_cancelling_a_task_aborts_its_request_alone(
    engine: AsyncEngine, model: Model, gate: Gate
) -> None:
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


async def test_cancelling_before_the_first_output(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(8)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
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


async def test_a_timeout_aborts(engine: AsyncEngine, gate: Gate) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await asyncio.gather(*(collect(engine, PROMPT, LONG) for _ in range(30)))
    gate.open()
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


# ---- metrics ----


async def test_time_to_first_token_counts_from_the_call(engine: AsyncEngine) -> None:
    before = engine.engine.now()
    last = (await collect(engine, PROMPT))[-1]
    assert before <= last.metrics.arrival_s <= last.metrics.first_scheduled_s <= last.metrics.token_times_s[0]


# ---- another policy ----


async def test_the_policy_changes_between_requests(model: Model) -> None:
    async with AsyncEngine(make_engine(model.folder, policy="mixed:16")) as engine:
        expected = tokens_of((await collect(engine, PROMPT))[-1])
        for policy in ("serial", "mixed:4"):
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
            await engine.set_policy("serial")
        await stream.aclose()
        await idle(engine)
        with pytest.raises(ConfigError, match="needs a performance table"):
            await engine.set_policy("auto")
        assert len(await collect(engine, PROMPT)) == 12
    with pytest.raises(EngineDeadError, match="shut down"):
        await engine.set_policy("serial")


async def test_nobody_waits_for_a_cancelled_change(engine: AsyncEngine, gate: Gate) -> None:
    request = asyncio.create_task(collect(engine, PROMPT))
    await asyncio.sleep(0.01)
    change = asyncio.create_task(engine.set_policy("serial"))
    await asyncio.sleep(0.01)
    change.cancel()
    gate.open()
    assert len(await request) == 12
    assert str(engine.engine.config.policy) == "mixed:16"
