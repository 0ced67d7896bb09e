"""An engine that is ready before all is captured captures the rest; its executor only counts what is missing."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from engines import GREEDY, make_engine

from bullet_graph import AsyncEngine, Engine, EngineDeadError
from bullet_graph.runtime.cpu import CpuExecutor

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
        outputs = [output async for output in engine.generate([1, 2, 3], GREEDY)]
        assert outputs[-1].finished
    assert missing.left == 0


@pytest.mark.parametrize(
    ("call", "doing"), [(Engine.prepare_next, "capturing a graph"), (Engine.step, "running a step")]
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
