"""A picture of serving results against the rate of requests."""

from collections.abc import Mapping, Sequence
from io import BytesIO

import matplotlib
from matplotlib.figure import Figure

from bullet_graph.perf.serving import ServingResult
from bullet_graph.slo import Slo

_COLOURS = ("#1f6f8b", "#d1603d", "#4f9d69", "#7d5ba6", "#e0b13c", "#8c6d46", "#c2649a", "#444444")
_TARGET = "#999999"


def draw_rates(
    curves: Mapping[str, Sequence[ServingResult]],
    *,
    title: str,
    slo: Slo,
    attainment: float,
    image_format: str,
) -> bytes:
    """Attainment, TTFT and TPOT over the request rate, a curve for each arm.

    Args:
        curves: results by the name of the arm, at rising finite rates.
        slo: the targets that ``attainment`` counts.
        attainment: the share of requests asked for.
        image_format: ``svg`` or ``png``.
    """
    # The same picture from the same figures: no date, no random ids.
    with matplotlib.rc_context({"svg.hashsalt": "bullet_graph", "font.size": 9.5}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        shares, ttft, tpot = figure.subplots(1, 3)
        for index, (name, results) in enumerate(curves.items()):
            colour = _COLOURS[index % len(_COLOURS)]
            rates = [result.request_rate for result in results]
            met = [100 * (result.slo_attainment or 0.0) for result in results]
            shares.plot(rates, met, "o-", color=colour, markersize=3, label=name)
            for axes, field in ((ttft, "ttft"), (tpot, "tpot")):
                for style, label in (("o-", "median"), ("s--", "p99")):
                    # None, where nothing was served, leaves a gap.
                    values = [getattr(result, f"{label}_{field}_ms") for result in results]
                    axes.plot(
                        rates, values, style, color=colour, markersize=3, label=label if index == 0 else None
                    )
        shares.axhline(100 * attainment, color=_TARGET, linestyle=":")
        shares.set(ylabel="requests that met all targets, %", ylim=(0, 104))
        ttft.set(ylabel="TTFT, ms", yscale="log")
        tpot.set(ylabel="TPOT, ms", ylim=(0, None))
        # A target that grows with the prompt has no line.
        for axes, limit_ms in ((ttft, None if slo.ttft_ms_per_token else slo.ttft_ms), (tpot, slo.tpot_ms)):
            if limit_ms is not None:
                axes.axhline(limit_ms, color=_TARGET, linestyle=":", label="target")
        for axes in (shares, ttft, tpot):
            axes.set(xlabel="requests/s")
            axes.grid(alpha=0.25)
            axes.legend(frameon=False, fontsize=8)
        figure.suptitle(title)
        image = BytesIO()
        metadata = {"Date": None} if image_format == "svg" else None
        figure.savefig(image, format=image_format, dpi=150, metadata=metadata)
    return image.getvalue()
