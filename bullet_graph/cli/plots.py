"""Pictures of results. matplotlib is an extra: import this module only where a picture is asked for."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import matplotlib
from matplotlib.figure import Figure

from bullet_graph.cli.bench.sweep_runner import Sweep, SweepCell, Task
from bullet_graph.cli.tables import goodput_text
from bullet_graph.perf.goodput_search import SHARES, Goodput
from bullet_graph.perf.start_report import PhaseName
from bullet_graph.slo import Slo

if TYPE_CHECKING:
    from bullet_graph.cli.bench.startup import StartRun

COLOURS = ("#1f6f8b", "#d1603d", "#4f9d69", "#7d5ba6", "#e0b13c", "#8c6d46", "#c2649a", "#444444")
TARGET_COLOUR = "#999999"

Runs = Sequence[Mapping[str, Any]]
"""The fields of runs, as their JSON has them."""

_BAR_WIDTH = 0.8
_P = ParamSpec("_P")


def picture(draw: Callable[_P, Figure]) -> Callable[Concatenate[str, _P], bytes]:
    """Make a function that draws return the bytes of a file: its first argument is the format, ``svg`` or ``png``."""

    @functools.wraps(draw)
    def drawn(image_format: str, /, *arguments: _P.args, **settings: _P.kwargs) -> bytes:
        # The same figures give the same picture: no random ids, and no date.
        with matplotlib.rc_context({"svg.hashsalt": "bullet_graph", "font.size": 9.5}):
            figure, image = draw(*arguments, **settings), BytesIO()
            metadata = {"Date": None} if image_format == "svg" else None
            figure.savefig(image, format=image_format, dpi=150, metadata=metadata)
        return image.getvalue()

    return drawn


@picture
def draw_rates(curves: Mapping[str, Runs], *, title: str, slo: Slo) -> Figure:
    """Draw attainment, TTFT and TPOT over the request rate; ``curves`` has runs by system, at rising finite rates."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    shares, ttft, tpot = figure.subplots(1, 3)
    for index, (name, runs) in enumerate(curves.items()):
        look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "markersize": 3}
        rates = [run["request_rate"] for run in runs]
        shares.plot(rates, [100 * (run["slo_attainment"] or 0.0) for run in runs], "o-", label=name, **look)
        for axes, field in ((ttft, "ttft"), (tpot, "tpot")):
            for label, style in (("median", "o-"), ("p99", "s--")):
                # None, where nothing was served, leaves a gap.
                values = [run[f"{label}_{field}_ms"] for run in runs]
                axes.plot(rates, values, style, label=label if index == 0 else None, **look)
    for share in SHARES:
        shares.axhline(100 * share, color=TARGET_COLOUR, linestyle=":")
    shares.set(ylabel="requests that met all targets, %", ylim=(0, 104))
    ttft.set(ylabel="TTFT, ms", yscale="log")
    tpot.set(ylabel="TPOT, ms", ylim=(0, None))
    # A target that grows with the prompt has no line.
    for axes, limit_ms in ((ttft, None if slo.ttft_ms_per_token else slo.ttft_ms), (tpot, slo.tpot_ms)):
        if limit_ms is not None:
            axes.axhline(limit_ms, color=TARGET_COLOUR, linestyle=":", label="target")
    for axes in (shares, ttft, tpot):
        axes.set(xlabel="requests/s")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    return figure


# ---- a sweep ----


