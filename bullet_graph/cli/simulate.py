"""``bullet-graph simulate``: a trace on a GPU that need not be there, in virtual time."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli.options import FILE, result_options, setting_options
from bullet_graph.cli.replay_options import TRACE_TIMES, GoodputCommand, gpu_option, replay_options
from bullet_graph.cli.result_file import Output, check_plot_file
from bullet_graph.cli.simulator import Simulator
from bullet_graph.cli.tables import ReplayRun, emit_replays, goodput_table, print_line, print_table
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.simulation import HOST_OVERHEAD_MS
from bullet_graph.errors import ConfigError
from bullet_graph.models.progress import progress_bar
from bullet_graph.perf.goodput_search import GoodputSearch
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Arrivals

_FIRST_RATE = 8.0
_TOLERANCE = 0.02


@click.command(cls=GoodputCommand)
@gpu_option
@setting_options("model", model="llama-3.1-8b")
@replay_options(default_policy="auto", request_rate_more=" With --sweep, the first rate.")
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
    default=HOST_OVERHEAD_MS,
    help="Host time per launch.",
)
@click.option(
    "--time-noise",
    type=click.FloatRange(min=0, max=1),
    default=0.0,
    help="Relative spread of the device's times around the prediction: 0.1 is about 10 %.",
)
@click.option("--sweep", is_flag=True, help="Find the highest rate at which each policy meets the targets.")
@click.option(
    "--attainment",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.9,
    help="Share of requests that must meet all targets, for --sweep.",
)
@click.option("--plot", type=FILE, help="Draw the sweep; the name ends in .svg or .png.")
@click.option("--trace-decisions", type=FILE, help="Write every decision (see `bullet-graph explain`).")
@result_options
def simulate(
    policies: tuple[Policy, ...],
    sweep: bool,
    attainment: float,
    plot: Path | None,
    trace_decisions: Path | None,
    save_detailed: bool,
    output: Output,
    gpu: str,
    trace: str,
    num_prompts: int | None,
    arrivals: Arrivals,
    host_overhead_ms: float,
    time_noise: float,
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
    if sweep and config.slo == NO_TARGETS:
        raise ConfigError(
            "--sweep looks for the rate that meets the targets: give some, as --goodput ttft:500 tpot:15"
        )
    if sweep and arrivals.request_rate is None:
        raise ConfigError(f"--sweep chooses the rates itself: leave out --request-rate {TRACE_TIMES}")
    if plot is not None and not sweep:
        raise ConfigError("--plot draws figures over the rate: add --sweep")
    if trace_decisions is not None and (sweep or len(policies) > 1):
        raise ConfigError("--trace-decisions writes one run: give one --policy, and no --sweep")
    check_plot_file(plot, overwrite=output.overwrite)
    simulator = Simulator(
        gpu=gpu,
        config=config,
        trace=trace,
        num_prompts=num_prompts,
        arrivals=arrivals,
        host_overhead_ms=host_overhead_ms,
        time_noise=time_noise,
    )
    show_progress = not output.as_json and sys.stderr.isatty()
    title = simulator.title()
    if not sweep:
        runs = {}
        total = len(policies) * len(simulator.workload.requests)
        with contextlib.ExitStack() as stack:
            advance = stack.enter_context(progress_bar(show_progress, total=total, unit="req"))
            decisions = None
            if trace_decisions is not None:
                decisions = simulator.open_trace(trace_decisions, policies[0], overwrite=output.overwrite)
                stack.enter_context(contextlib.closing(decisions))
            for policy in policies:
                runs[str(policy)] = simulator.run(policy, trace=decisions, on_done=lambda _: advance(1))
        emit_replays(title, runs, simulator.describe(), output, detailed=save_detailed)
        return

    with progress_bar(show_progress, unit="run") as advance:
        found = {str(policy): _search(simulator, policy, attainment, advance) for policy in policies}
    fields = {policy: [run.fields() for run in runs] for policy, (_, runs) in found.items()}
    if plot is not None:
        # matplotlib is an extra.
        from bullet_graph.cli.plots import draw_rates  # noqa: PLC0415

        image_format = plot.suffix[1:].lower()
        plot.write_bytes(draw_rates(image_format, fields, title=title, slo=config.slo, attainment=attainment))

    def show() -> None:
        share = f"highest rate at which {100 * attainment:g} % of the requests meet all targets"
        print_line(f"{title}: {share}")
        rows = {policy: (goodput, fields[policy]) for policy, (goodput, _) in found.items()}
        print_table(goodput_table(None, rows, _TOLERANCE))
        if plot is not None:
            print_line(f"wrote {plot}")

    searches = {
        policy: {"goodput": goodput, "results": [run.result.fields(detailed=save_detailed) for run in runs]}
        for policy, (goodput, runs) in found.items()
    }
    common = simulator.describe() | {"attainment": attainment, "policies": searches}
    output.emit(common, show)


def _search(
    simulator: Simulator, policy: Policy, attainment: float, advance: Callable[[int], object]
) -> tuple[float | None, list[ReplayRun]]:
    """A policy's goodput (None: no rate served enough), and the runs tried, lowest rate first."""
    rate_given = simulator.arrivals.request_rate
    first_rate = _FIRST_RATE if rate_given is None or math.isinf(rate_given) else rate_given
    search = GoodputSearch(first_rate=first_rate, attainment=attainment, tolerance=_TOLERANCE)
    runs: dict[float, ReplayRun] = {}
    while (rate := search.next_rate()) is not None:
        runs[rate] = simulator.run(policy, dataclasses.replace(simulator.arrivals, request_rate=rate))
        search.record(rate, runs[rate].result.slo_attainment or 0.0)
        advance(1)
    return search.goodput, [runs[rate] for rate in sorted(runs)]
