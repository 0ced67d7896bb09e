"""``bullet-graph bench throughput``: every request of a workload at once."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli.bench.replay import EngineClient, measure, warm_up
from bullet_graph.cli.engine_run import describe_run, load_requests, open_engine
from bullet_graph.cli.options import engine_options, result_options
from bullet_graph.cli.replay_options import num_prompts_option, trace_option
from bullet_graph.cli.result_file import Output
from bullet_graph.cli.tables import print_replays
from bullet_graph.config import EngineConfig
from bullet_graph.perf.metrics import ReplayResult
from bullet_graph.runtime.resolve import resolve
from bullet_graph.workloads import Arrivals

_WARMUP_REQUESTS = 4


@click.command()
@engine_options(max_num_seqs=1024)
@trace_option
@num_prompts_option
@click.option(
    "--warmup/--no-warmup",
    default=True,
    help="Serve a few small requests first, so that the measurement compiles no kernels.",
)
@result_options
def throughput(
    config: EngineConfig,
    trace: str,
    num_prompts: int | None,
    warmup: bool,
    output: Output,
    trace_decisions: Path | None,
) -> None:
    """Serve a whole trace at once and measure tokens per second.

    Every request is there from the start and samples greedily until its recorded output length. A request that is
    longer than the model's limit fails alone and is counted.

    \b
    Examples:
      bullet-graph bench throughput --model tiny --trace synthetic:conv --num-prompts 20
      bullet-graph bench throughput --model llama-3.1-8b --trace azure:code --num-prompts 400 \\
          --policy mixed:4096 --output-json code.json
      bullet-graph bench throughput --model llama-3.1-8b --trace azure:conv --num-prompts 600 \\
          --policy auto --trace-decisions decisions.jsonl
    """
    # Errors in the settings and the trace show before the weights are loaded.
    runtime = resolve(config)
    workload = load_requests(runtime, trace, num_prompts, seed=config.seed)
    arrivals = Arrivals(request_rate=math.inf, seed=config.seed)
    with open_engine(config, quiet=output.as_json, trace_decisions=trace_decisions) as engine:
        client = EngineClient(engine, config.policy, config.slo)
        if warmup:
            warm_up(client, workload, _WARMUP_REQUESTS, slo=config.slo, seed=config.seed)
        label = None if output.as_json else str(config.policy)
        run = measure(client, workload, arrivals, slo=config.slo, label=label)
        record = describe_run(config, runtime, engine)
    fields = {**throughput_fields(run.result), "trace": workload.name, **record, **run.usage}
    title = f"{config.model}, {record['dtype']}, on {record['provenance']['device_name']}: {workload.name}"
    output.emit(fields, lambda: print_replays(title, {str(config.policy): run}))


def throughput_fields(result: ReplayResult) -> dict[str, Any]:
    """The figures with the names of vLLM's throughput benchmark.

    Counts, totals and rates are of completed requests; ``tokens_per_second`` counts prompt and output tokens.
    """
    summaries = {
        "ttft_ms": result.ttft,
        "tpot_ms": result.tpot,
        "itl_ms": result.itl,
        "e2e_ms": result.e2el,
    }
    reasons = enumerate(result.details.errors)
    return {
        "elapsed_time": result.duration,
        "num_requests": result.completed,
        "total_num_tokens": result.total_input_tokens + result.total_output_tokens,
        "requests_per_second": result.request_throughput,
        "tokens_per_second": result.total_token_throughput,
        "total_input_tokens": result.total_input_tokens,
        "total_output_tokens": result.total_output_tokens,
        "output_tokens_per_second": result.output_throughput,
        "num_failed": result.failed,
        "failures": [{"index": index, "reason": reason} for index, reason in reasons if reason],
        **{name: None if s is None else dataclasses.asdict(s) for name, s in summaries.items()},
    }
