"""``bullet-graph capture build``: an entry with everything that a start needs."""

import contextlib
import dataclasses
import json
import sys

import click
from rich.console import Console

from bullet_graph.captures.store import CaptureStore
from bullet_graph.cli.capture.entries import cache_dir_option, json_option, parts_of, parts_table, title
from bullet_graph.cli.options import engine_options
from bullet_graph.config import EngineConfig
from bullet_graph.runtime.capture_build import BuildReport, build_entry


@click.command()
@engine_options(max_num_seqs=256, without=("trace_decisions", "capture_cache", "self_check"))
@cache_dir_option
@json_option
def build(config: EngineConfig, store: CaptureStore, as_json: bool) -> None:
    """Compile, tune and collect what an engine of these settings needs, so that its start compiles nothing.

    An entry serves engines with the same model, dtype and capture plan. At the end, the logits of each captured batch
    size are compared with those of the uncompiled model. On the CPU, --compile is implied.

    \b
    Examples:
      bullet-graph capture build --model llama-3.1-8b
      bullet-graph capture build --model llama-3.1-8b --policy auto --capture-plan conv.toml --cache-dir /mnt/captures
      bullet-graph capture build --model tiny --device cpu --max-num-seqs 8 --json
    """
    # Libraries that greet on stdout would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        report = build_entry(
            config,
            store,
            progress=not as_json and sys.stderr.isatty(),
            tell=lambda line: click.echo(line, err=True),
        )
    entry, checked = report.entry, report.entry.manifest.self_check
    if as_json:
        click.echo(json.dumps(_fields(report), indent=2, allow_nan=False))
        return
    console = Console()
    console.print(parts_table(entry, f"{entry.entry_id}: {title(entry)}"))
    if report.was_there:
        console.print(f"It was built before: {entry.folder}", markup=False)
        return
    if checked is not None:
        console.print(
            f"Self-check: {len(checked['relative_error'])} batch sizes, relative error of the logits at most "
            f"{max(checked['relative_error'].values()):.2g} (tolerance {checked['tolerance']:g}).",
            markup=False,
        )
    console.print(f"Built in {report.seconds:.1f} s: {entry.folder}", markup=False)


def _fields(report: BuildReport) -> dict[str, object]:
    return {
        "entry_id": report.entry.entry_id,
        "folder": str(report.entry.folder),
        "was_there": report.was_there,
        "seconds": report.seconds,
        "compiles": dataclasses.asdict(report.compiles),
        "self_check": report.entry.manifest.self_check,
        "parts": parts_of(report.entry),
    }
