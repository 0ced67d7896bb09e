"""Shutdown, failures and interrupts of an engine on the CPU, also between the slices of a prefill."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from decoders import tensors_of as tensors_in
from engines import GREEDY, PROMPT, PROMPTS, Model, fail_launches, make, make_engine, run_to_end, tokens_of

from bullet_graph import AsyncEngine, Engine, EngineDeadError
from bullet_graph.kernels.attention import ReferenceAttention
from bullet_graph.runtime.cpu import CpuExecutor
from bullet_graph.runtime.executor import keep_for_ever


def memory_of(engine: Engine) -> list[weakref.ref[torch.Tensor]]:
    """Weak references to weights, KV cache, rotary table and what forwards compute in."""
    executor = engine._executor
    assert isinstance(executor, CpuExecutor)
    decoder = executor._decoder
    tensors = [*tensors_in(decoder.weights).values(), decoder.cache._data, decoder.cos_sin]
    tensors += [forward.hidden.residual for forward in executor._forwards.values()]
    return [weakref.ref(tensor) for tensor in tensors]


def fail(patch: pytest.MonkeyPatch, where: str, num_good: int, error: BaseException) -> None:
    """Let a method of attention, the engine or its executor raise after good calls; "launched", "waited" at its end."""
    if where == "slice":
        fail_launches(patch, num_good, error, "prefill")
        return
    methods = {"attention": (ReferenceAttention, "run"), "step": (Engine, "step"), "add": (Engine, "add_request")}
    done = {"launched": "launch", "waited": "wait"}.get(where)
    owner, name = methods.get(where, (CpuExecutor, done or where))
    original = getattr(owner, name)
    calls = iter(range(num_good))

    def failing(*args: object, **kwargs: object) -> object:
        if next(calls, None) is not None:
            return original(*args, **kwargs)
        if done:
            original(*args, **kwargs)
        raise error

    patch.setattr(owner, name, failing)


def calls_of(engine: Engine) -> tuple[Callable[[], object], ...]:
    """What an engine that has ended refuses."""
    return (
        lambda: engine.generate(PROMPT, use_tqdm=False),
        lambda: engine.generate([], use_tqdm=False),
        lambda: engine.add_request("b", PROMPT),
        lambda: engine.set_policy("mixed"),
        engine.step,
    )


# ---- shutdown ----


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("how", ["shutdown", "context", "dropped", "failed", "failed in a slice"])
def test_an_engine_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    engine = make()
    engine.generate([PROMPT, [1]], GREEDY, use_tqdm=False)
    references = memory_of(engine)
    assert len(references) > 20
    assert all(reference() is not None for reference in references)
    engine.add_request("under way", PROMPT, GREEDY)
    if how.startswith("failed"):
        error = RuntimeError("on fire")
        fail(monkeypatch, "slice" if how.endswith("slice") else "attention", 1, error)
        with pytest.raises(EngineDeadError) as caught:
            run_to_end(engine)
        # The caller still holds the error, whose traceback leads into the forward.
        assert caught.value.__cause__ is error
    else:
        engine.step()
    if how == "context":
        with engine:
            pass
    elif how == "dropped":
        del engine
    else:
        engine.shutdown()
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


@pytest.mark.usefixtures("depth")
def test_shutdown_twice_and_calls_afterwards(model: Model) -> None:
    engine = make_engine(model.folder)
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    engine.shutdown()
    engine.shutdown()
    for call in calls_of(engine):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()
    engine.abort("a")
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_steps == 1
    engine.shutdown()


def test_engines_one_after_the_other_and_side_by_side(model: Model) -> None:
    expected = model.greedy(PROMPT, 12)
    with make_engine(model.folder) as one, make_engine(model.folder, policy="serial:3") as other:
        one.add_request("a", PROMPT, GREEDY)
        other.add_request("a", PROMPT, GREEDY)
        while one.has_unfinished_requests() or other.has_unfinished_requests():
            outputs = [*one.step(), *other.step()]
        assert {tokens_of(output)[0] for output in outputs} == {expected}
    with make_engine(model.folder) as third:
        assert tokens_of(third.generate(PROMPT, GREEDY, use_tqdm=False)[0]) == [expected]


# ---- failures ----


@pytest.mark.usefixtures("depth", "short_slices")
@pytest.mark.parametrize("where", ["attention", "launch", "wait", "slice"])
def test_a_failing_device_ends_the_engine_with_the_cause(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    error = OSError("the device is on fire")
    with make() as engine:
        with monkeypatch.context() as patch:
            fail(patch, where, 1, error)
            with pytest.raises(EngineDeadError, match="on fire") as caught:
                engine.generate([PROMPT, [3]], GREEDY, use_tqdm=False)
            assert caught.value.__cause__ is error
        # It stays dead, whatever the device does now, and goes on saying why.
        for call in calls_of(engine):
            with pytest.raises(EngineDeadError, match="on fire") as caught:
                call()
            assert caught.value.__cause__ is error


def test_nothing_is_freed_of_a_device_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing memory pinned for it would abort the process; the failed step's frames may hold the last reference."""
    held: list[weakref.ref[torch.Tensor]] = []

    def failing(*_: object) -> None:
        pinned = torch.empty(1)
        held.append(weakref.ref(pinned))
        raise RuntimeError("on fire")

    def shutdown(executor: CpuExecutor, failure: BaseException | None = None) -> None:
        executor.__dict__.clear()
        keep_for_ever(failure)

    engine = make_engine()
    monkeypatch.setattr(CpuExecutor, "wait", failing)
    monkeypatch.setattr(CpuExecutor, "shutdown", shutdown)
    with pytest.raises(EngineDeadError):
        engine.generate([PROMPT], GREEDY, use_tqdm=False)
    engine.shutdown()
    del engine
    gc.collect()
    assert [reference() is not None for reference in held] == [True]


