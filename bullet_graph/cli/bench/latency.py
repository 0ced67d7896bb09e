"""Latency of one batch of equal requests, and how near its decode step comes to the memory's bandwidth."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bullet_graph.cli.engine_run import RunRecord, describe_run, open_engine, watch_device
from bullet_graph.config import EngineConfig
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.errors import ConfigError
from bullet_graph.perf.bandwidth import measure_copy_gb_per_s
from bullet_graph.perf.metrics import PercentileSummary, RequestMetrics, summarize_ms
from bullet_graph.perf.roofline import decode_step_bytes
from bullet_graph.runtime.resolve import resolve
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.workloads import WorkloadRequest, make_prompt_token_ids

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch of equal requests; lengths in tokens."""

    batch_size: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """What a latency benchmark found.

    Attributes:
        avg_latency: mean time of a whole batch, in seconds.
        latencies: each iteration's, in seconds.
        percentiles: of ``latencies``, in seconds, by percentile.
        prefill_ms: from a batch's arrival until each of its requests has a token.
        decode_step_ms: steps in which every request of the batch got a token and none was in prefill; None
            where outputs have one token.
        decode_step_bytes: what such a step must move at the mean context: weights and KV cache.
        achieved_gb_per_s: ``decode_step_bytes`` over the median decode step.
        copy_gb_per_s: bandwidth of a large copy on the same device, bytes read plus bytes written.
        share_of_copy_percent: the one in percent of the other.
    """

    avg_latency: float
    latencies: tuple[float, ...]
    percentiles: dict[str, float]
    batch_size: int
    input_len: int
    output_len: int
    num_iters: int
    prefill_ms: PercentileSummary | None
    decode_step_ms: PercentileSummary | None
    decode_step_bytes: float
    achieved_gb_per_s: float | None
    copy_gb_per_s: float
    share_of_copy_percent: float | None
    run: RunRecord


def run_latency(
    config: EngineConfig,
    shape: BatchShape,
    *,
    num_iters: int,
    num_iters_warmup: int,
    quiet: bool,
    trace_decisions: Path | None = None,
) -> LatencyResult:
    """Run the same batch again and again.

    Args:
        config: the engine's settings; ``max_num_seqs`` must hold the batch.
        shape: the batch.
        num_iters: timed iterations.
        num_iters_warmup: untimed iterations before them.
        quiet: show neither the memory ledger nor progress bars.
        trace_decisions: write every decision, those of untimed iterations included, to this file.

    Raises:
        BulletGraphError: from the model or the device, or where the batch does not fit the settings.
    """
    if shape.batch_size > config.max_num_seqs:
        raise ConfigError(
            f"batch_size={shape.batch_size} requests run at once only if max_num_seqs, now "
            f"{config.max_num_seqs}, is at least as many: raise it or leave it out"
        )
    runtime = resolve(config)
    if shape.input_len + shape.output_len > runtime.max_model_len:
        raise ConfigError(
            f"input_len={shape.input_len} and output_len={shape.output_len} together exceed "
            f"max_model_len={runtime.max_model_len}: lower them or raise it"
        )
    with open_engine(config, quiet=quiet, trace_decisions=trace_decisions) as engine:
        batches = [
            _make_prompts(shape, number, runtime.model.vocab_size, config.seed)
            for number in range(num_iters_warmup + num_iters)
        ]
        for prompts in batches[:num_iters_warmup]:
            _run_batch(engine, prompts, shape.output_len)
        before = engine.stats()
        runs = []
        with watch_device(engine) as monitor:
            # disable=None: no bar where stderr is not a terminal.
            for prompts in tqdm(batches[num_iters_warmup:], unit="batch", disable=True if quiet else None):
                runs.append(_run_batch(engine, prompts, shape.output_len))
        record = describe_run(config, runtime, before, engine.stats(), monitor.report, engine)
    # Only now that the engine has given its memory back is there room for the copy.
    copy_gb_per_s = measure_copy_gb_per_s(runtime.device.type)

    latencies_s = [latency_s for latency_s, _ in runs]
    decode_step_ms = summarize_ms(gap for _, metrics in runs for gap in decode_gaps_ms(metrics))
    # The k-th decode step attends to input_len + k tokens, k from 1 to output_len - 1.
    step_bytes = decode_step_bytes(
        runtime.model,
        batch_size=shape.batch_size,
        context_tokens=shape.input_len + shape.output_len / 2,
        dtype_bytes=runtime.dtype.itemsize,
    )
    achieved_gb_per_s = None if decode_step_ms is None else step_bytes / decode_step_ms.p50 / 1e6
    return LatencyResult(
        avg_latency=float(np.mean(latencies_s)),
        latencies=tuple(latencies_s),
        percentiles={str(p): float(np.percentile(latencies_s, p)) for p in _PERCENTILES},
        batch_size=shape.batch_size,
        input_len=shape.input_len,
        output_len=shape.output_len,
        num_iters=num_iters,
        prefill_ms=summarize_ms(prefill_ms(metrics) for _, metrics in runs),
        decode_step_ms=decode_step_ms,
        decode_step_bytes=step_bytes,
        achieved_gb_per_s=achieved_gb_per_s,
        copy_gb_per_s=copy_gb_per_s,
        share_of_copy_percent=None if achieved_gb_per_s is None else 100 * achieved_gb_per_s / copy_gb_per_s,
        run=record,
    )


def prefill_ms(batch: Sequence[RequestMetrics]) -> float:
    """From the first arrival until the last request of the batch has its first token."""
    return (max(m.token_times_s[0] for m in batch) - min(m.arrival_s for m in batch)) * 1e3


def decode_gaps_ms(batch: Sequence[RequestMetrics]) -> list[float]:
    """Times of the steps in which the whole batch decodes.

    They are the gaps between the tokens of the request that started last, up to the first request's end:
    before, another request was still in prefill; after, the batch is smaller.
    """
    last_started = max(batch, key=lambda metrics: metrics.token_times_s[0])
    first_end_s = min(metrics.token_times_s[-1] for metrics in batch)
    times_s = [time_s for time_s in last_started.token_times_s if time_s <= first_end_s]
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times_s)]


def _make_prompts(shape: BatchShape, number: int, vocab_size: int, seed: int) -> list[list[int]]:
    request = WorkloadRequest(prompt_tokens=shape.input_len, output_tokens=shape.output_len, arrival_s=None)
    first = number * shape.batch_size
    return [
        make_prompt_token_ids(request, first + row, vocab_size, seed).tolist()
        for row in range(shape.batch_size)
    ]


def _run_batch(
    engine: Engine, prompts: Sequence[Sequence[int]], output_len: int
) -> tuple[float, list[RequestMetrics]]:
    """Serve one batch; returns its time in seconds and the requests' metrics."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len)
    finished: list[RequestOutput] = []
    start_s = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.add_request(str(row), prompt, params, output_kind=OutputKind.FINAL_ONLY)
    while engine.has_unfinished_requests():
        finished += engine.step()
    elapsed_s = time.perf_counter() - start_s
    return elapsed_s, [output.metrics for output in finished]
