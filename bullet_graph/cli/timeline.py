"""A picture of a decision trace: SMs by lane, the policy, the queue and the gaps between tokens, over time."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bullet_graph.cli.plots import picture
from bullet_graph.perf.explain import IDLE, FloatArray, Occupancy, Window
from bullet_graph.perf.trace import LANES, Trace

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
