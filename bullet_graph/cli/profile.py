"""``bullet-graph profile``: measures a performance table on this GPU."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from bullet_graph.cli.options import FILE, decode_sms_option, json_option, setting_options
from bullet_graph.cli.result_file import check_result_file, print_json
from bullet_graph.cli.tables import print_line, print_table, table_of
from bullet_graph.config import EngineConfig
from bullet_graph.perf.profile_plan import held_back_errors
from bullet_graph.perf.table import format_name
from bullet_graph.runtime.performance import PROFILED, table_key, table_model, user_table_file
from bullet_graph.runtime.profile import prepare_profile, profile_model


@click.command()
@setting_options(*PROFILED, "device")
@setting_options("max_num_seqs", "max_num_batched_tokens", "partition_backend", max_num_seqs=512)
@decode_sms_option("Sizes of the decode lane.", "16,24,32,48,64,80,96, up to three quarters of the GPU")
@click.option(
    "--time-budget-s",
    type=click.FloatRange(min=0),
    default=480.0,
    help="Time for the measurements alone; less time means fewer points and shorter bursts. 0: as few as make a table.",
)
@setting_options("seed")
@click.option("--output", type=FILE, help="File of the table.  [default: in your data folder]")
@click.option("--overwrite", is_flag=True, help="Replace the table if it exists.")
@click.option("--restart", is_flag=True, help="Discard what an interrupted profile measured.")
@json_option
def profile(
    time_budget_s: float, output: Path | None, overwrite: bool, restart: bool, as_json: bool, **settings: Any
) -> None:
    """Measure how fast this GPU decodes and prefills: each alone, in one forward, and both on parts of the GPU.

    The planner (--policy auto and split, TPOT targets) and the simulator predict from the resulting table. Nothing else
    should run on the GPU meanwhile. Of several ranks, the slowest one's times count. The same command continues an
    interrupted profile.

    \b
    Examples:
      bullet-graph profile --model llama-3.1-8b
      bullet-graph profile --model ./Llama-3.2-1B --decode-sms 32,64 --time-budget-s 120 --output table.json
    """
    config = EngineConfig(**settings)
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
        progress = not as_json and sys.stderr.isatty()
        table = profile_model(
            prepared, file=file, time_budget_s=time_budget_s, restart=restart, progress=progress, tell=tell
        )
    errors = held_back_errors(table, table_model(table, config.max_num_seqs, prepared.runtime.model))
    key = table.key
    num_points, num_held_back = len(table.points), len(table.held_back)
    if as_json:
        print_json(
            {
                "file": str(file),
                "gpu": key.gpu,
                "model": key.model,
                "dtype": key.dtype,
                "num_points": num_points,
                "num_held_back": num_held_back,
                "held_back_errors": errors,
                "passes": table.provenance["passes"],
            }
        )
        return
    title = f"{key.model} in {format_name(key.dtype, key.shape)} on {key.gpu}: {num_points} points"
    shown = table_of("points held back", "number", "median error", "p90", "worst", title=title)
    for summary in (*errors.kinds, *([] if errors.overall is None else [errors.overall])):
        worst = summary.worst
        shown.add_row(
            summary.kind,
            str(summary.num_points),
            f"{summary.median_percent:.1f} %",
            f"{summary.p90_percent:.1f} %",
            f"{worst.percent:+.0f} %: {worst.point}, {worst.measured_ms:.2f} ms",
        )
    print_table(shown)
    print_line(f"table: {file}")
