"""Pictures of the comparisons."""

import dataclasses
from collections.abc import Mapping

from bench.reporting.evidence import Evidence, is_search
from bullet_graph.cli.bench.sweep_file import Sweep
from bullet_graph.cli.bench.sweep_plot import draw_sweep
from bullet_graph.slo import NO_TARGETS

_FORMAT = "svg"


def draw_all(evidence: Evidence) -> dict[str, dict[str, bytes]]:
    """Pictures of every comparison that has runs at rates, by its file's name, then by their own names."""
    drawn = {file: _draw(file.removesuffix(".json"), sweep) for file, sweep in evidence.sweeps}
    return {file: pictures for file, pictures in drawn.items() if pictures}


def all_pictures(drawn: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """All pictures by their own names, which begin with their file's."""
    return {name: picture for pictures in drawn.values() for name, picture in pictures.items()}


def _draw(stem: str, sweep: Sweep) -> dict[str, bytes]:
    cells = []
    for cell in sweep.cells:
        # All at once is no rate to draw a curve over, and without targets there is nothing to meet.
        runs = tuple(run for run in cell.runs if not run.get("all_at_once"))
        if runs and cell.key.slo != str(NO_TARGETS):
            cells.append(dataclasses.replace(cell, runs=runs))
    if not cells:
        return {}
    pictures = draw_sweep(dataclasses.replace(sweep, cells=tuple(cells)), _FORMAT)
    if not is_search(sweep):
        # The highest of rates that were given is no goodput.
        del pictures[f"goodput.{_FORMAT}"]
    return {f"{stem}_{name}": picture for name, picture in pictures.items()}
