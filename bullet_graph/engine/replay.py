"""Replays a workload: sends each request when it arrives, and records when its tokens come.

:func:`replay` steps an engine itself, in real or virtual time. :func:`replay_async` is a client of a streaming server.
"""

import asyncio
import heapq
import importlib
import importlib.util
import itertools
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.errors import ConfigError, EngineDeadError, LateError, PromptError, RequestError
from bullet_graph.perf.goodput_search import requests_for
from bullet_graph.perf.metrics import QueueGrowth, ReplayResult, RequestMetrics, ServedRequest, summarize_ms
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Arrivals, Workload, make_prompt_token_ids
from bullet_graph.workloads.workload import Times, TurnBefore

if TYPE_CHECKING:
    # The one imports torch, and the other this module.
    from bullet_graph.engine.engine import Engine
    from bullet_graph.engine.simulation import SimulatedEngine


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request that arrives ``arrival_s`` seconds after the start of the replay.

    A later turn of a conversation arrives no earlier than its user's think time after the turn before has ended. Its
    ``prompt_token_ids`` follow that turn's prompt and output. ``is_followed``: another turn needs the output's ids.
    """

    arrival_s: float
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    slo: Slo = NO_TARGETS
    follows: TurnBefore | None = None
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of each request, in the order given; it began at ``start_s`` on the client's clock.

    ``unsent`` are indices of later turns that would have arrived after the last conversation had begun.
    """

    served: tuple[ServedRequest, ...]
    start_s: float
    unsent: tuple[int, ...] = ()

    @property
    def duration_s(self) -> float:
        """Seconds from the start until the last token of a completed request reached the client."""
        times = (r.metrics.token_times_s for r in self.served if r.error is None)
        return max((t[-1] for t in times if t), default=self.start_s) - self.start_s

    def result(self, arrivals: Arrivals, *, started: datetime, backend: str, model_id: str) -> ReplayResult:
        """The figures of at least one request."""
        duration_s, request_rate = self.duration_s, arrivals.request_rate
        counted_from_s = self.start_s + arrivals.uncounted_s
        counted = [request for request in self.served if request.metrics.arrival_s >= counted_from_s]
        done = [request for request in self.served if request.error is None]
        metrics = [request.metrics for request in counted if request.error is None]
        rate = None if request_rate is None or math.isinf(request_rate) else request_rate
        num_input = sum(request.input_tokens for request in done)
        num_output = sum(request.output_tokens for request in done)
        has_targets = any(request.slo != NO_TARGETS for request in self.served)
        num_good = sum(request.meets_slo for request in self.served)
        num_planned = len(self.served) + len(self.unsent)

        def per_second(count: int) -> float:
            return count / duration_s if count else 0.0

        return ReplayResult(
            date=started.strftime("%Y%m%d-%H%M%S"),
            backend=backend,
            model_id=model_id,
            num_prompts=len(self.served),
            num_unsent=len(self.unsent),
            request_rate="trace" if request_rate is None else json_number(request_rate),
            burstiness=None if request_rate is None else json_number(arrivals.burstiness),
            max_concurrency=arrivals.max_concurrency,
            duration=duration_s,
            completed=len(done),
            failed=len(self.served) - len(done),
            total_input_tokens=num_input,
            total_output_tokens=num_output,
            request_throughput=per_second(len(done)),
            request_goodput=per_second(num_good) if has_targets else None,
            slo_attainment=sum(r.meets_slo for r in counted) / len(counted) if has_targets else None,
            counted=len(counted),
            sustained=num_planned >= requests_for(rate) if rate else None,
            queue_growth=QueueGrowth.of(self.served, self.start_s, self.start_s + num_planned / rate) if rate else None,
            output_throughput=per_second(num_output),
            total_token_throughput=per_second(num_input + num_output),
            ttft=summarize_ms(m.ttft_ms for m in metrics),
            tpot=summarize_ms(m.tpot_ms for m in metrics),
            itl=summarize_ms(gap for m in metrics for gap in m.itl_ms),
            e2el=summarize_ms(m.e2e_ms for m in metrics),
            normalized_latency=summarize_ms(
                r.metrics.e2e_ms / r.output_tokens for r in counted if r.metrics.e2e_ms and r.output_tokens
            ),
            input_lens=tuple(r.input_tokens for r in self.served),
            output_lens=tuple(r.output_tokens for r in self.served),
            ttfts=tuple((r.metrics.ttft_ms or 0.0) / 1e3 for r in self.served),
            itls=tuple(tuple(gap / 1e3 for gap in r.metrics.itl_ms) for r in self.served),
            start_times=tuple(r.metrics.arrival_s for r in self.served),
            errors=tuple(r.error or "" for r in self.served),
        )


