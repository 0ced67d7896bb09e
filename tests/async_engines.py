"""Driving an AsyncEngine, for the end-to-end tests."""

import asyncio
import threading
import time

from engines import GREEDY

from bullet_graph import AsyncEngine, RequestOutput, SamplingParams


class Gate:
    """Lets an executor launch so many steps, and the others once it is opened."""

    def __init__(self, num_steps: int) -> None:
        self._permits = threading.Semaphore(num_steps)

    def wait(self) -> None:
        assert self._permits.acquire(timeout=30)

    def open(self) -> None:
        self._permits.release(100_000)


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
