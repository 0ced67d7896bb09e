"""``bullet-graph capture plan``: what an engine should capture for a workload."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli.options import parse_slo
from bullet_graph.cli.result_file import check_result_file, write_result_file
from bullet_graph.cli.serving.options import burstiness_option, num_prompts_option, parse_rate, trace_option
from bullet_graph.cli.simulate.options import capacity_options
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.models.progress import progress_bar

_GB = 1e9


@click.command()
@trace_option
@num_prompts_option
@click.option(
    "--request-rate",
    required=True,
    metavar="RATE|inf|trace",
    callback=parse_rate,
    help="Requests a second; inf: all at once; trace: when they were recorded.",
)
@burstiness_option
@click.option(
    "--slo",
    metavar="TARGETS",
    callback=parse_slo,
    default="",
    help='Latency targets in ms, such as "ttft:500 tpot:15".',
)
@click.option(
    "--gpu",
    default="h200",
    show_default=True,
    metavar="NAME|TABLE.json|roofline:NAME",
    help="Whose times to use, as in `bullet-graph simulate`.",
)
@click.option("--model", required=True, help="A preset's name, or a Hugging Face model folder.")
@click.option(
    "--policy",
    default="auto",
    show_default=True,
    metavar="POLICY",
    help="How prefill and decode share the GPU.",
)
@capacity_options(max_num_seqs=256)
@click.option(
    "--memory-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=math.inf,
    show_default="no limit",
    help="Most memory of the captured graphs, in 10⁹ bytes.",
)
@click.option(
    "--time-s",
    type=click.FloatRange(min=0, min_open=True),
    default=math.inf,
    show_default="no limit",
    help="Most seconds that capturing may take at a start, compiling left out.",
)
@click.option(
    "--against",
    metavar="FILE.toml|NAME",
    help="Hold the proposal against this plan.  [default: all that an engine without a plan captures]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the arrivals.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="Write the plan to this file.  [default: to stdout, and the tables to stderr]",
)
@click.option("--overwrite", is_flag=True, help="Replace the file of --output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def plan(
    trace: str,
    num_prompts: int | None,
    request_rate: float | None,
    burstiness: float,
    gpu: str,
    policy: str,
    memory_gb: float,
    time_s: float,
    against: str | None,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Propose what to capture for a workload, within budgets of memory and time.

    The workload is served in virtual time, by the engine's own scheduler and planner. Of the batch sizes, partitions
    and short forwards that come up, those are chosen that lose the least time to padding. The proposal is then
    served as well, beside what it is held against.

    \b
    Examples:
      bullet-graph capture plan --model llama-3.1-8b --trace azure:conv --request-rate 18 \\
          --slo "ttft:500 tpot:15" --output conv.toml
      bullet-graph capture plan --model llama-3.1-8b --trace azure:code --request-rate 12 \\
          --slo "ttft:500 tpot:8" --memory-gb 0.4 --time-s 3 --json
    """
    config = EngineConfig(policy=Policy.parse(policy), **settings)
    check_result_file(output, overwrite=overwrite, option="--output")
    # Here: torch takes seconds to import, and --help must not wait for it.
    from bullet_graph.cli.capture.plan_report import plan_fields, plan_notes, show_plan  # noqa: PLC0415
    from bullet_graph.cli.capture.plan_study import study_captures  # noqa: PLC0415
    from bullet_graph.cli.simulate.run import SimulationSpec, Simulator  # noqa: PLC0415
    from bullet_graph.engine.capture_proposal import Budget  # noqa: PLC0415
    from bullet_graph.graphs.plan_file import format_plan  # noqa: PLC0415

    spec = SimulationSpec(
        gpu=gpu,
        config=config,
        policies=(config.policy,),
        trace=trace,
        num_prompts=num_prompts,
        request_rate=request_rate,
        time_scale=1.0,
        burstiness=burstiness,
        max_concurrency=None,
        host_overhead_ms=0.2,
        time_noise=0.0,
        attainment=0.9,
    )
    budget = Budget(memory_gb * _GB, time_s)
    with progress_bar(not as_json and sys.stderr.isatty(), unit="req") as advance:
        study = study_captures(Simulator(spec), budget, against=against, on_done=lambda _: advance(1))
    text = format_plan(study.proposal.plan, plan_notes(study))
    if output is not None:
        write_result_file(output, text.rstrip("\n"))
    if as_json:
        click.echo(json.dumps(plan_fields(study, text), indent=2, allow_nan=False))
        return
    show_plan(study, to_stderr=output is None)
    click.echo(text if output is None else f"wrote {output}", nl=output is not None)
