"""Offline throughput: every request of a workload at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bullet_graph.cli.engine_run import RunRecord, describe_run, load_requests, open_engine, watch_device
from bullet_graph.config import EngineConfig
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.engine.replay import recorded_length, require_forced_length
from bullet_graph.errors import RequestError, WorkloadError
from bullet_graph.perf.metrics import PercentileSummary, RequestMetrics, summarize_ms
from bullet_graph.runtime.resolve import resolve
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.workloads import Workload, WorkloadRequest, make_prompt_token_ids

_WARMUP_REQUESTS = 4
_WARMUP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that was refused.

    Attributes:
        index: its place in the workload.
        reason: what was wrong with it.
    """

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    """What a throughput benchmark found; counts, totals and rates are of completed requests.

    Attributes:
        elapsed_time: from the first request's adding to the last token, in seconds.
        num_requests: completed requests.
        total_num_tokens: prompt and output tokens together; ``tokens_per_second`` is of these.
        num_failed: requests refused; ``failures`` says why.
        ttft_ms: time to first token, all requests having arrived at the start.
        tpot_ms: time per output token after the first, by request.
        itl_ms: inter-token latencies of all requests.
        e2e_ms: from arrival to the last token.
        energy_joules: of the whole GPU board; None without a GPU or NVML.
    """

    elapsed_time: float
    num_requests: int
    total_num_tokens: int
    requests_per_second: float
    tokens_per_second: float
    total_input_tokens: int
    total_output_tokens: int
    output_tokens_per_second: float
    num_failed: int
    failures: tuple[FailedRequest, ...]
    trace: str
    ttft_ms: PercentileSummary | None
    tpot_ms: PercentileSummary | None
    itl_ms: PercentileSummary | None
    e2e_ms: PercentileSummary | None
    energy_joules: float | None
    joules_per_token: float | None
    joules_per_output_token: float | None
    run: RunRecord


@dataclass(frozen=True, slots=True)
class _Request:
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class _Served:
    elapsed_s: float
    completed: tuple[RequestOutput, ...]
    failures: tuple[FailedRequest, ...]


def run_throughput(
    config: EngineConfig,
    trace: str,
    num_prompts: int | None,
    *,
    warmup: bool,
    quiet: bool,
    trace_decisions: Path | None = None,
) -> ThroughputResult:
    """Serve a workload with all requests added at once.

    Args:
        config: the engine's settings; ``config.seed`` also decides synthetic lengths and random prompts.
        trace: see :func:`bullet_graph.workloads.load_workload`.
        num_prompts: first so many requests, or None for all.
        warmup: run a few small requests before the clock starts.
        quiet: show neither the memory ledger nor progress bars.
        trace_decisions: write every decision, the warm-up's included, to this file.

    Raises:
        BulletGraphError: from the workload, the model or the device; WorkloadError where no request completed.
    """
    # Whatever can be wrong with the settings and the trace shows before the weights are loaded.
    runtime = resolve(config)
    workload = load_requests(runtime, trace, num_prompts, seed=config.seed)
    vocab_size = runtime.model.vocab_size
    requests = [
        _make_request(request, index, vocab_size, config.seed)
        for index, request in enumerate(workload.requests)
    ]
    with open_engine(config, quiet=quiet, trace_decisions=trace_decisions) as engine:
        if warmup:
            _serve(engine, _warmup_requests(workload, vocab_size, config.seed), show_progress=False)
        before = engine.stats()
        with watch_device(engine) as monitor:
            served = _serve(engine, requests, show_progress=not quiet)
        record = describe_run(config, runtime, before, engine.stats(), monitor.report, engine)
    return _summarize(workload.name, served, record)


def _make_request(request: WorkloadRequest, index: int, vocab_size: int, seed: int) -> _Request:
    return _Request(
        make_prompt_token_ids(request, index, vocab_size, seed).tolist(),
        recorded_length(request),
    )


def _warmup_requests(workload: Workload, vocab_size: int, seed: int) -> list[_Request]:
    """Short outputs for prompts as long as the workload's first, of other tokens: nothing to reuse later."""
    num_requests = len(workload.requests)
    first = [
        WorkloadRequest(request.prompt_tokens, _WARMUP_OUTPUT_TOKENS, arrival_s=None)
        for request in workload.requests[:_WARMUP_REQUESTS]
    ]
    return [
        _make_request(request, num_requests + index, vocab_size, seed) for index, request in enumerate(first)
    ]


def _serve(engine: Engine, requests: Sequence[_Request], *, show_progress: bool) -> _Served:
    """Add all requests and step until none is left; one that is refused does not hold up the others."""
    completed: list[RequestOutput] = []
    failures: list[FailedRequest] = []
    num_output_tokens = 0
    # disable=None: no bar where stderr is not a terminal.
    with tqdm(total=len(requests), unit="req", disable=None if show_progress else True) as bar:
        start_s = time.perf_counter()
        for index, request in enumerate(requests):
            try:
                require_forced_length(len(request.prompt_token_ids), request.params, engine.max_model_len)
                engine.add_request(
                    str(index), request.prompt_token_ids, request.params, output_kind=OutputKind.FINAL_ONLY
                )
            except RequestError as error:
                failures.append(FailedRequest(index, str(error)))
                bar.update()
        while engine.has_unfinished_requests():
            for output in engine.step():
                completed.append(output)
                num_output_tokens += len(output.outputs[0].token_ids)
                bar.set_postfix(output_tokens=num_output_tokens, refresh=False)
                bar.update()
        elapsed_s = time.perf_counter() - start_s
    return _Served(elapsed_s, tuple(completed), tuple(failures))


def _summarize(trace: str, served: _Served, record: RunRecord) -> ThroughputResult:
    completed, elapsed_s = served.completed, served.elapsed_s
    if not completed:
        raise WorkloadError(
            f"none of the {len(served.failures)} requests of {trace} could be served; "
            f"the first: {served.failures[0].reason}"
        )
    num_input = sum(len(output.prompt_token_ids) for output in completed)
    num_output = sum(len(output.outputs[0].token_ids) for output in completed)
    metrics: list[RequestMetrics] = [output.metrics for output in completed]
    energy_joules = record.device.energy_joules
    return ThroughputResult(
        elapsed_time=elapsed_s,
        num_requests=len(completed),
        total_num_tokens=num_input + num_output,
        requests_per_second=len(completed) / elapsed_s,
        tokens_per_second=(num_input + num_output) / elapsed_s,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        output_tokens_per_second=num_output / elapsed_s,
        num_failed=len(served.failures),
        failures=served.failures,
        trace=trace,
        ttft_ms=summarize_ms(m.ttft_ms for m in metrics if m.ttft_ms is not None),
        tpot_ms=summarize_ms(m.tpot_ms for m in metrics if m.tpot_ms is not None),
        itl_ms=summarize_ms(gap for m in metrics for gap in m.itl_ms),
        e2e_ms=summarize_ms(m.e2e_ms for m in metrics if m.e2e_ms is not None),
        energy_joules=energy_joules,
        joules_per_token=None if energy_joules is None else energy_joules / (num_input + num_output),
        joules_per_output_token=None if energy_joules is None else energy_joules / num_output,
        run=record,
    )