def draw_sweep(sweep: Sweep, image_format: str) -> dict[str, bytes]:
    """Draw all pictures of a sweep, finished or not, that has at least one run; return the files by name.

    They are the goodputs of all cells; and for each workload and targets, attainment and latencies over the rate.
    """
    tasks: dict[Task, dict[str, SweepCell]] = {}
    for cell in sweep.cells:
        if cell.runs:
            tasks.setdefault(cell.key.task, {})[cell.system] = cell
    tasks = dict(sorted(tasks.items(), key=lambda item: str(item[0])))
    # A system has the same colour in every picture.
    systems = list(dict.fromkeys(cell.system for cell in sweep.cells if cell.runs))
    pictures = {"goodput": _draw_goodput(image_format, tasks, systems, float(sweep.settings["tolerance"]))}
    for task, cells in tasks.items():
        slo = Slo.parse(task.slo.split())
        name = re.sub(r"[^A-Za-z0-9.]+", "-", str(task).replace(",", "")).strip("-")
        runs = {system: cells[system].runs if system in cells else () for system in systems}
        curves = {system: sorted(runs[system], key=lambda run: float(run["request_rate"])) for system in runs}
        pictures[f"rates_{name}"] = draw_rates(image_format, curves, title=str(task), slo=slo)
    return {f"{name}.{image_format}": image for name, image in pictures.items()}


@picture
def _draw_goodput(tasks: Mapping[Task, Mapping[str, SweepCell]], systems: Sequence[str], tolerance: float) -> Figure:
    """Goodputs as bars: a group for each workload and targets, a bar for each system, a mark in it for 99 %."""
    figure = Figure(figsize=(max(6.0, 2.0 + 2.4 * len(tasks)), 4.6), layout="constrained")
    axes = figure.subplots()
    width = _BAR_WIDTH / len(systems)
    for index, system in enumerate(systems):
        offset = (index - (len(systems) - 1) / 2) * width
        cells = [of_task.get(system) for of_task in tasks.values()]
        bars = axes.bar(
            [place + offset for place in range(len(tasks))],
            [0.0 if cell is None else cell.goodput_90 or 0.0 for cell in cells],
            width=0.92 * width,
            color=COLOURS[index % len(COLOURS)],
            label=system,
        )
        strict = [0.0 if cell is None else cell.goodput_99 or 0.0 for cell in cells]
        axes.plot([bar.get_x() + bar.get_width() / 2 for bar in bars], strict, "w_", markersize=12)
        axes.bar_label(bars, [_bar_label(cell, tolerance) for cell in cells], padding=2, fontsize=8)
    axes.set_xticks(range(len(tasks)), [str(task).replace(", ", "\n") for task in tasks])
    axes.set(ylabel="goodput, requests/s (bar: 90 % on time, mark: 99 %)")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _bar_label(cell: SweepCell | None, tolerance: float) -> str:
    if cell is None:
        return ""
    text = goodput_text(Goodput(cell.goodput_90, cell.goodput_90_below), tolerance, ".3g")
    return text if cell.sustained else f"{text}\nnot sustained"


# ---- starts ----


@picture
def draw_starts(runs: Mapping[str, "StartRun"], phases: Sequence[PhaseName], *, title: str) -> Figure:
    """Draw the phases of starts over one linear axis: a panel for each kind of start, a row for each phase."""
    figure = Figure(figsize=(9, 0.8 + (0.5 + 0.28 * len(phases)) * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True)[:, 0]
    end_s = max(run.first_token_s for run in runs.values())
    for axes, (kind, run) in zip(panels, runs.items(), strict=True):
        for row, name in enumerate(phases):
            stretches = [(p.start_s, p.end_s - p.start_s) for p in run.phases if p.name == name]
            axes.broken_barh(stretches, (row - 0.4, 0.8), color=COLOURS[row % len(COLOURS)])
            if stretches:
                axes.text(sum(stretches[-1]), row, f" {run.seconds[name]:.2f} s", va="center", fontsize=7.5)
        axes.axvline(run.startup_s, color=TARGET_COLOUR, linestyle=":")
        axes.set_yticks(range(len(phases)), phases)
        axes.invert_yaxis()
        axes.set_title(f"{kind}: ready after {run.startup_s:.2f} s", loc="left", fontsize=9.5)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    panels[-1].set(xlim=(0, 1.25 * end_s), xlabel="seconds since the process was started")
    figure.suptitle(title)
    return figure
