"""``bullet-graph bench latency``: one batch of equal requests, and its decode step against the memory's bandwidth."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from bullet_graph.cli.engine_run import describe_run, open_engine, watch_device
from bullet_graph.cli.options import COUNT, engine_options, fit_max_num_seqs, result_options
from bullet_graph.cli.result_file import Output
from bullet_graph.cli.tables import figure, mean_of, print_line, print_table, table_of_texts
from bullet_graph.config import EngineConfig
from bullet_graph.engine.engine import Engine
from bullet_graph.errors import ConfigError
from bullet_graph.models.sharding import shard
from bullet_graph.perf.bandwidth import measure_copy_gb_per_s
from bullet_graph.perf.metrics import RequestMetrics, summarize_ms
from bullet_graph.perf.roofline import decode_step_bytes
from bullet_graph.runtime.resolve import resolve
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.workloads import WorkloadRequest, make_prompt_token_ids

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@click.command()
@engine_options(max_num_seqs=1024, default_shown="the batch size")
@click.option("--batch-size", type=COUNT, default=8, help="Requests of the batch.")
@click.option("--input-len", type=COUNT, default=32, help="Tokens of each prompt.")
@click.option("--output-len", type=COUNT, default=128, help="Tokens of each output.")
@click.option("--num-iters", type=COUNT, default=30, help="Measured runs of the batch.")
@click.option("--num-iters-warmup", type=click.IntRange(min=0), default=10, help="Runs before, unmeasured.")
@result_options
def latency(
    config: EngineConfig,
    batch_size: int,
    input_len: int,
    output_len: int,
    num_iters: int,
    num_iters_warmup: int,
    output: Output,
    trace_decisions: Path | None,
) -> None:
    """Time one batch of equal requests, over and over, and compare its decode step with the memory's bandwidth.

    \b
    Examples:
      bullet-graph bench latency --model tiny --batch-size 2 --num-iters 5
      bullet-graph bench latency --model llama-3.1-8b --batch-size 64 --input-len 1000
    """
    config = fit_max_num_seqs(config, batch_size)
    if batch_size > config.max_num_seqs:
        raise ConfigError(
            f"batch_size={batch_size} requests run at once only if max_num_seqs, now {config.max_num_seqs}, is at "
            "least as many: raise it or leave it out"
        )
    runtime = resolve(config)
    if input_len + output_len > runtime.max_model_len:
        raise ConfigError(
            f"input_len={input_len} and output_len={output_len} together exceed "
            f"max_model_len={runtime.max_model_len}: lower them or raise it"
        )
    request = WorkloadRequest(prompt_tokens=input_len, output_tokens=output_len, arrival_s=None)
    batches = [
        [
            make_prompt_token_ids(request, number * batch_size + row, runtime.model.vocab_size, config.seed).tolist()
            for row in range(batch_size)
        ]
        for number in range(num_iters_warmup + num_iters)
    ]
    with open_engine(config, quiet=output.as_json, trace_decisions=trace_decisions) as engine:
        for prompts in batches[:num_iters_warmup]:
            _run_batch(engine, prompts, output_len)
        before = engine.stats()
        with watch_device(engine) as monitor:
            # disable=None: no bar where stderr is not a terminal.
            measured = tqdm(batches[num_iters_warmup:], unit="batch", disable=output.as_json or None)
            runs = [_run_batch(engine, prompts, output_len) for prompts in measured]
        after = engine.stats()
        record = describe_run(config, runtime, engine)
    # The copy needs the memory that the engine has just released.
    copy_gb_per_s = measure_copy_gb_per_s(runtime.device.type)

    latencies_s = [latency_s for latency_s, _ in runs]
    step_ms = summarize_ms(gap for _, metrics in runs for gap in decode_gaps_ms(metrics))
    # The k-th decode step attends to input_len + k tokens, k from 1 to output_len - 1.
    step_bytes = decode_step_bytes(
        shard(runtime.model, config.tensor_parallel_size, 0, expert_parallel=config.expert_parallel),
        batch_size=batch_size,
        context_tokens=input_len + output_len / 2,
        dtype_bytes=runtime.dtype.itemsize,
    )
    achieved_gb_per_s = None if step_ms is None else step_bytes / step_ms.p50 / 1e6
    prefill = summarize_ms(prefill_ms(metrics) for _, metrics in runs)
    assert prefill is not None
    fields = {
        "avg_latency": float(np.mean(latencies_s)),
        "latencies": latencies_s,
        "percentiles": {str(p): float(np.percentile(latencies_s, p)) for p in _PERCENTILES},
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "num_iters": num_iters,
        "prefill_ms": dataclasses.asdict(prefill),
        "decode_step_ms": None if step_ms is None else dataclasses.asdict(step_ms),
        "decode_step_bytes": step_bytes,
        "achieved_gb_per_s": achieved_gb_per_s,
        "copy_gb_per_s": copy_gb_per_s,
        "share_of_copy_percent": achieved_gb_per_s and 100 * achieved_gb_per_s / copy_gb_per_s,
        "num_steps": after.num_steps - before.num_steps,
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        "kv_blocks_peak": after.kv_blocks_peak,
        "kv_blocks_total": after.kv_blocks_total,
        "device": dataclasses.asdict(monitor.report),
        "energy_joules": monitor.report.energy_joules,
        **record,
    }
    output.emit(fields, lambda: _print(fields))


def prefill_ms(batch: Sequence[RequestMetrics]) -> float:
    """From the first arrival until the last request of the batch has its first token."""
    return (max(m.token_times_s[0] for m in batch) - min(m.arrival_s for m in batch)) * 1e3


def decode_gaps_ms(batch: Sequence[RequestMetrics]) -> list[float]:
    """Times of the steps in which the whole batch decodes.

    They are the gaps between the tokens of the request that started last, up to the first request's end: before,
    another request was still in prefill; after, the batch is smaller.
    """
    last_started = max(batch, key=lambda metrics: metrics.token_times_s[0])
    first_end_s = min(metrics.token_times_s[-1] for metrics in batch)
    times_s = [time_s for time_s in last_started.token_times_s if time_s <= first_end_s]
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times_s)]


def _run_batch(engine: Engine, prompts: Sequence[Sequence[int]], output_len: int) -> tuple[float, list[RequestMetrics]]:
    """Serve one batch; returns its time in seconds and the requests' metrics."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len)
    start_s = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start_s, [output.metrics for output in outputs]


