"""Pictures of serving results against the rate of requests."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bullet_graph.perf.replay_metrics import ReplayResult
from bullet_graph.slo import Slo

COLOURS = ("#1f6f8b", "#d1603d", "#4f9d69", "#7d5ba6", "#e0b13c", "#8c6d46", "#c2649a", "#444444")
TARGET_COLOUR = "#999999"

RunFields = ReplayResult | Mapping[str, Any]
"""A run's figures, or the fields that a JSON file has of them."""


def draw_rates(
    curves: Mapping[str, Sequence[RunFields]],
    *,
    title: str,
    slo: Slo,
    attainment: float,
    image_format: str,
    labels: Sequence[str] = ("median", "p99"),
) -> bytes:
    """Attainment, TTFT and TPOT over the request rate, a curve for each policy.

    Args:
        curves: results by the name of the policy or system, at rising finite rates.
        slo: the targets that ``attainment`` counts.
        attainment: the share of requests asked for.
        image_format: ``svg`` or ``png``.
        labels: two of ``mean``, ``median``, ``p90`` and ``p99``: which latencies are drawn.
    """
    with plot_style():
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        shares, ttft, tpot = figure.subplots(1, 3)
        for index, (name, results) in enumerate(curves.items()):
            colour = COLOURS[index % len(COLOURS)]
            runs = [run_fields(result) for result in results]
            rates = [run["request_rate"] for run in runs]
            met = [100 * (run["slo_attainment"] or 0.0) for run in runs]
            shares.plot(rates, met, "o-", color=colour, markersize=3, label=name)
            for axes, field in ((ttft, "ttft"), (tpot, "tpot")):
                for style, label in zip(("o-", "s--"), labels, strict=True):
                    # None, where nothing was served, leaves a gap.
                    values = [run[f"{label}_{field}_ms"] for run in runs]
                    axes.plot(
                        rates, values, style, color=colour, markersize=3, label=label if index == 0 else None
                    )
        shares.axhline(100 * attainment, color=TARGET_COLOUR, linestyle=":")
        shares.set(ylabel="requests that met all targets, %", ylim=(0, 104))
        ttft.set(ylabel="TTFT, ms", yscale="log")
        tpot.set(ylabel="TPOT, ms", ylim=(0, None))
        for axes, limit_ms in ((ttft, ttft_line_ms(slo)), (tpot, slo.tpot_ms)):
            if limit_ms is not None:
                axes.axhline(limit_ms, color=TARGET_COLOUR, linestyle=":", label="target")
        for axes in (shares, ttft, tpot):
            axes.set(xlabel="requests/s")
            axes.grid(alpha=0.25)
            axes.legend(frameon=False, fontsize=8)
        figure.suptitle(title)
        return encode(figure, image_format)


def plot_style() -> AbstractContextManager[None]:
    """The settings that a picture is drawn and encoded under."""
    # The same picture from the same figures: no random ids; and in encode(), no date.
    return matplotlib.rc_context({"svg.hashsalt": "bullet_graph", "font.size": 9.5})


def run_fields(run: RunFields) -> Mapping[str, Any]:
    """A run's flat fields by name."""
    return run.fields() if isinstance(run, ReplayResult) else run


def ttft_line_ms(slo: Slo) -> float | None:
    """Where to draw the target for TTFT, in ms; one that grows with the prompt has no line."""
    return None if slo.ttft_ms_per_token else slo.ttft_ms


def encode(figure: Figure, image_format: str) -> bytes:
    """The picture as the bytes of an ``svg`` or ``png`` file, the same ones for the same figures."""
    image = BytesIO()
    metadata = {"Date": None} if image_format == "svg" else None
    figure.savefig(image, format=image_format, dpi=150, metadata=metadata)
    return image.getvalue()
