"""``bullet-graph capture build``: everything a start needs, into a cache."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from bullet_graph.captures.store import CaptureStore
from bullet_graph.cli.capture.store_options import cache_dir_option, json_option, plain, size_text, title
from bullet_graph.cli.options import engine_options
from bullet_graph.config import EngineConfig
from bullet_graph.models.progress import progress_bar

if TYPE_CHECKING:
    from bullet_graph.runtime.artifacts.building import BuildReport


@click.command()
@engine_options(max_num_seqs=256, without=("trace_decisions", "capture_cache", "self_check"))
@cache_dir_option
@json_option
def build(config: EngineConfig, store: CaptureStore, as_json: bool) -> None:
    """Compile, tune and collect all that an engine of these settings needs, so that its start compiles nothing.

    The options are those of the engine: a cache serves engines with the same model, dtype and capture plan. What an
    interrupted build has finished, and what other entries have that holds here, is not built again. At the end, the
    logits of each captured batch size are compared with those of the uncompiled model. On the CPU, --compile is
    implied.

    \b
    Examples:
      bullet-graph capture build --model llama-3.1-8b
      bullet-graph capture build --model llama-3.1-8b --policy auto --capture-plan conv.toml --cache-dir /mnt/captures
      bullet-graph capture build --model tiny --device cpu --max-num-seqs 8 --json
    """
    # Libraries that greet on stdout when they are imported would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        # Here: torch takes seconds to import, and --help must not wait for it.
        from bullet_graph.runtime.artifacts.building import BuildSettings, build_captures  # noqa: PLC0415

        show = not as_json and sys.stderr.isatty()
        with _part_bar(show) as on_part:
            settings = BuildSettings(
                progress=show,
                tell=lambda line: click.echo(line, err=True),
                on_part=on_part,
            )
            report = build_captures(config, store, settings)
    if as_json:
        click.echo(json.dumps(_page(report), indent=2, allow_nan=False))
    else:
        _print(report)


@contextlib.contextmanager
def _part_bar(show: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar of the parts that have ended."""
    begun: list[str] = []
    with contextlib.ExitStack() as held:

        def on_part(name: str, count: int) -> None:
            if not begun:
                begun.append(name)
                bars.append(
                    held.enter_context(progress_bar(show, total=count, unit="part", desc="Building captures"))
                )
                return
            begun.append(name)
            bars[0](1)

        bars: list[Callable[[float], object]] = []
        yield on_part
        for advance in bars:
            advance(1)


def _parts(report: "BuildReport") -> list[dict[str, Any]]:
    manifest = report.entry.manifest
    kinds = dict.fromkeys(artifact.kind for artifact in manifest.artifacts)
    return [
        {
            "part": str(kind),
            "num_files": sum(artifact.kind is kind for artifact in manifest.artifacts),
            "num_bytes": sum(a.num_bytes for a in manifest.artifacts if a.kind is kind),
            "build_seconds": manifest.build_seconds({kind}),
        }
        for kind in kinds
    ]


def _page(report: "BuildReport") -> dict[str, Any]:
    return {
        "entry_id": report.entry.entry_id,
        "folder": str(report.entry.folder),
        "was_there": report.was_there,
        "resumed": list(report.resumed),
        "adopted": list(report.adopted),
        "seconds": report.seconds,
        "compiles": dataclasses.asdict(report.compiles),
        "self_check": report.entry.manifest.self_check,
        "parts": _parts(report),
    }


def _print(report: "BuildReport") -> None:
    entry, console = report.entry, Console()
    if report.was_there:
        console.print(f"Entry {entry.entry_id} ({title(entry)}) was built before.", markup=False)
    table = Table(
        "part", "files", "size", "built in", title=f"{entry.entry_id}: {title(entry)}", title_justify="left"
    )
    for part in _parts(report):
        cells = (
            part["part"],
            str(part["num_files"]),
            size_text(part["num_bytes"]),
            f"{part['build_seconds']:.1f} s",
        )
        table.add_row(*plain(cells))
    console.print(table)
    if report.was_there:
        return
    for what, names in (("an interrupted build had", report.resumed), ("other entries had", report.adopted)):
        if names:
            console.print(f"{len(names)} of the files {what} already.", markup=False)
    self_check = entry.manifest.self_check
    if self_check is not None:
        worst = max(self_check["relative_error"].values())
        console.print(
            f"Self-check: {len(self_check['relative_error'])} batch sizes, relative error at most {worst:.2g} "
            f"(tolerance {self_check['tolerance']:g}).",
            markup=False,
        )
    console.print(f"Built in {report.seconds:.1f} s: {Path(entry.folder)}", markup=False)
