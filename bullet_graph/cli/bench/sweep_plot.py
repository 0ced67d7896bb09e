"""Pictures of a goodput sweep, from what its file holds: whatever system wrote it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure

from bullet_graph.cli.bench.sweep_file import CellKey, Sweep, SweepCell
from bullet_graph.cli.serving.plot import (
    COLOURS,
    TARGET_COLOUR,
    draw_rates,
    encode,
    plot_style,
    ttft_line_ms,
)
from bullet_graph.slo import Slo

_GOODPUT = "goodput"
_BAR_WIDTH = 0.8


@dataclass(frozen=True, slots=True, order=True)
class _Task:
    """What systems are compared at: a cell without its system."""

    workload: str
    num_prompts: int
    slo: str

    @classmethod
    def of(cls, key: CellKey) -> "_Task":
        return cls(key.workload, key.num_prompts, key.slo)

    @property
    def targets(self) -> Slo:
        return Slo.parse(self.slo.split())

    def __str__(self) -> str:
        return f"{self.workload}, {self.num_prompts:,} requests, {self.slo}"

    @property
    def slug(self) -> str:
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.workload} {self.num_prompts} {self.slo}").strip("-")


def plot_names(keys: Iterable[CellKey], image_format: str) -> list[str]:
    """The files that :func:`draw_sweep` makes of these cells."""
    tasks = dict.fromkeys(_Task.of(key) for key in keys)
    pictures = [f"{kind}_{task.slug}" for task in tasks for kind in ("rates", "throughput")]
    return [f"{name}.{image_format}" for name in (_GOODPUT, *pictures)]


def draw_sweep(sweep: Sweep, image_format: str) -> dict[str, bytes]:
    """All pictures of a sweep, finished or not; the same bytes for the same figures.

    Args:
        sweep: a file as :func:`~bullet_graph.cli.bench.sweep_file.read_sweep` reads it, with a run at least; its
            settings say the ``attainment``.
        image_format: ``svg`` or ``png``.

    Returns:
        The files by name: the goodput of all cells; and for each workload and targets, attainment and latencies
        against the rate, and output tokens a second against latencies.
    """
    cells = sorted((cell for cell in sweep.cells if cell.runs), key=lambda cell: _Task.of(cell.key))
    tasks = {task: list(of_task) for task, of_task in groupby(cells, key=lambda cell: _Task.of(cell.key))}
    # A system has the same colour in every picture.
    systems = list(dict.fromkeys(cell.key.system for cell in sweep.cells if cell.runs))
    attainment = float(sweep.settings["attainment"])
    pictures = {f"{_GOODPUT}.{image_format}": _draw_goodput(tasks, systems, attainment, image_format)}
    for task, of_task in tasks.items():
        curves = {
            system: next((_by_rate(cell) for cell in of_task if cell.key.system == system), [])
            for system in systems
        }
        pictures[f"rates_{task.slug}.{image_format}"] = draw_rates(
            curves,
            title=str(task),
            slo=task.targets,
            attainment=attainment,
            image_format=image_format,
            labels=("median", "p90"),
        )
        best = {cell.key.system: cell.best for cell in of_task}
        pictures[f"throughput_{task.slug}.{image_format}"] = _draw_throughput(
            task, curves, best, image_format
        )
    return pictures


def _draw_goodput(
    tasks: Mapping[_Task, Sequence[SweepCell]], systems: Sequence[str], attainment: float, image_format: str
) -> bytes:
    """Goodput as bars: a group for each workload and targets, a bar for each system."""
    with plot_style():
        figure = Figure(figsize=(max(6.0, 2.0 + 2.4 * len(tasks)), 4.6), layout="constrained")
        axes = figure.subplots()
        width = _BAR_WIDTH / len(systems)
        for index, system in enumerate(systems):
            offset = (index - (len(systems) - 1) / 2) * width
            goodputs = [
                next((cell for cell in cells if cell.key.system == system), None) for cells in tasks.values()
            ]
            bars = axes.bar(
                [place + offset for place in range(len(tasks))],
                [0.0 if cell is None else cell.goodput or 0.0 for cell in goodputs],
                width=0.92 * width,
                color=COLOURS[index % len(COLOURS)],
                label=system,
            )
            axes.bar_label(bars, [_bar_label(cell) for cell in goodputs], padding=2, fontsize=8)
        axes.set_xticks(
            range(len(tasks)),
            [f"{task.workload}\n{task.num_prompts:,} requests\n{task.slo}" for task in tasks],
        )
        axes.set(ylabel=f"goodput, requests/s ({100 * attainment:g} % meet all targets)")
        axes.margins(y=0.12)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return encode(figure, image_format)


def _bar_label(cell: SweepCell | None) -> str:
    if cell is None:
        return ""
    if not cell.finished:
        return "not\nfinished"
    return "none" if cell.goodput is None else f"{cell.goodput:.3g}"


def _draw_throughput(
    task: _Task,
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    best: Mapping[str, Mapping[str, Any] | None],
    image_format: str,
) -> bytes:
    """Output tokens a second against latencies: up and to the left is better, a star is at the goodput."""
    panels = (
        ("p90_ttft_ms", "TTFT, p90, ms", "log", ttft_line_ms(task.targets)),
        ("p90_tpot_ms", "TPOT, p90, ms", "linear", task.targets.tpot_ms),
        # What a mean over the request hides: single long waits while others' prompts are computed.
        ("p99_itl_ms", "ITL, p99, ms", "log", None),
    )
    with plot_style():
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        for axes, (field, label, scale, limit_ms) in zip(figure.subplots(1, 3), panels, strict=True):
            for index, (system, runs) in enumerate(curves.items()):
                colour = COLOURS[index % len(COLOURS)]
                served = [run for run in runs if run[field] is not None]
                latencies, tokens = (
                    [run[field] for run in served],
                    [run["output_throughput"] for run in served],
                )
                axes.plot(latencies, tokens, "o-", color=colour, markersize=3, label=system)
                star = best.get(system)
                if star is not None and star[field] is not None:
                    axes.plot(star[field], star["output_throughput"], "*", color=colour, markersize=12)
            if limit_ms is not None:
                axes.axvline(limit_ms, color=TARGET_COLOUR, linestyle=":", label="target")
            axes.set(xlabel=label, xscale=scale, ylabel="output tokens/s", ylim=(0, None))
            axes.grid(alpha=0.25)
            axes.legend(frameon=False, fontsize=8)
        figure.suptitle(f"{task} (★ at the goodput)")
        return encode(figure, image_format)


def _by_rate(cell: SweepCell) -> list[dict[str, Any]]:
    return sorted(cell.runs, key=lambda run: float(run["request_rate"]))
