"""Pictures of results. matplotlib is an extra: import this module only where a picture is asked for."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from bullet_graph.cli.bench.sweep_runner import Sweep, SweepCell, Task
from bullet_graph.cli.tables import goodput_text
from bullet_graph.perf.explain import IDLE, FloatArray, Occupancy, Window
from bullet_graph.perf.goodput_search import SHARES, Goodput
from bullet_graph.perf.start_report import PhaseName
from bullet_graph.perf.trace import LANES, Trace
from bullet_graph.slo import Slo

if TYPE_CHECKING:
    from bullet_graph.cli.bench.startup import StartRun

COLOURS = ("#1f6f8b", "#d1603d", "#4f9d69", "#7d5ba6", "#e0b13c", "#8c6d46", "#c2649a", "#444444")
TARGET_COLOUR = "#999999"

Runs = Sequence[Mapping[str, Any]]
"""The fields of runs, as their JSON has them."""

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
        name = re.sub(r"[^A-Za-z0-9.]+", "-", str(task).replace(",", "")).strip("-")
        while f"rates_{name}" in pictures:  # two traces differ in characters that are left out
            name += "-2"
        runs = {system: cells[system].runs if system in cells else () for system in systems}
        curves = {system: sorted(runs[system], key=lambda run: run["request_rate"]) for system in systems}
        pictures[f"rates_{name}"] = draw_rates(image_format, curves, title=str(task), slo=Slo.parse(task.slo.split()))
    return {f"{name}.{image_format}": image for name, image in pictures.items()}


@picture
def _draw_goodput(tasks: Mapping[Task, Mapping[str, SweepCell]], systems: Sequence[str], tolerance: float) -> Figure:
    """Goodputs as bars: a group for each workload and targets, a bar for each system, a mark in it for 99 %."""
    figure = Figure(figsize=(max(6.0, 2.0 + 2.4 * len(tasks)), 4.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(systems)
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


# ---- a decision trace ----

DECODE, PREFILL, BOTH, QUEUE = "#1f6f8b", "#d1603d", "#7d5ba6", "#444444"
POLICY_COLOURS = {"solo": "#9aa5b1", "serial": "#8c6d46", "mixed": BOTH, "split": "#4f9d69", IDLE: "#ffffff"}
_UNKNOWN_POLICY = "#c2649a"

# As many as the picture is wide in pixels: where launches are shorter, it shows their mean.
_NUM_BINS = 1600
_MANY_DOTS = 5000


@picture
def draw_timeline(trace: Trace, window: Window) -> Figure:
    """Draw a decision trace; time 0 is its start."""
    occupancy = Occupancy.of(trace.launches)
    edges_s = np.linspace(window.start_s, window.end_s, _NUM_BINS + 1)
    figure = Figure(figsize=(13, 6.8))
    # Room for the legends on the right.
    margins = {"left": 0.055, "right": 0.85, "top": 0.935, "bottom": 0.075, "hspace": 0.09}
    policies, sms, queue = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (0.3, 3, 2.4), **margins})
    _draw_policies(policies, occupancy, edges_s, trace.start_s)
    _draw_sms(sms, occupancy, edges_s, trace)
    _draw_queue(queue, trace, window)
    queue.set(xlabel="s since the trace began", xlim=(window.start_s - trace.start_s, window.end_s - trace.start_s))
    header = trace.header
    figure.suptitle(f"{header.model} on {header.device}, policy {header.policy}, {header.slo}", x=0.055, ha="left")
    return figure


def _draw_policies(axes: Any, occupancy: Occupancy, edges_s: FloatArray, origin_s: float) -> None:
    """A strip coloured by the policy, each as high as its share of the time."""
    policies = {policy: _means(occupancy, weights, edges_s) for policy, weights in occupancy.by_policy().items()}
    colours = [POLICY_COLOURS.get(policy, _UNKNOWN_POLICY) for policy in policies]
    if policies:
        _stack(axes, edges_s - origin_s, policies, colours)
    axes.set(ylim=(0, 1), yticks=[], ylabel="policy")
    axes.yaxis.label.set(rotation=0, ha="right", va="center")
    _legend(1.0, axes)


def _draw_sms(axes: Any, occupancy: Occupancy, edges_s: FloatArray, trace: Trace) -> None:
    # A device that cannot be divided counts as one SM.
    num_sms = trace.header.num_sms
    sms = occupancy.sms(num_sms or 1)
    decodes = np.array([launch.decode_rows > 0 for launch in occupancy.launches], dtype=bool)
    prefills = np.array([launch.prefill_rows > 0 for launch in occupancy.launches], dtype=bool)
    layers, colours = {}, []
    for label, is_kind, colour in (
        ("decode", decodes & ~prefills, DECODE),
        ("mixed forward", decodes & prefills, BOTH),
        ("prefill", prefills & ~decodes, PREFILL),
    ):
        if is_kind.any():
            weights = sum(occupancy.on_lane(lane, sms * is_kind) for lane in LANES)
            layers[label] = _means(occupancy, np.asarray(weights), edges_s)
            colours.append(colour)
    if layers:
        _stack(axes, edges_s - trace.start_s, layers, colours)
    top = float(num_sms or 1)
    axes.axhline(top, color=QUEUE, linewidth=0.8, linestyle=":")
    # Lanes that overlap have more SMs together than there are.
    most = max((float(np.sum(list(layers.values()), axis=0).max()) if layers else 0.0), top)
    axes.set(ylim=(0, most * 1.03), ylabel="SMs (white: idle)" if num_sms else "share of the device")
    # Below the policies, whose legend is higher than their strip.
    _legend(0.5, axes)


def _draw_queue(axes: Any, trace: Trace, window: Window) -> None:
    # The last decision before the window still held when it began.
    before = [d for d in trace.decisions if d.time_s < window.start_s][-1:]
    shown = before + [d for d in trace.decisions if window.holds(d.time_s)]
    times_s = [d.time_s - trace.start_s for d in shown] + [window.end_s - trace.start_s]
    for name, style in (("running", "-"), ("waiting", "--")):
        values = [getattr(d, name) for d in shown]
        values.append(values[-1] if values else 0)
        axes.plot(times_s, values, style, color=QUEUE, linewidth=1, label=name, drawstyle="steps-post")
    axes.set(ylim=(0, None), ylabel="sequences")
    token_s, gap_ms = _token_gaps(trace, window)
    dots = axes.twinx()
    # Thousands of circles would make an SVG slow to open.
    look = {"alpha": 0.35, "linewidths": 0, "rasterized": len(gap_ms) > _MANY_DOTS}
    dots.scatter(token_s, gap_ms, s=3, color=DECODE, label="token gaps", **look)
    limits = sorted({r.tpot_limit_ms for r in trace.requests if r.tpot_limit_ms is not None})
    if len(limits) == 1:
        dots.axhline(limits[0], color=PREFILL, linewidth=0.9, label="TPOT target")
    dots.set(ylim=(0, max(1.05 * gap_ms.max(initial=0.0), *(1.3 * limit for limit in limits[-1:]), 1e-3)))
    dots.set_ylabel("ms between tokens", color=DECODE)
    axes.set_zorder(dots.get_zorder() + 1)
    axes.patch.set_visible(False)
    _legend(1.0, axes, dots)
    axes.grid(axis="x", alpha=0.25)


def _token_gaps(trace: Trace, window: Window) -> tuple[FloatArray, FloatArray]:
    """When each token but its request's first came, in s since the trace's start, and the ms since the one before."""
    times, gaps = [np.zeros(0)], [np.zeros(0)]
    for request in trace.requests:
        at_s = request.arrival_s + np.array(request.token_us[1:]) / 1e6
        inside = (at_s >= window.start_s) & (at_s <= window.end_s)
        times.append(at_s[inside] - trace.start_s)
        gaps.append(np.diff(request.token_us)[inside] / 1e3)
    return np.concatenate(times), np.concatenate(gaps)


def _means(occupancy: Occupancy, weights: FloatArray, edges_s: FloatArray) -> FloatArray:
    return np.asarray(np.diff(occupancy.accumulated(weights, edges_s)) / np.diff(edges_s), dtype=np.float64)


def _stack(axes: Any, edges_s: FloatArray, layers: dict[str, FloatArray], colours: list[str]) -> None:
    last_repeated = [np.append(values, values[-1]) for values in layers.values()]
    axes.stackplot(edges_s, *last_repeated, step="post", labels=list(layers), colors=colours, linewidth=0)


def _legend(at: float, axes: Any, *others: Any) -> None:
    """Right of the axes, where it covers nothing, from this height on; 1 is the top of the axes."""
    pairs = [each.get_legend_handles_labels() for each in (axes, *others)]
    handles, labels = ([entry for part in parts for entry in part] for parts in zip(*pairs, strict=True))
    if handles:
        look = {"frameon": False, "borderaxespad": 0, "markerscale": 4}
        axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.055, at), **look)
