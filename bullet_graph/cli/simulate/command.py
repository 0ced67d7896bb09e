"""``bullet-graph simulate``: what a GPU would make of a trace, in virtual time."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli.options import result_options, setting_options
from bullet_graph.cli.result_file import check_plot_file, check_result_file, write_result_file
from bullet_graph.cli.serving.goodput import GoodputCommand
from bullet_graph.cli.serving.options import TRACE_TIMES, serving_options
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.errors import ConfigError
from bullet_graph.slo import Slo

_FIRST_RATE = 8.0


@click.command(cls=GoodputCommand)
@click.option(
    "--gpu",
    default="h200",
    show_default=True,
    metavar="NAME|TABLE.json|roofline:NAME",
    help="Whose times to use: a table that comes with the package, one that `bullet-graph profile` wrote, or an "
    "estimate by arithmetic.",
)
@click.option(
    "--model",
    default="llama-3.1-8b",
    show_default=True,
    help="A preset's name, or a Hugging Face model folder.",
)
@serving_options(default_policy="auto", request_rate_more=" With --sweep, where to begin.")
@setting_options(
    "decode_sms",
    "capture_plan",
    "prompt_order",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_cache_bytes",
    "gpu_memory_utilization",
    "seed",
    max_num_seqs=1024,
)
@click.option(
    "--host-overhead-ms",
    type=click.FloatRange(min=0),
    default=0.2,
    show_default=True,
    help="What each launch costs the host.",
)
@click.option(
    "--time-noise",
    type=click.FloatRange(min=0, max=1),
    default=0.0,
    show_default=True,
    help="How far the device's times are from those predicted: 0.1 is about 10 %.",
)
@click.option("--sweep", is_flag=True, help="Find the highest rate at which each policy holds the targets.")
@click.option(
    "--attainment",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of requests that must meet all targets, for --sweep.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw the sweep; the name ends in .svg or .png."
)
@click.option(
    "--trace-decisions",
    type=click.Path(path_type=Path),
    help="Write every decision (see `bullet-graph explain`).",
)
@result_options
def simulate(
    gpu: str,
    trace: str,
    num_prompts: int | None,
    request_rate: float | None,
    burstiness: float,
    time_scale: float,
    max_concurrency: int | None,
    policies: tuple[Policy, ...],
    host_overhead_ms: float,
    time_noise: float,
    sweep: bool,
    attainment: float,
    plot: Path | None,
    trace_decisions: Path | None,
    save_detailed: bool,
    output_json: Path | None,
    overwrite: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Serve a trace on a simulated GPU: the engine's own scheduler and planner in virtual time.

    Step times come from a measured table. The same arguments give the same figures. With one policy the JSON is flat,
    as that of vLLM's serving benchmark; with several, the field "results" holds one such object for each.

    \b
    Examples:
      bullet-graph simulate --trace azure:conv --request-rate 20 --goodput ttft:500 tpot:15
      bullet-graph simulate --trace azure:code --request-rate 10 --goodput ttft:500 tpot:8 \\
          --policy mixed:2048 --policy split --policy auto --output-json code.json
      bullet-graph simulate --trace azure:conv --goodput ttft:500 tpot:15 --sweep --plot conv.svg
    """
    config = EngineConfig(**settings)
    check_result_file(output_json, overwrite=overwrite)
    _check_combination(policies, config.slo, request_rate, sweep, plot, trace_decisions)
    check_plot_file(plot, overwrite=overwrite)
    # Here and below: torch takes seconds to import, and --help must not wait for it.
    from bullet_graph.cli.simulate.run import SimulationSpec, Simulator  # noqa: PLC0415

    spec = SimulationSpec(
        gpu=gpu,
        config=config,
        policies=policies,
        trace=trace,
        num_prompts=num_prompts,
        request_rate=request_rate,
        time_scale=time_scale,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        host_overhead_ms=host_overhead_ms,
        time_noise=time_noise,
        attainment=attainment,
    )
    simulator = Simulator(spec)
    progress = not as_json and sys.stderr.isatty()
    if sweep:
        from bullet_graph.cli.simulate.report import report_sweep  # noqa: PLC0415

        first_rate = _FIRST_RATE if request_rate is None or math.isinf(request_rate) else request_rate
        searches = simulator.sweep(first_rate, progress=progress)
        fields = report_sweep(simulator, searches, plot=plot, detailed=save_detailed, quiet=as_json)
    else:
        from bullet_graph.cli.simulate.report import report_runs  # noqa: PLC0415

        runs = simulator.compare(trace_file=trace_decisions, overwrite=overwrite, progress=progress)
        fields = report_runs(simulator, runs, detailed=save_detailed, quiet=as_json)
    text = json.dumps(fields, indent=2, allow_nan=False)
    if output_json is not None:
        write_result_file(output_json, text)
    if as_json:
        click.echo(text)


def _check_combination(
    policies: tuple[Policy, ...],
    slo: Slo,
    request_rate: float | None,
    sweep: bool,
    plot: Path | None,
    trace_decisions: Path | None,
) -> None:
    if sweep and slo == Slo():
        raise ConfigError(
            "--sweep looks for the rate that holds the targets: give some, as --goodput ttft:500 tpot:15"
        )
    if sweep and request_rate is None:
        raise ConfigError(f"--sweep chooses the rates itself: leave out --request-rate {TRACE_TIMES}")
    if plot is not None and not sweep:
        raise ConfigError("--plot draws figures against the rate: add --sweep")
    if trace_decisions is not None and (sweep or len(policies) > 1):
        raise ConfigError("--trace-decisions writes one run: give one --policy, and no --sweep")
