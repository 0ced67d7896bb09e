"""``bullet-graph doctor``: what works on this machine, and the calibration of stream masks."""

import contextlib
import dataclasses
import sys
from itertools import groupby
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from bullet_graph.cli.options import decode_sms_option, json_option, setting_options
from bullet_graph.cli.result_file import print_json
from bullet_graph.config import EngineConfig
from bullet_graph.models.progress import progress_bar
from bullet_graph.partition.calibrate import CANDIDATES, calibrate
from bullet_graph.partition.offsets import lookup, remember
from bullet_graph.runtime.diagnose import Diagnosis, diagnose
from bullet_graph.runtime.machine import look_around

_MARKS = {"green": "✓", "yellow": "!", "red": "✗"}


@click.command()
@setting_options("device", "tensor_parallel_size", "partition_backend")
@decode_sms_option("Sizes of the decode lane, in SMs, to verify.", "a few that suit the GPU")
@click.option("--model", help="Plan this model's memory, under default settings.")
@click.option(
    "--calibrate",
    "wants_calibration",
    is_flag=True,
    help="Find out where this driver keeps stream masks, prove it, and remember it: a minute on an idle GPU.",
)
@json_option
def doctor(model: str | None, wants_calibration: bool, as_json: bool, **settings: Any) -> None:
    """Check what works on this machine, and say how to mend the rest.

    Exit code 1: an engine could not run as asked; 2: a calibration failed.

    \b
    Examples:
      bullet-graph doctor
      bullet-graph doctor --partition-backend green --decode-sms 16,32,64 --json
      bullet-graph doctor --device cuda --model llama-3.1-8b
      bullet-graph doctor --model llama-3.1-70b --tensor-parallel-size 4
      bullet-graph doctor --calibrate
    """
    if wants_calibration:
        _calibrate(as_json=as_json)
        return
    asked = EngineConfig(model=model or "", **settings)
    # Libraries that greet on stdout when they are imported would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        machine = look_around(asked)
    diagnosis = diagnose(asked, machine)
    if as_json:
        print_json({"works": diagnosis.works, **dataclasses.asdict(diagnosis), "machine": machine})
    else:
        _print_page(diagnosis)
    if not diagnosis.works:
        click.get_current_context().exit(1)


def _print_page(diagnosis: Diagnosis) -> None:
    console = Console()
    table = Table("", "", Column(overflow="fold"), title="bullet-graph doctor", title_justify="left", show_header=False)
    for _, findings in groupby(diagnosis.findings, key=lambda finding: finding.section):
        table.add_section()
        for finding in findings:
            # Text and not str: "bullet-graph[cuda]" is no markup.
            found = Text(finding.found)
            if finding.advice is not None:
                found.append(f"\n→ {finding.advice}", style=finding.level)
            table.add_row(Text(_MARKS[finding.level], style=finding.level), Text(finding.name), found)
    console.print(table)
    if diagnosis.works:
        device = "GPU" if diagnosis.device == "cuda" else "CPU"
        console.print(f"The engine can run as asked, on the {device}.", style="green")
    else:
        console.print(f"The engine cannot run as asked: see the lines marked {_MARKS['red']}.", style="red")


def _calibrate(*, as_json: bool) -> None:
    context = click.get_current_context()
    for name in ("device", "tensor_parallel_size", "partition_backend", "decode_sms", "model"):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--calibrate takes no --{name.replace('_', '-')}: run the two after each other")
    shows = not as_json and sys.stderr.isatty()
    with progress_bar(shows, total=len(CANDIDATES), desc="Calibrating", unit="try") as advance:
        found = calibrate(advance=advance)
    path = remember(found.driver, found.offset)
    if as_json:
        print_json(dataclasses.asdict(found) | {"table_line": found.table_line, "remembered_in": str(path)})
        return
    click.echo(
        f"Driver {found.driver.release} keeps stream masks at offset 0x{found.offset:x}: proven, and "
        f"remembered in {path} ({found.tries} tries in {found.seconds:.0f} s; {found.crashed} crashed, "
        f"{found.timed_out} timed out)."
    )
    is_known = lookup(found.driver) == found.offset
    contribute = "To contribute it, add this line to bullet_graph/partition/offsets.py:"
    click.echo(f"{'The package knows it already:' if is_known else contribute}\n{found.table_line}")
