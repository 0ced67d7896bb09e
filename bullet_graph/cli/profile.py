"""``bullet-graph profile``: measures a performance table on this GPU."""

import contextlib
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from bullet_graph.cli.options import parse_sizes, setting_options
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.config import EngineConfig
from bullet_graph.perf.accuracy import ErrorReport, held_back_errors
from bullet_graph.perf.profile_plan import KINDS, from_points
from bullet_graph.perf.table import PerfTable
from bullet_graph.runtime.performance import table_key, table_model, user_table_file
from bullet_graph.runtime.profile import prepare_profile, profile_model


@click.command()
@setting_options(
    "model",
    "load_format",
    "dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "partition_backend",
    max_num_seqs=512,
)
@click.option(
    "--decode-sms",
    metavar="N,N,…",
    callback=parse_sizes,
    help="Sizes of the decode lane.  [default: 16,24,32,48,64,80,96, up to three quarters of the GPU]",
)
@click.option(
    "--time-budget-s",
    type=click.FloatRange(min=0, min_open=True),
    default=480.0,
    help="Time for the measurements alone; less time means fewer points and shorter bursts.",
)
@setting_options("seed")
@click.option(
    "--output", type=click.Path(path_type=Path), help="File of the table.  [default: in your data folder]"
)
@click.option("--overwrite", is_flag=True, help="Replace the table if it exists.")
@click.option("--restart", is_flag=True, help="Discard what an interrupted profile measured.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON and nothing else.")
def profile(
    time_budget_s: float,
    output: Path | None,
    overwrite: bool,
    restart: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure how fast this GPU decodes and prefills: each alone, in one forward, and both on parts of the GPU.

    The planner (--policy auto and split, TPOT targets) and the simulator predict from the resulting table. Nothing else
    should run on the GPU meanwhile. The same command continues an interrupted profile.

    \b
    Examples:
      bullet-graph profile --model llama-3.1-8b
      bullet-graph profile --model ./Llama-3.2-1B --decode-sms 32,64 --time-budget-s 120 --output table.json
    """
    config = EngineConfig(**settings, device="cuda")
    prepared = prepare_profile(config)
    file = output or user_table_file(table_key(prepared.runtime))
    with contextlib.suppress(OSError):  # the check says what is wrong
        file.parent.mkdir(parents=True, exist_ok=True)
    check_result_file(file, overwrite=overwrite, option="--output")

    def tell(line: str) -> None:
        if not as_json:
            tqdm.write(line, file=sys.stderr)

    # Libraries that greet on stdout when they are imported would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        table = profile_model(
            prepared,
            file=file,
            time_budget_s=time_budget_s,
            restart=restart,
            progress=not as_json and sys.stderr.isatty(),
            tell=tell,
        )
    errors = held_back_errors(table, table_model(table, config.max_num_seqs, prepared.runtime.model))
    if not as_json:
        _print(table, errors)
        click.echo(f"table: {file}")
        return
    key = table.key
    result = {
        "file": str(file),
        "gpu": key.gpu,
        "model": key.model,
        "dtype": key.dtype,
        "num_points": len(from_points(table.points)),
        "num_held_back": len(from_points(table.held_back)),
        "held_back_errors": dataclasses.asdict(errors),
        "passes": table.provenance["passes"],
    }
    click.echo(json.dumps(result, indent=2, allow_nan=False))


def _print(table: PerfTable, errors: ErrorReport) -> None:
    console = Console()
    key = table.key
    console.print(_measured_table(table, f"{key.model} in {key.dtype} on {key.gpu}"))
    shown = Table(title="Error on the points held back", title_justify="left")
    for name in ("kind", "points", "median", "p90", "worst"):
        shown.add_column(name, justify="left" if name in ("kind", "worst") else "right")
    for summary in (*errors.kinds, *([] if errors.overall is None else [errors.overall])):
        worst = summary.worst
        shown.add_row(
            summary.kind,
            str(summary.num_points),
            f"{summary.median_percent:.1f} %",
            f"{summary.p90_percent:.1f} %",
            f"{worst.percent:+.0f} %: {worst.point}, {worst.measured_ms:.2f} ms",
        )
    console.print(shown)


def _measured_table(table: PerfTable, title: str) -> Table:
    shown = Table("measured", title=title, title_justify="left")
    for name in ("points", "held back", "repeats", "fastest ms", "slowest ms", "spread p50"):
        shown.add_column(name, justify="right")
    for kind in KINDS:
        grid, held_back = (
            [repeats for point, repeats in from_points(points).items() if point.kind == kind]
            for points in (table.points, table.held_back)
        )
        of_kind = grid + held_back
        if not of_kind:
            continue
        times = [time for repeats in of_kind for repeat in repeats for time in repeat]
        # Of the first lane: (longest − shortest repeat) / shortest.
        spreads = [max(repeats)[0] / min(repeats)[0] - 1 for repeats in of_kind]
        shown.add_row(
            kind,
            str(len(grid)),
            str(len(held_back)),
            str(sum(map(len, of_kind))),
            f"{min(times):.2f}",
            f"{max(times):.2f}",
            f"{100 * statistics.median_high(spreads):.1f} %",
        )
    return shown
