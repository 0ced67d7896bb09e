"""The client of a comparison: times, failures and limits, on a clock that moves only when somebody sleeps."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph import EngineDeadError, PromptError, SamplingParams, Slo
from bullet_graph.engine.replay import Replay, TimedRequest, replay_async


class VirtualTime:
    """Wakes sleepers in order; time jumps to the next of them once nobody can run."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + duration_s, next(self._order), future))
        await future

    async def run(self) -> None:
        while True:
            # Enough turns of the event loop for every task that can run to come to rest.
            for _ in range(20):
                await asyncio.sleep(0)
            if self._sleepers:
                wake_s, _, future = heapq.heappop(self._sleepers)
                self.now_s = max(self.now_s, wake_s)
                if not future.done():
                    future.set_result(None)


@dataclass
class Scripted:
    """Gives each request chunks of tokens, each so many seconds after the one before."""

    time: VirtualTime
    chunks: Mapping[int, Sequence[tuple[float, int] | Exception]]
    sent_s: dict[int, float] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    async def generate(self, request: TimedRequest) -> AsyncGenerator[Sequence[int], None]:
        name = request.prompt_token_ids[0]
        self.sent_s[name] = self.time.clock()
        self.prompts.append(list(request.prompt_token_ids))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            for chunk in self.chunks[name]:
                if isinstance(chunk, Exception):
                    raise chunk
                await self.time.sleep(chunk[0])
                yield [0] * chunk[1]
        finally:
            self.under_way -= 1


def request(name: int, arrival_s: float, num_tokens: int, slo: Slo = Slo()) -> TimedRequest:  # noqa: B008
    return TimedRequest(arrival_s, [name, 7, 7], SamplingParams(max_tokens=num_tokens), slo)


async def run(system: Scripted, requests: Sequence[TimedRequest], **options: object) -> Replay:
    mover = asyncio.create_task(system.time.run())
    try:
        return await replay_async(
            system.generate, requests, clock=system.time.clock, sleep=system.time.sleep, **options
        )  # type: ignore[arg-type]
    finally:
        mover.cancel()


async def test_times_worked_out_by_hand() -> None:
    system = Scripted(VirtualTime(), {0: [(0.5, 1), (0.25, 2), (1.0, 1)], 1: [(0.125, 1)]})
    slo = Slo(ttft_ms=500, tpot_ms=500)
    run_ = await run(system, [request(0, 1.0, 4, slo), request(1, 1.5, 1)])
    first, second = run_.served
    assert (first.input_tokens, first.output_tokens, first.error, first.slo) == (3, 4, None, slo)
    # Two tokens that come together have one time.
    assert first.metrics.token_times_s == (101.5, 101.75, 101.75, 102.75)
    assert first.metrics.ttft_ms == 500
    assert first.metrics.tpot_ms == pytest.approx(1250 / 3)
    assert first.metrics.itl_ms == (250, 0, 1000)
    assert first.meets_slo
    assert second.metrics.arrival_s == 101.5
    assert second.metrics.token_times_s == (101.625,)
    assert (run_.start_s, run_.duration_s) == (100, 2.75)
    assert system.sent_s == {0: 101.0, 1: 101.5}


async def test_a_late_send_counts_against_the_system() -> None:
    """A system that keeps the event loop busy delays others: their latency counts from the time planned."""
    time = VirtualTime()

    class Busy(Scripted):
        async def generate(self, request: TimedRequest) -> AsyncGenerator[Sequence[int], None]:
            if request.prompt_token_ids[0] == 0:
                time.now_s += 2.0
            async for tokens in super().generate(request):
                yield tokens

    system = Busy(time, {name: [(0.5, 1)] for name in range(3)})
    served = (await run(system, [request(name, 0.25 * name, 1) for name in range(3)])).served
    assert [r.metrics.arrival_s for r in served] == [100.0, 100.25, 100.5]
    assert [r.metrics.ttft_ms for r in served] == [2500, 2250, 2000]


@settings(max_examples=30)
@given(
    plan=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4)), min_size=1),
    limit=st.none() | st.integers(1, 4),
)
def test_whatever_comes_every_token_has_a_time_and_the_limit_holds(
    plan: list[tuple[int, list[int]]], limit: int | None
) -> None:
    plan.sort()
    chunks = {name: [(gap / 8, 1) for gap in gaps] for name, (_, gaps) in enumerate(plan)}
    requests = [request(name, at / 8, len(gaps)) for name, (at, gaps) in enumerate(plan)]
    system = Scripted(VirtualTime(), chunks)  # type: ignore[arg-type]
    served = asyncio.run(run(system, requests, max_concurrency=limit)).served
    for name, (result, (at, gaps)) in enumerate(zip(served, plan, strict=True)):
        assert result.error is None
        assert result.metrics.arrival_s >= 100 + at / 8
        assert result.metrics.e2e_ms == sum(gaps) / 8 * 1e3
        assert system.sent_s[name] == result.metrics.arrival_s
        if limit is None:
            assert result.metrics.arrival_s == 100 + at / 8
    assert limit is None or system.most_under_way <= limit


# ---- failures ----


async def test_requests_fail_alone() -> None:
    system = Scripted(
        VirtualTime(),
        {
            0: [(0.5, 1), PromptError("too long")],
            1: [(0.5, 1)],
            2: [(0.5, 3)],
            3: [OSError("no route")],
            4: [(0.5, 1), (0.5, 1)],
        },
    )
    done = []
    run_ = await run(system, [request(name, 0.0, 2) for name in range(5)], max_concurrency=2, on_done=done.append)
    errors = [r.error for r in run_.served]
    assert errors == ["too long", "gave 1 of 2 tokens", "gave 3 of 2 tokens", "OSError: no route", None]
    assert [r.output_tokens for r in run_.served] == [0, 0, 0, 0, 2]
    assert [r.metrics.ttft_ms is None for r in run_.served] == [True] * 4 + [False]
    assert run_.duration_s == run_.served[4].metrics.token_times_s[-1] - run_.start_s
    assert sorted(map(id, done)) == sorted(map(id, run_.served))


async def test_a_dead_system_ends_the_replay() -> None:
    system = Scripted(VirtualTime(), {0: [(50.0, 1)], 1: [EngineDeadError("core died")]})
    with pytest.raises(EngineDeadError, match="core died"):
        await run(system, [request(0, 0.0, 1), request(1, 0.5, 1)])
    assert system.under_way == 0
