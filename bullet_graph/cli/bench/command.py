"""``bullet-graph bench throughput``, ``online`` and ``latency``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli.options import engine_options, fit_max_num_seqs, result_options
from bullet_graph.cli.result_file import check_result_file, to_json, write_result_file
from bullet_graph.cli.serving.goodput import GoodputCommand
from bullet_graph.cli.serving.options import serving_options
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.errors import ConfigError
from bullet_graph.slo import Slo


@click.command()
@engine_options(max_num_seqs=1024)
@click.option(
    "--trace",
    required=True,
    metavar="FILE|NAME",
    help="A trace file (Azure CSV, ShareGPT JSON, Mooncake JSONL), or azure:conv, azure:code, "
    "synthetic:conv, synthetic:code, synthetic:longdoc.",
)
@click.option("--num-prompts", type=click.IntRange(min=1), help="Only the first N requests of the trace.")
@click.option(
    "--warmup/--no-warmup",
    default=True,
    show_default=True,
    help="Run a few small requests first, so that kernels compiled on first use are not in the figures.",
)
@result_options
def throughput(
    config: EngineConfig,
    trace: str,
    num_prompts: int | None,
    warmup: bool,
    output_json: Path | None,
    overwrite: bool,
    as_json: bool,
    trace_decisions: Path | None,
) -> None:
    """Serve a whole trace at once and measure tokens per second.

    Every request is there from the start and samples greedily until its recorded output length. A request
    that is longer than the model's limit fails alone and is counted.

    \b
    Examples:
      bullet-graph bench throughput --model tiny --trace synthetic:conv --num-prompts 20
      bullet-graph bench throughput --model llama-3.1-8b --trace azure:code --num-prompts 400 \\
          --policy mixed:4096 --output-json code.json
      bullet-graph bench throughput --model llama-3.1-8b --trace azure:conv --num-prompts 600 \\
          --policy auto --trace-decisions decisions.jsonl
    """
    check_result_file(output_json, overwrite=overwrite)
    # Here and below: torch takes seconds to import, and --help must not wait for it.
    from bullet_graph.cli.bench.render import print_throughput  # noqa: PLC0415
    from bullet_graph.cli.bench.throughput import run_throughput  # noqa: PLC0415

    result = run_throughput(
        config, trace, num_prompts, warmup=warmup, quiet=as_json, trace_decisions=trace_decisions
    )
    _report(result, print_throughput, output_json, as_json=as_json)


@click.command(cls=GoodputCommand)
@serving_options(default_policy="mixed")
@click.option(
    "--num-warmups",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Requests before each measured run, so that kernels made on first use are not in the figures.",
)
@engine_options(max_num_seqs=1024, without=("policy", "slo"))
@result_options
def online(
    config: EngineConfig,
    trace: str,
    num_prompts: int | None,
    request_rate: float | None,
    burstiness: float,
    time_scale: float,
    max_concurrency: int | None,
    slo: Slo,
    policies: tuple[Policy, ...],
    num_warmups: int,
    save_detailed: bool,
    output_json: Path | None,
    overwrite: bool,
    as_json: bool,
    trace_decisions: Path | None,
) -> None:
    """Serve a trace's requests as they arrive and measure latencies and goodput.

    The requests come to an engine in this process, without HTTP, and sample greedily until their recorded output
    lengths; --seed decides their arrivals, too. Latency targets are the planner's as well. With one policy the JSON is
    flat, as that of vLLM's serving benchmark; with several, served in turn by one engine, the field "results" holds one
    such object for each. A request that is longer than the model's limit fails alone and is counted.

    \b
    Examples:
      bullet-graph bench online --model tiny --trace synthetic:conv --num-prompts 20 --request-rate 20
      bullet-graph bench online --model llama-3.1-8b --trace azure:conv --num-prompts 600 \\
          --request-rate 20 --goodput ttft:500 tpot:15 --policy mixed:2048 --policy auto --output-json conv.json
      bullet-graph bench online --model llama-3.1-8b --trace azure:code --request-rate trace \\
          --time-scale 0.5 --max-concurrency 128 --policy auto --trace-decisions decisions.jsonl
    """
    check_result_file(output_json, overwrite=overwrite)
    if trace_decisions is not None and len(policies) > 1:
        raise ConfigError("--trace-decisions writes one run: give one --policy")
    from bullet_graph.cli.bench.online_policies import run_online  # noqa: PLC0415
    from bullet_graph.cli.bench.online_report import comparison_fields, print_comparison  # noqa: PLC0415
    from bullet_graph.workloads import Arrivals  # noqa: PLC0415

    comparison = run_online(
        config,
        policies,
        trace,
        num_prompts,
        Arrivals(
            request_rate=request_rate,
            burstiness=burstiness,
            time_scale=time_scale,
            max_concurrency=max_concurrency,
            seed=config.seed,
        ),
        slo=slo,
        num_warmups=num_warmups,
        quiet=as_json,
        trace_decisions=trace_decisions,
    )
    text = json.dumps(comparison_fields(comparison, detailed=save_detailed), indent=2, allow_nan=False)
    _emit(text, lambda: print_comparison(comparison), output_json, as_json=as_json)


@click.command()
@engine_options(max_num_seqs=1024, max_num_seqs_shown="the batch size")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--input-len", type=click.IntRange(min=1), default=32, show_default=True, help="In tokens.")
@click.option("--output-len", type=click.IntRange(min=1), default=128, show_default=True, help="In tokens.")
@click.option("--num-iters", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("--num-iters-warmup", type=click.IntRange(min=0), default=10, show_default=True)
@result_options
def latency(
    config: EngineConfig,
    batch_size: int,
    input_len: int,
    output_len: int,
    num_iters: int,
    num_iters_warmup: int,
    output_json: Path | None,
    overwrite: bool,
    as_json: bool,
    trace_decisions: Path | None,
) -> None:
    """Time one batch of equal requests, over and over, and hold its decode step against the memory.

    \b
    Examples:
      bullet-graph bench latency --model tiny --batch-size 2 --num-iters 5
      bullet-graph bench latency --model llama-3.1-8b --batch-size 64 --input-len 1000
    """
    check_result_file(output_json, overwrite=overwrite)
    from bullet_graph.cli.bench.latency import BatchShape, run_latency  # noqa: PLC0415
    from bullet_graph.cli.bench.render import print_latency  # noqa: PLC0415

    result = run_latency(
        fit_max_num_seqs(config, batch_size),
        BatchShape(batch_size, input_len, output_len),
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        quiet=as_json,
        trace_decisions=trace_decisions,
    )
    _report(result, print_latency, output_json, as_json=as_json)


def _report(result: Any, render: Callable[[Any], None], path: Path | None, *, as_json: bool) -> None:
    _emit(to_json(result), lambda: render(result), path, as_json=as_json)


def _emit(text: str, render: Callable[[], None], path: Path | None, *, as_json: bool) -> None:
    if path is not None:
        write_result_file(path, text)
    if as_json:
        click.echo(text)
    else:
        render()