def _print(fields: dict[str, Any]) -> None:
    title = (
        f"Latency: {fields['model']}, {fields['dtype']}, on {fields['provenance']['device_name']}, batch "
        f"{fields['batch_size']}, {fields['input_len']} tokens in, {fields['output_len']} out"
    )
    rows = {"batch latency, mean": f"{fields['avg_latency'] * 1e3:,.2f} ms"}
    for percentile, seconds in fields["percentiles"].items():
        rows[f"batch latency, p{percentile}"] = f"{seconds * 1e3:,.2f} ms"
    rows["prefill, median"] = f"{fields['prefill_ms']['p50']:,.3f} ms"
    step = fields["decode_step_ms"]
    if step is not None:
        rows["decode step, median"] = f"{step['p50']:,.3f} ms · {fields['achieved_gb_per_s']:,.1f} GB/s"
        rows["decode step, p99"] = f"{step['p99']:,.3f} ms"
        rows["of the measured copy"] = f"{fields['share_of_copy_percent']:.1f} % of {fields['copy_gb_per_s']:,.1f} GB/s"
    rows["steps, preemptions"] = f"{fields['num_steps']:,}, {fields['num_preemptions']:,}"
    for label, field in (("power, mean, W", "power_w"), ("SM clock, mean, MHz", "sm_clock_mhz")):
        if (value := mean_of(fields["device"], field)) is not None:
            rows[label] = figure(value, 0)
    print_table(table_of_texts("", "", rows=rows.items(), title=title, show_header=False))
    if fields["num_preemptions"]:
        print_line("The KV cache was too small for the batch: times include recomputation.", style="bold red")
