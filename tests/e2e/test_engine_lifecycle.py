"""Shutdown, failures and interrupts of an engine on the CPU."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
from engines import GREEDY, Model, at_any_depth, make_engine, run_to_end, tokens_of

from bullet_graph import Engine, EngineDeadError, RequestError
from bullet_graph.kernels.attention import LayerRows, ReferenceAttention
from bullet_graph.runtime.cpu import CpuExecutor
from bullet_graph.runtime.executor import keep_for_ever
from bullet_graph.runtime.step import Placement, Step

PROMPT = [5, 17, 300, 8]


def memory_of(engine: Engine) -> list[weakref.ref[torch.Tensor]]:
    """Weak references to weights, KV cache and rotary table."""
    executor = engine._executor
    assert isinstance(executor, CpuExecutor)
    decoder = executor._decoder
    tensors = [*tensors_of(decoder.weights), decoder.cache._data, decoder.cos_sin]
    return [weakref.ref(tensor) for tensor in tensors]


def tensors_of(weights: object) -> Iterator[torch.Tensor]:
    """All tensors of a dataclass, those of its parts included."""
    if isinstance(weights, torch.Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from tensors_of(part)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from tensors_of(getattr(weights, field.name))


def fail_after(monkeypatch: pytest.MonkeyPatch, num_calls: int, error: BaseException) -> None:
    """Let attention, deep inside a forward, raise at the call that follows ``num_calls`` good ones."""
    run = ReferenceAttention.run
    calls = iter(range(num_calls))

    def failing(self: ReferenceAttention, layer: int, rows: LayerRows) -> torch.Tensor:
        if next(calls, None) is None:
            raise error
        return run(self, layer, rows)

    monkeypatch.setattr(ReferenceAttention, "run", failing)


# ---- shutdown ----


def test_shutdown_gives_the_memory_back() -> None:
    engine = make_engine()
    engine.generate([PROMPT, [1]], GREEDY, use_tqdm=False)
    engine.add_request("under way", PROMPT, GREEDY)
    engine.step()
    references = memory_of(engine)
    assert len(references) > 20
    assert all(reference() is not None for reference in references)
    engine.shutdown()
    assert [reference() for reference in references if reference() is not None] == []


def test_leaving_the_context_shuts_down() -> None:
    with make_engine() as engine:
        references = memory_of(engine)
    assert not any(reference() is not None for reference in references)
    with pytest.raises(EngineDeadError):
        engine.step()


def test_an_engine_that_is_dropped_gives_the_memory_back() -> None:
    engine = make_engine()
    engine.generate([PROMPT], GREEDY, use_tqdm=False)
    references = memory_of(engine)
    del engine
    gc.collect()
    assert not any(reference() is not None for reference in references)


@at_any_depth
def test_shutdown_twice_and_calls_afterwards(model: Model) -> None:
    engine = make_engine(model.folder)
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    engine.shutdown()
    engine.shutdown()
    for call in (
        lambda: engine.generate(PROMPT, use_tqdm=False),
        lambda: engine.generate([], use_tqdm=False),
        lambda: engine.add_request("b", PROMPT),
        engine.step,
    ):
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


@at_any_depth
def test_a_failing_device_kills_the_engine_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("the device is on fire")
    with make_engine() as engine:
        fail_after(monkeypatch, 9, error)
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            engine.generate([PROMPT, [3]], GREEDY, use_tqdm=False)
        assert caught.value.__cause__ is error
        monkeypatch.undo()
        # It stays dead, whatever the device does now, and goes on saying why.
        for call in (
            lambda: engine.generate(PROMPT, use_tqdm=False),
            lambda: engine.add_request("b", PROMPT),
            engine.step,
        ):
            with pytest.raises(EngineDeadError, match="on fire") as caught:
                call()
            assert caught.value.__cause__ is error


@pytest.mark.parametrize("method", ["launch", "wait"])
def test_failures_at_the_executor_s_edge(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def failing(*_: object) -> None:
        raise OSError("lost")

    with make_engine() as engine:
        engine.add_request("a", PROMPT, GREEDY)
        engine.step()
        monkeypatch.setattr(CpuExecutor, method, failing)
        with pytest.raises(EngineDeadError, match="lost") as caught:
            engine.step()
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(EngineDeadError, match="lost"):
            engine.step()


def test_a_failed_engine_gives_its_memory_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    fail_after(monkeypatch, 9, RuntimeError("on fire"))
    with pytest.raises(EngineDeadError) as caught:
        engine.generate([PROMPT], GREEDY, use_tqdm=False)
    references = memory_of(engine)
    engine.shutdown()
    # Although the caller still holds the error, whose traceback leads into the forward.
    assert caught.value.__cause__ is not None
    assert not any(reference() is not None for reference in references)
    with pytest.raises(EngineDeadError, match="on fire"):
        engine.step()


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


@at_any_depth
@pytest.mark.parametrize("num_calls", [0, 1, 6, 30])
def test_an_interrupt_loses_the_requests_and_nothing_else(
    model: Model, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    with make_engine(model.folder, max_num_seqs=2) as engine:
        with monkeypatch.context() as patch:
            fail_after(patch, num_calls, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPT] * 4, GREEDY, use_tqdm=False)
        # What was launched has ended, so that no block serves others while it is still written.
        executor = engine._executor
        assert isinstance(executor, CpuExecutor)
        assert executor._results == {}
        del executor
        assert run_to_end(engine) == {}
        assert engine.stats().kv_blocks_used == 0
        outputs = engine.generate([PROMPT] * 5, GREEDY, use_tqdm=False)
        assert {tokens_of(output)[0] for output in outputs} == {model.greedy(PROMPT, 12)}
        assert engine.stats().kv_blocks_used == 0


def test_an_interrupt_between_steps_leaves_nothing_under_way(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step
    calls = iter(range(3))

    def interrupted(self: Engine) -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step(self)

    with make_engine(model.folder) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPT] * 4, GREEDY, use_tqdm=False)
        (output,) = engine.generate([PROMPT], GREEDY, use_tqdm=False)
        assert tokens_of(output) == [model.greedy(PROMPT, 12)]
        run_to_end(engine)
        assert engine.stats().kv_blocks_used == 0


def test_a_batch_that_cannot_be_added_leaves_nothing_behind(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_request = Engine.add_request
    calls = iter(range(2))

    def interrupted(self: Engine, *args: object, **kwargs: object) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        add_request(self, *args, **kwargs)  # type: ignore[arg-type]

    with make_engine(model.folder) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "add_request", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPT] * 4, GREEDY, use_tqdm=False)
        assert len(engine.generate([PROMPT], GREEDY, use_tqdm=False)) == 1


def test_errors_of_requests_leave_the_engine_alone(model: Model) -> None:
    expected = [model.greedy(PROMPT, 12)]
    with make_engine(model.folder) as engine:
        for bad in ([], [5000], [1] * 200, None):
            with pytest.raises(RequestError):
                engine.add_request("a", bad)  # type: ignore[arg-type]
            engine.generate([bad, [1]], GREEDY, use_tqdm=False)  # type: ignore[list-item]
            assert tokens_of(engine.generate(PROMPT, GREEDY, use_tqdm=False)[0]) == expected


def test_each_ticket_is_waited_for_once_and_in_order(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    waited: list[int] = []
    most = 0
    launch, wait = CpuExecutor.launch, CpuExecutor.wait

    def note_launch(self: CpuExecutor, step: Step, placement: Placement) -> int:
        nonlocal most
        launched.append(launch(self, step, placement))
        most = max(most, len(launched) - len(waited))
        return launched[-1]

    def note_wait(self: CpuExecutor, ticket: int) -> object:
        waited.append(ticket)
        return wait(self, ticket)

    monkeypatch.setattr(CpuExecutor, "launch", note_launch)
    monkeypatch.setattr(CpuExecutor, "wait", note_wait)
    monkeypatch.setattr(CpuExecutor, "max_in_flight", 3)
    with make_engine(model.folder) as engine:
        engine.generate([PROMPT] * 3, GREEDY, use_tqdm=False)
        assert engine.stats().num_steps == len(waited)
    assert waited == launched
    assert most == 3