def json_number(value: float) -> float | str:
    """The number, or text where JSON has no number for it."""
    return value if math.isfinite(value) else "inf"


# ---- requests ----


def timed_requests(
    workload: Workload, arrivals_s: Sequence[float] | Times, *, vocab_size: int, slo: Slo, seed: int
) -> list[TimedRequest]:
    """Make a workload's requests, each sampled greedily to its recorded output length.

    Prompts that the workload does not have are drawn from ``vocab_size`` token ids, by ``seed`` (at least 0).
    """
    followed = {request.follows.index for request in workload.requests if request.follows is not None}
    return [
        TimedRequest(
            float(arrival_s),
            make_prompt_token_ids(request, index, vocab_size, seed).tolist(),
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.output_tokens),
            slo,
            request.follows,
            index in followed,
        )
        for index, (request, arrival_s) in enumerate(zip(workload.requests, arrivals_s, strict=True))
    ]


def require_forced_length(prompt_tokens: int, output_tokens: int, max_model_len: int) -> None:
    """Raise a PromptError for a request that the engine would end before its recorded output length."""
    if prompt_tokens + output_tokens > max_model_len:
        raise PromptError(
            f"prompt and output have {prompt_tokens} + {output_tokens} tokens, more than max_model_len={max_model_len}"
        )


class _Turns:
    """The requests of a replay whose later turns are complete once the turns before them have ended."""

    def __init__(self, requests: Sequence[TimedRequest], start_s: float) -> None:
        self.requests = list(requests)
        self._start_s = start_s
        last_s = requests[-1].arrival_s if requests else 0.0
        # A run at a rate sends nothing after the last conversation has begun: its load would only fade.
        self._end_s = start_s + last_s if last_s > 0 else math.inf
        self._failed: set[int] = set()
        self._followers = defaultdict[int, list[int]](list)
        for index, request in enumerate(requests):
            if request.follows is not None:
                self._followers[request.follows.index].append(index)

    def ready(self, index: int) -> TimedRequest:
        """The request with its whole prompt; RequestError where the turn before has failed."""
        if index in self._failed:
            raise RequestError("the turn before it in the conversation failed")
        return self.requests[index]

    def end(
        self, index: int, served: ServedRequest, token_ids: Sequence[int], now: float
    ) -> Iterator[tuple[float, int]]:
        """Note the outcome of a request; yields when each request to send after it arrives, and its index."""
        for later in self._followers[index]:
            request = self.requests[later]
            assert request.follows is not None
            if served.error is None:
                prompt = [*self.requests[index].prompt_token_ids, *token_ids, *request.prompt_token_ids]
                self.requests[later] = replace(request, prompt_token_ids=prompt)
                now = served.metrics.token_times_s[-1]
            else:
                self._failed.add(later)
            arrival_s = max(self._start_s + request.arrival_s, now + request.follows.think_s)
            if arrival_s <= self._end_s:
                yield arrival_s, later

    def replay(self, served: Mapping[int, ServedRequest]) -> Replay:
        """The outcome of all that were sent."""
        indices = range(len(self.requests))
        outcomes = tuple(served[index] for index in indices if index in served)
        return Replay(outcomes, self._start_s, tuple(index for index in indices if index not in served))


# ---- an engine that is stepped ----


def replay(
    engine: "Engine | SimulatedEngine",
    requests: Sequence[TimedRequest],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[ServedRequest], object] = lambda _: None,
    id_prefix: str = "",
) -> Replay:
    """Send each request at its time, and step the engine until all are done.

    A request that the engine refuses fails alone, as does one whose output cannot reach its length. Latency counts from
    the planned arrival, even if the engine's loop was busy at that moment. With ``max_concurrency`` it counts from when
    the request was let in, as in vLLM's serving benchmark. The engine must have no other requests.

    Raises ConfigError where ``max_concurrency`` is below 1 or the requests are not in order of arrival, and
    EngineDeadError where the engine fails.
    """
    _require_replayable(requests, max_concurrency)
    served: dict[int, ServedRequest] = {}
    start_s = let_in_s = engine.now()
    turns = _Turns(requests, start_s)
    # A heap; it begins in order.
    pending = [(start_s + r.arrival_s, index) for index, r in enumerate(requests) if r.follows is None]
    num_under_way = 0

    def take(output: RequestOutput) -> None:
        index = int(output.request_id.removeprefix(id_prefix))
        served[index] = ServedRequest(
            len(turns.requests[index].prompt_token_ids),
            sum(len(sample.token_ids) for sample in output.outputs),
            output.metrics,
            requests[index].slo,
            None if output.error is None else str(output.error),
        )
        on_done(served[index])
        token_ids = [token_id for sample in output.outputs for token_id in sample.token_ids]
        for follower in turns.end(index, served[index], token_ids, engine.now()):
            heapq.heappush(pending, follower)

    while pending or engine.has_unfinished_requests():
        has_room = max_concurrency is None or num_under_way < max_concurrency
        next_s = pending[0][0] if pending and has_room else None
        if next_s is not None and next_s <= engine.now():
            _, index = heapq.heappop(pending)
            arrival_s, request_id = max(next_s, let_in_s), f"{id_prefix}{index}"
            try:
                request = turns.ready(index)
                require_forced_length(len(request.prompt_token_ids), request.params.max_tokens, engine.max_model_len)
                engine.add_request(
                    request_id,
                    request.prompt_token_ids,
                    request.params,
                    output_kind=OutputKind.FINAL_ONLY,
                    arrival_s=arrival_s,
                    slo=request.slo,
                )
                num_under_way += 1
            except (RequestError, LateError) as error:
                take(RequestOutput.refused(request_id, error, arrival_s))
        elif engine.has_unfinished_requests():
            for output in engine.step(next_s):
                take(output)
                num_under_way -= 1
            if not has_room:
                let_in_s = engine.now()
        elif next_s is not None:
            engine.sleep_until(next_s)
    return turns.replay(served)


