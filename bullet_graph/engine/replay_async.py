"""Replays requests at their times against a system that streams, and sees what its client sees."""

import asyncio
import importlib
import importlib.util
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from bullet_graph.engine.replay import TimedRequest, require_replayable
from bullet_graph.errors import EngineDeadError, RequestError
from bullet_graph.perf.metrics import RequestMetrics
from bullet_graph.perf.serving import ServedRequest


class StreamingSystem(Protocol):
    """What a replay needs of a system."""

    def generate(self, request: TimedRequest) -> AsyncGenerator[int, None]:
        """Serve a request, telling with each output how many new tokens it brought."""


@dataclass(frozen=True, slots=True)
class AsyncReplay:
    """What a replay brought.

    Attributes:
        served: what became of each request, in the order given.
        start_s: when it began, on the client's clock.
        end_s: when the last token of a completed request reached the client.
    """

    served: tuple[ServedRequest, ...]
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the last token."""
        return self.end_s - self.start_s


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes uvloop's event loop, the quicker one, where that is installed; None: asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


async def replay(
    system: StreamingSystem,
    requests: Sequence[TimedRequest],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[ServedRequest], object] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncReplay:
    """Send each request when its time has come, and wait for all.

    A request's latency counts from the time it was to come, even if the client or the system kept it from being sent
    then; with ``max_concurrency``, from when it was let in. Tokens count when the client sees them: those that come
    together have the same time. A request that raises, or whose output has another length than it asked for, fails
    alone.

    Args:
        requests: in order of arrival.
        max_concurrency: most requests under way at once; None is no limit.
        on_done: told of each request as it ends.
        clock: seconds, monotonic.
        sleep: lets so many seconds of ``clock`` pass.

    Raises:
        ConfigError: ``max_concurrency`` is below 1, or the requests are not in order of arrival.
        EngineDeadError: the system failed as a whole.
    """
    require_replayable(requests, max_concurrency)
    places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start_s = clock()

    async def serve(request: TimedRequest, arrival_s: float) -> ServedRequest:
        try:
            served = await _serve(system, request, arrival_s, clock)
        finally:
            if places is not None:
                places.release()
        on_done(served)
        return served

    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request in requests:
                arrival_s = start_s + request.arrival_s
                while (early_s := arrival_s - clock()) > 0:
                    await sleep(early_s)
                if places is not None:
                    if places.locked():
                        await places.acquire()
                        arrival_s = max(arrival_s, clock())
                    else:
                        await places.acquire()
                tasks.append(group.create_task(serve(request, arrival_s)))
    # Not except*: before Python 3.11.4, what is raised there comes wrapped in a group.
    except BaseExceptionGroup as group:
        dead, others = group.split(EngineDeadError)
        if dead is None or others is not None:
            raise
        raise _first(dead) from None
    served = tuple(task.result() for task in tasks)
    ends = (r.metrics.token_times_s[-1] for r in served if r.error is None)
    return AsyncReplay(served, start_s, max(ends, default=start_s))


async def _serve(
    system: StreamingSystem, request: TimedRequest, arrival_s: float, clock: Callable[[], float]
) -> ServedRequest:
    num_input, wanted = len(request.prompt_token_ids), request.params.max_tokens
    times: list[float] = []
    try:
        async with aclosing(system.generate(request)) as outputs:
            async for num_tokens in outputs:
                times += [clock()] * num_tokens
        if len(times) != wanted:
            raise RequestError(f"gave {len(times)} of {wanted} tokens")
    except EngineDeadError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
        return ServedRequest(num_input, 0, RequestMetrics(arrival_s, None, ()), request.slo, reason)
    return ServedRequest(
        num_input, len(times), RequestMetrics(arrival_s, None, tuple(times)), request.slo, None
    )


def _first(errors: BaseExceptionGroup[EngineDeadError]) -> EngineDeadError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
