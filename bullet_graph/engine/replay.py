"""Replays requests at the times they arrive, in real or virtual time alike."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.errors import ConfigError, PromptError, RequestError
from bullet_graph.perf.serving import ServedRequest
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Workload, WorkloadRequest, make_prompt_token_ids
from bullet_graph.workloads.arrivals import Times


class ReplayEngine(Protocol):
    """What a replay needs; :class:`~bullet_graph.engine.engine.Engine` has it all."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""

    def now(self) -> float:
        """Seconds on the clock of the requests' metrics."""

    def sleep_until(self, time_s: float) -> None:
        """Let time pass, to this time of :meth:`now`, with nothing to do."""

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        output_kind: OutputKind,
        arrival_s: float,
        slo: Slo,
    ) -> None:
        """Queue a request that came at ``arrival_s`` of :meth:`now`; RequestError if it is wrong."""

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do."""

    def step(self, until_s: float | None) -> list[RequestOutput]:
        """Work until something has happened, to ``until_s`` of :meth:`now` at most."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and when it comes.

    Attributes:
        arrival_s: seconds after the start of the replay.
        prompt_token_ids: at least one.
        params: sampling settings.
        slo: its targets.
    """

    arrival_s: float
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    slo: Slo = NO_TARGETS


def recorded_length(request: WorkloadRequest) -> SamplingParams:
    """Greedy sampling of exactly as many tokens as the workload recorded."""
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.output_tokens)


def timed_requests(
    workload: Workload, arrivals_s: Sequence[float] | Times, *, vocab_size: int, slo: Slo, seed: int
) -> list[TimedRequest]:
    """A workload's requests for a replay, each sampled greedily to its recorded output length.

    Args:
        workload: tells the lengths, and the prompts where it has them.
        arrivals_s: seconds after the start, one for each request, not decreasing.
        vocab_size: random prompts are drawn from so many token ids.
        slo: targets of every request.
        seed: of random prompts, at least 0.

    Raises:
        ConfigError: there are not as many arrivals as requests.
    """
    if len(arrivals_s) != len(workload.requests):
        raise ConfigError(
            f"{workload.name} has {len(workload.requests)} requests, but {len(arrivals_s)} arrivals are given: give "
            "one for each"
        )
    return [
        TimedRequest(
            float(arrival_s),
            make_prompt_token_ids(request, index, vocab_size, seed).tolist(),
            recorded_length(request),
            slo,
        )
        for index, (request, arrival_s) in enumerate(zip(workload.requests, arrivals_s, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay brought.

    Attributes:
        outputs: the last output of each request, in the order given; one that was refused has ``error`` set.
        start_s: when it began, on the engine's clock.
        end_s: when the last token reached the host.
    """

    outputs: tuple[RequestOutput, ...]
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the last token."""
        return self.end_s - self.start_s

    def served(self, requests: Sequence[TimedRequest]) -> list[ServedRequest]:
        """What became of each of the requests replayed."""
        return [
            ServedRequest(
                len(request.prompt_token_ids),
                sum(len(sample.token_ids) for sample in output.outputs),
                output.metrics,
                request.slo,
                None if output.error is None else str(output.error),
            )
            for request, output in zip(requests, self.outputs, strict=True)
        ]


def replay(
    engine: ReplayEngine,
    requests: Sequence[TimedRequest],
    *,
    max_concurrency: int | None = None,
    on_output: Callable[[RequestOutput], object] = lambda _: None,
    id_prefix: str = "",
) -> Replay:
    """Send each request when its time has come, and step until all are done.

    A request that the engine refuses fails alone, as does one whose output cannot reach its length. A request's
    latency counts from its arrival, even if the engine's loop was busy at that moment; with ``max_concurrency``,
    from when it was let in (as in vLLM's serving benchmark, where waiting for a place is the client's own).

    Args:
        engine: with no other requests.
        requests: in order of arrival.
        max_concurrency: most requests under way at once; None is no limit.
        on_output: told of each request's last output as it comes.
        id_prefix: of the engine's ids of the requests; their places in ``requests`` follow it.

    Raises:
        ConfigError: ``max_concurrency`` is below 1, or the requests are not in order of arrival.
        EngineDeadError: the engine failed.
    """
    require_replayable(requests, max_concurrency)
    outputs: dict[str, RequestOutput] = {}
    start_s = engine.now()
    pending = deque(enumerate(requests))
    num_under_way = 0
    let_in_s = start_s

    def take(output: RequestOutput) -> None:
        outputs[output.request_id] = output
        on_output(output)

    while pending or engine.has_unfinished_requests():
        has_room = max_concurrency is None or num_under_way < max_concurrency
        next_s = start_s + pending[0][1].arrival_s if pending and has_room else None
        if next_s is not None and next_s <= engine.now():
            index, request = pending.popleft()
            arrival_s = max(next_s, let_in_s)
            request_id = f"{id_prefix}{index}"
            try:
                _send(engine, request_id, request, arrival_s)
                num_under_way += 1
            except RequestError as error:
                take(RequestOutput.refused(request_id, error, arrival_s))
        elif engine.has_unfinished_requests():
            for output in engine.step(next_s):
                take(output)
                num_under_way -= 1
            if not has_room:
                let_in_s = engine.now()
        elif next_s is not None:
            engine.sleep_until(next_s)
    end_s = max(
        (o.metrics.token_times_s[-1] for o in outputs.values() if o.metrics.token_times_s), default=start_s
    )
    in_order = tuple(outputs[f"{id_prefix}{index}"] for index in range(len(requests)))
    return Replay(in_order, start_s, end_s)


def require_replayable(requests: Sequence[TimedRequest], max_concurrency: int | None) -> None:
    """Check what every replay is given.

    Raises:
        ConfigError: ``max_concurrency`` is below 1, or the requests are not in order of arrival.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, or None for no limit, got {max_concurrency}")
    if any(later.arrival_s < earlier.arrival_s for earlier, later in itertools.pairwise(requests)):
        raise ConfigError("a replay needs its requests in order of arrival: sort them by arrival_s")


def _send(engine: ReplayEngine, request_id: str, request: TimedRequest, arrival_s: float) -> None:
    require_forced_length(len(request.prompt_token_ids), request.params, engine.max_model_len)
    engine.add_request(
        request_id,
        request.prompt_token_ids,
        request.params,
        output_kind=OutputKind.FINAL_ONLY,
        arrival_s=arrival_s,
        slo=request.slo,
    )


def require_forced_length(prompt_tokens: int, params: SamplingParams, max_model_len: int) -> None:
    """Refuse a request that the engine would end early: its recorded output length could not be forced.

    Raises:
        PromptError: prompt and output together are longer than ``max_model_len``.
    """
    if prompt_tokens + params.max_tokens > max_model_len:
        raise PromptError(
            f"prompt and output have {prompt_tokens} + {params.max_tokens} tokens, more than "
            f"max_model_len={max_model_len}"
        )
