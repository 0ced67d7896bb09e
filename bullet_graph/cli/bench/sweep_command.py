"""``bullet-graph bench sweep``: the goodput of policies on workloads, by bisection over the request rate."""

import json
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli.bench.sweep_cells import WorkloadSpec, parse_targets
from bullet_graph.cli.options import engine_options
from bullet_graph.cli.result_file import check_result_file, require_matplotlib
from bullet_graph.cli.serving.options import burstiness_option, policies_option
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.errors import BulletGraphError, ConfigError

_IMAGE_FORMATS = ("svg", "png")


@click.command()
# A decision trace is of one run; a sweep has many, and goes on under the same command.
@engine_options(max_num_seqs=1024, without=("policy", "slo", "trace_decisions"))
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    required=True,
    metavar="NAME[=N][~RATE][@TARGETS]",
    help="conv, code, longdoc, or what --trace of other commands takes; its first N requests; the rate to begin at; "
    "targets of its own. Repeat it for several.",
)
@click.option(
    "--slo",
    "slos",
    multiple=True,
    metavar="TARGETS",
    help='Latency targets in ms, such as "ttft:500 tpot:15", of the workloads that have none of their own; repeat it '
    "to sweep each of them.",
)
@policies_option("auto")
@click.option(
    "--first-rate",
    type=float,
    default=8.0,
    show_default=True,
    help="Where to begin, in requests a second; near the answer saves runs.",
)
@click.option(
    "--attainment",
    type=float,
    default=0.9,
    show_default=True,
    help="Share of requests that must meet all targets.",
)
@click.option(
    "--tolerance", type=float, default=0.02, show_default=True, help="How exact a goodput is, relative."
)
@click.option(
    "--step",
    type=float,
    default=1.25,
    show_default=True,
    help="First factor between two rates; further ones grow up to 2.",
)
@click.option(
    "--max-runs", type=click.IntRange(min=1), default=20, show_default=True, help="Most runs of one search."
)
@burstiness_option
@click.option(
    "--num-warmups",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    help="Unmeasured requests before the first run of each cell.",
)
@click.option(
    "--output-json",
    type=click.Path(path_type=Path),
    required=True,
    help="The sweep's file. If it holds this sweep unfinished, the sweep goes on.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace output files that exist; an unfinished sweep of the same settings goes on all the same.",
)
@click.option("--plot-dir", type=click.Path(path_type=Path), help="Draw pictures into this folder.")
@click.option("--image-format", type=click.Choice(_IMAGE_FORMATS), default="svg", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the sweep's file and nothing else.")
def sweep(
    config: EngineConfig,
    workloads: tuple[str, ...],
    slos: tuple[str, ...],
    policies: tuple[Policy, ...],
    output_json: Path,
    overwrite: bool,
    plot_dir: Path | None,
    image_format: str,
    as_json: bool,
    **search: Any,
) -> None:
    """Find each policy's goodput: the highest request rate at which enough requests meet their targets.

    Every policy serves every workload with each of its targets. One engine serves all of them: a run of each in turn,
    so that the runs of one round meet the same clocks of a power-capped GPU. Each run is in the file as
    soon as it has ended; an interrupted sweep goes on when the same command is given again.

    A workload is written NAME, NAME=NUM_PROMPTS, and so on: "code=400~10@ttft:500 tpot:8" is the first 400 requests of
    azure:code, beginning at 10 a second, with targets of its own. Give it again for other targets.

    \b
    Examples:
      bullet-graph bench sweep --model llama-3.1-8b --workload conv=600 --slo "ttft:500 tpot:15" \\
          --policy mixed:2048 --policy split --policy auto --output-json sweep.json --plot-dir plots
      bullet-graph bench sweep --model llama-3.1-8b --workload conv=600~24 --workload longdoc=100~1 \\
          --workload "code=400~10@ttft:500 tpot:8" --slo "ttft:500 tpot:15" --output-json sweep.json
    """
    chosen_slos = tuple(dict.fromkeys(parse_targets(slo) for slo in slos))
    specs = tuple(WorkloadSpec.parse(workload) for workload in workloads)
    if plot_dir is not None:
        require_matplotlib("--plot-dir")
    # torch takes seconds to import, and --help must not wait for it.
    from bullet_graph.cli.bench.sweep import GoodputSweep, SweepSpec, print_sweep  # noqa: PLC0415

    spec = SweepSpec(
        config=config,
        workloads=specs,
        slos=chosen_slos,
        policies=policies,
        **search,
    )
    prepared = GoodputSweep(spec, output_json, overwrite=overwrite)
    if plot_dir is not None:
        from bullet_graph.cli.bench.sweep_plot import draw_sweep, plot_names  # noqa: PLC0415

        names = plot_names((cell.key for cell in prepared.cells), image_format)
        _check_plots(plot_dir, names, overwrite=overwrite)
    try:
        result = prepared.run(quiet=as_json)
    except (KeyboardInterrupt, BulletGraphError):
        if prepared.num_runs:
            click.echo(
                f"{output_json} has all runs so far ({prepared.num_runs}); the same command goes on from there",
                err=True,
            )
        raise
    if not as_json:
        print_sweep(result)
    if plot_dir is not None:
        plot_dir.mkdir(exist_ok=True)
        for name, image in draw_sweep(result, image_format).items():
            (plot_dir / name).write_bytes(image)
            if not as_json:
                click.echo(f"wrote {plot_dir / name}")
    if as_json:
        click.echo(json.dumps(result.fields(), indent=2, allow_nan=False))


def _check_plots(folder: Path, names: list[str], *, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--plot-dir {folder}: this is a file; give a folder")
    if not folder.exists():
        # It is made when there is something to put into it.
        check_result_file(folder, overwrite=overwrite, option="--plot-dir")
        return
    for name in names:
        check_result_file(folder / name, overwrite=overwrite, option="--plot-dir")
