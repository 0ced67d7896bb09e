"""``bullet-graph bench sweep``: the goodputs of policies on workloads, by bisection over the request rate."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli import replay_options
from bullet_graph.cli.bench.replay import engine_client, measure, warm_up
from bullet_graph.cli.bench.sweep_runner import Cell, Sweep, SweepRunner, WorkloadSpec, at_rate, make_cells, targets_of
from bullet_graph.cli.engine_run import config_for, describe_config, load_requests, open_engine
from bullet_graph.cli.options import FILE, engine_options
from bullet_graph.cli.result_file import IMAGE_FORMATS, check_result_file, require_extra, to_json, write_result_file
from bullet_graph.cli.tables import goodput_table, print_table
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.replay import json_number
from bullet_graph.errors import BulletGraphError, ConfigError
from bullet_graph.perf.goodput_search import SHARES, GoodputSearch
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.runtime.performance import find_performance
from bullet_graph.runtime.resolve import resolve
from bullet_graph.workloads import Arrivals, Workload

_SYSTEM = "bullet_graph "
"""Before the policy in a sweep's file."""


@click.command()
# A decision trace is of one run, but a sweep has many, and resumes under the same command.
@engine_options(max_num_seqs=1024, without=("policy", "slo", "trace_decisions"))
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    required=True,
    metavar="NAME[=N][~RATE][@TARGETS]",
    help="As --trace of other commands; its first N requests alone; the first rate; its own targets. Repeat it for "
    "several.",
)
@click.option(
    "--slo",
    "slos",
    multiple=True,
    metavar="TARGETS",
    help='Latency targets in ms, such as "ttft:500 tpot:15", of workloads without their own; repeat it to sweep each.',
)
@replay_options.policies_option("auto")
@replay_options.search_options
@replay_options.burstiness_option
@replay_options.num_warmups_option(4)
@click.option("--plot-dir", type=FILE, help="Draw pictures into this folder.")
@click.option("--image-format", type=click.Choice(IMAGE_FORMATS), default="svg", help="Of the pictures.")
@replay_options.sweep_file_options
def sweep(
    config: EngineConfig,
    workloads: tuple[str, ...],
    slos: tuple[str, ...],
    policies: tuple[Policy, ...],
    smoke: bool,
    burstiness: float,
    num_warmups: int,
    output_json: Path,
    overwrite: bool,
    plot_dir: Path | None,
    image_format: str,
    as_json: bool,
    **search: Any,
) -> None:
    """Find each policy's goodputs: the highest request rates at which 90 and 99 % of the requests meet their targets.

    A run at a rate lasts two minutes, and has at least 300 requests: give a first rate near the answer, or --smoke for
    a short trial. A rate at which waiting prompts pile up is unstable and serves nothing.

    Every policy serves every workload with each of its targets. One engine serves all of them in rounds, so that the
    runs of one round meet the same clocks of a power-capped GPU. The file has each run as soon as it has ended; an
    interrupted sweep resumes when the same command is given again.

    "synthetic:code~10@ttft:500 tpot:8" is a workload that begins at 10 requests per second, with targets of its own.

    \b
    Examples:
      bullet-graph bench sweep --model llama-3.1-8b --workload synthetic:conv~20 --slo "ttft:500 tpot:15" \\
          --policy mixed:2048 --policy split --policy auto --output-json sweep.json --plot-dir plots
      bullet-graph bench sweep --model llama-3.1-8b --workload synthetic:conv~20 --workload synthetic:longdoc~2 \\
          --workload "synthetic:code~10@ttft:500 tpot:8" --slo "ttft:500 tpot:15" --output-json sweep.json
      bullet-graph bench sweep --model tiny --workload azure:conv=50~100 --slo ttft:500 --smoke --output-json trial.json
    """
    targets = tuple(dict.fromkeys(targets_of(slo) for slo in slos))
    specs = [WorkloadSpec.parse(workload) for workload in workloads]
    if plot_dir is not None:
        require_extra("--plot-dir", "matplotlib")
        if os.path.isfile(plot_dir):
            raise ConfigError(f"--plot-dir {plot_dir}: this is a file; give a folder")
        # A folder that is missing is made with the first picture.
        pictures = [plot_dir]
        if os.path.isdir(plot_dir):
            pictures = [*plot_dir.glob(f"*.{image_format}"), plot_dir / f"new.{image_format}"]
        for path in pictures:
            check_result_file(path, overwrite=overwrite, option="--plot-dir")
    elif image_format != "svg":
        raise ConfigError("--image-format is for the pictures of --plot-dir: give a folder, or leave it out")
    runtime = resolve(config)
    arrivals = Arrivals(request_rate=1.0, burstiness=burstiness, seed=config.seed)

    def load(spec: WorkloadSpec) -> Workload:
        workload = load_requests(runtime, spec.name, spec.num_prompts, seed=config.seed)
        workload.require_fit(runtime.max_model_len, min(SHARES))
        # Arrivals that cannot be drawn are refused now rather than after the weights are loaded.
        arrivals.times(workload)
        return workload

    systems = {f"{_SYSTEM}{policy}": policy for policy in policies}
    cells = make_cells(specs, targets, systems, search=GoodputSearch(**search), load=load, smoke=smoke)
    # Under a target for TPOT, more policies need predictions.
    strictest = next((cell.slo for cell in cells if cell.slo.tpot_ms is not None), cells[0].slo)
    opened = config_for(config, policies, strictest)
    find_performance(opened, runtime)
    provenance = dataclasses.asdict(collect_provenance(runtime.device))
    # Everything that decides the runs.
    settings = {
        **describe_config(opened, runtime),
        "workloads": list(dict.fromkeys(str(cell) for cell in cells)),
        "policies": list(dict.fromkeys(str(cell.system) for cell in cells)),
        **search,
        "smoke": smoke,
        "burstiness": json_number(burstiness),
        "num_warmups": num_warmups,
        "device_name": provenance["device_name"],
    }
    found = Sweep.open(output_json, settings=settings, provenance=provenance, overwrite=overwrite)
    runner: SweepRunner[Policy] = SweepRunner(found, quiet=as_json)
    try:
        if runner.has_work(cells):
            with open_engine(opened, quiet=as_json) as engine:
                for cell in cells:
                    # A policy that this engine cannot serve is refused before the first run.
                    engine.set_policy(cell.system, cell.slo)

                def prepare(cell: Cell[Policy]) -> None:
                    client = engine_client(engine, cell.system, cell.slo)
                    warm_up(client, cell.workload, num_warmups, slo=cell.slo, seed=config.seed)

                def run(cell: Cell[Policy], rate: float, label: str | None) -> dict[str, Any]:
                    client = engine_client(engine, cell.system, cell.slo)
                    workload, arriving = at_rate(cell.workload, arrivals, rate, smoke=smoke)
                    return measure(client, workload, arriving, slo=cell.slo, label=label).fields()

                runner.run(cells, warm_up=prepare, measure=run)
        found.finish()
    except (KeyboardInterrupt, BulletGraphError) as error:
        # ConfigError: the file could not be written.
        if found.num_runs and not isinstance(error, ConfigError):
            click.echo(f"{output_json} has all runs so far ({found.num_runs}); the same command resumes it", err=True)
        raise
    if as_json:
        click.echo(to_json(found.fields()))
    else:
        print_sweep(found)
    if plot_dir is not None:
        # matplotlib is an extra.
        from bullet_graph.cli.plots import draw_sweep  # noqa: PLC0415

        plot_dir.mkdir(exist_ok=True)
        for name, image in draw_sweep(found, image_format).items():
            write_result_file(plot_dir / name, image)
            if not as_json:
                click.echo(f"wrote {plot_dir / name}")


def print_sweep(sweep: Sweep) -> None:
    """Show each cell's goodputs on stdout: a table for each workload and targets."""
    tables: dict[str, dict[str, Any]] = {}
    for cell in sweep.cells:
        tables.setdefault(str(cell.key.task), {})[cell.system.removeprefix(_SYSTEM)] = cell.runs
    for title, rows in tables.items():
        print_table(goodput_table(title, rows, sweep.settings["tolerance"]))