@pytest.mark.usefixtures("depth", "short_slices")
@pytest.mark.parametrize(
    ("where", "num_good"),
    [("attention", n) for n in (0, 1, 6, 30)] + [(it, n) for it in ("slice", "launched", "waited") for n in (0, 1, 3)],
)
def test_an_interrupt_loses_the_requests_and_nothing_else(
    model: Model, monkeypatch: pytest.MonkeyPatch, expected: list[tuple[int, ...]], where: str, num_good: int
) -> None:
    with make(model, "auto" if where == "slice" else "mixed", max_num_seqs=2) as engine:
        with monkeypatch.context() as patch:
            fail(patch, where, num_good, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        # What was launched has ended, so that no block serves others while it is still written.
        executor = engine._executor
        assert isinstance(executor, CpuExecutor)
        assert executor._results == {}
        del executor
        assert run_to_end(engine) == {}
        assert engine.stats().kv_blocks_used == 0
        assert [tokens_of(output)[0] for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
        assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize(("where", "num_good"), [("step", 3), ("add", 2)])
def test_an_interrupt_of_a_batch_leaves_nothing_under_way(
    model: Model, monkeypatch: pytest.MonkeyPatch, where: str, num_good: int
) -> None:
    with make_engine(model.folder) as engine:
        with monkeypatch.context() as patch:
            fail(patch, where, num_good, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPT] * 4, GREEDY, use_tqdm=False)
        (output,) = engine.generate([PROMPT], GREEDY, use_tqdm=False)
        assert tokens_of(output) == [model.greedy(PROMPT, 12)]
        run_to_end(engine)
        assert engine.stats().kv_blocks_used == 0


# ---- ready before all is captured: it captures the rest, and its executor only counts what is missing ----


NUM_MISSING = 3


class Missing:
    """Makes the CPU's executor one that has graphs to capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = NUM_MISSING
        self.done = threading.Event()
        self.error: Exception | None = None
        monkeypatch.setattr(CpuExecutor, "num_missing_graphs", property(lambda _: self.left), raising=False)
        monkeypatch.setattr(CpuExecutor, "prepare_next", lambda _: self.prepare())

    def prepare(self) -> bool:
        if self.error is not None:
            raise self.error
        if not self.left:
            self.done.set()
            return False
        self.left -= 1
        return True


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Missing:
    return Missing(monkeypatch)


@pytest.fixture
def engine(missing: Missing) -> Iterator[Engine]:
    del missing
    with make_engine(ready="hot") as engine:
        yield engine


def test_the_statistics_tell_what_is_missing(engine: Engine) -> None:
    assert engine.stats().num_missing_graphs == NUM_MISSING
    assert [engine.prepare_next() for _ in range(4)] == [True, True, True, False]
    assert engine.stats().num_missing_graphs == 0


def test_waiting_for_a_time_captures_what_there_is_time_for(engine: Engine) -> None:
    engine.sleep_until(engine.now() + 0.001)
    assert engine.stats().num_missing_graphs == NUM_MISSING
    until_s = engine.now() + 0.1
    engine.sleep_until(until_s)
    assert engine.stats().num_missing_graphs == 0
    assert engine.now() >= until_s


def test_steps_capture_as_well(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100_000))
    monkeypatch.setattr(CpuExecutor, "now", lambda _: float(next(ticks)))
    assert engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].error is None
    assert engine.stats().num_missing_graphs == 0


async def test_an_idle_engine_captures_and_still_listens(missing: Missing) -> None:
    async with AsyncEngine(make_engine(ready="hot")) as engine:
        assert await asyncio.to_thread(missing.done.wait, 10), "it waits for requests instead"
        assert [output async for output in engine.generate([1, 2, 3], GREEDY)][-1].finished
    assert missing.left == 0


@pytest.mark.parametrize(
    ("call", "doing"), [(Engine.prepare_next, "idle or capturing a graph"), (Engine.step, "running a step")]
)
def test_a_capture_that_fails_ends_the_engine(
    engine: Engine, missing: Missing, call: Callable[[Engine], object], doing: str
) -> None:
    engine.add_request("under way", [1, 2], GREEDY)
    missing.error = RuntimeError("the stream was invalidated")
    with pytest.raises(EngineDeadError, match=f"failed while {doing}: the stream was invalidated"):
        call(engine)
    with pytest.raises(EngineDeadError, match="has failed"):
        engine.add_request("a", [1])