# ---- a system that streams ----


StreamedTokens = Callable[[TimedRequest], AsyncGenerator[Sequence[int], None]]
"""Serves a request and yields its new tokens. Any error but EngineDeadError is the request's alone."""


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes uvloop's event loop, the faster one, where it is installed; None: asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def _require_replayable(requests: Sequence[TimedRequest], max_concurrency: int | None) -> None:
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, or None for no limit, got {max_concurrency}")
    if any(later.arrival_s < earlier.arrival_s for earlier, later in itertools.pairwise(requests)):
        raise ConfigError("a replay needs its requests in order of arrival: sort them by arrival_s")
    if any(r.follows is not None and not 0 <= r.follows.index < index for index, r in enumerate(requests)):
        raise ConfigError("a replay needs each turn of a conversation after the turn before: sort them")


async def replay_async(
    generate: StreamedTokens,
    requests: Sequence[TimedRequest],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[ServedRequest], object] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Replay:
    """Send each request at its time, and wait for all.

    Latency counts from the planned arrival, even if the client or the system delayed the sending; with
    ``max_concurrency`` it counts from when the request was let in. A token's time is when the client sees it: tokens
    that come together have the same time. A request fails alone if it raises, or if its output has the wrong length.
    Raises as :func:`replay` does.
    """
    _require_replayable(requests, max_concurrency)
    places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start_s = clock()
    turns = _Turns(requests, start_s)
    served: dict[int, ServedRequest] = {}

    async def let_in(arrival_s: float) -> float:
        while (early_s := arrival_s - clock()) > 0:
            await sleep(early_s)
        if places is not None:
            must_wait = places.locked()
            await places.acquire()
            if must_wait:
                return max(arrival_s, clock())
        return arrival_s

    async def serve(index: int, arrival_s: float) -> None:
        try:
            served[index], token_ids = await _serve(generate, turns, index, arrival_s, clock)
        finally:
            if places is not None:
                places.release()
        on_done(served[index])
        for follower_s, follower in turns.end(index, served[index], token_ids, clock()):
            group.create_task(serve_later(follower, follower_s))

    async def serve_later(index: int, arrival_s: float) -> None:
        await serve(index, await let_in(arrival_s))

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                if request.follows is None:
                    arrival_s = await let_in(start_s + request.arrival_s)
                    group.create_task(serve(index, arrival_s))
    # Not except*: before Python 3.11.4, what is raised there comes wrapped in a group.
    except BaseExceptionGroup as errors:
        dead, others = errors.split(EngineDeadError)
        if dead is None or others is not None:
            raise
        raise dead.exceptions[0] from None
    return turns.replay(served)


async def _serve(
    generate: StreamedTokens, turns: _Turns, index: int, arrival_s: float, clock: Callable[[], float]
) -> tuple[ServedRequest, list[int]]:
    """The outcome of a request, and the tokens of its output."""
    request = turns.requests[index]
    num_input, wanted = len(request.prompt_token_ids), request.params.max_tokens
    token_ids: list[int] = []
    times: list[float] = []
    try:
        async with aclosing(generate(turns.ready(index))) as outputs:
            async for new in outputs:
                times += [clock()] * len(new)
                token_ids += new
        if len(times) != wanted:
            raise RequestError(f"gave {len(times)} of {wanted} tokens")
    except EngineDeadError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
        return ServedRequest(num_input, 0, RequestMetrics(arrival_s, None, ()), request.slo, reason), []
    metrics = RequestMetrics(arrival_s, None, tuple(times))
    return ServedRequest(num_input, len(times), metrics, request.slo, None), token_ids
