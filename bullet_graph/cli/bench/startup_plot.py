"""A picture of starts: the phases of each policy as bars over time."""

from matplotlib.figure import Figure

from bullet_graph.cli.bench.startup import StartRun, StartupResult
from bullet_graph.cli.serving.plot import COLOURS, TARGET_COLOUR, encode, plot_style


def draw_startup(result: StartupResult, image_format: str) -> bytes:
    """The start of each policy whose time is the median; the same bytes for the same figures.

    Args:
        image_format: ``svg`` or ``png``.
    """
    chosen = {policy: _median(runs) for policy, runs in result.runs.items()}
    names = result.phase_names
    with plot_style():
        figure = Figure(figsize=(9, 0.8 + (0.5 + 0.28 * len(names)) * len(chosen)), layout="constrained")
        panels = figure.subplots(len(chosen), 1, squeeze=False)[:, 0]
        for axes, (policy, run) in zip(panels, chosen.items(), strict=True):
            for row, name in enumerate(names):
                stretches = [(p.start_s, p.end_s - p.start_s) for p in run.phases if p.name == name]
                axes.broken_barh(stretches, (row - 0.4, 0.8), color=COLOURS[row % len(COLOURS)])
                if stretches:
                    start_s, length_s = stretches[-1]
                    axes.text(
                        start_s + length_s, row, f" {run.seconds[name]:.2f} s", va="center", fontsize=7.5
                    )
            axes.axvline(run.startup_s, color=TARGET_COLOUR, linestyle=":")
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.set(xlim=(0, 1.12 * run.first_token_s))
            axes.set_title(f"{policy}: ready after {run.startup_s:.2f} s", loc="left", fontsize=9.5)
            axes.grid(axis="x", alpha=0.25)
            axes.set_axisbelow(True)
        panels[-1].set(xlabel="seconds since the process was started")
        figure.suptitle(f"{result.model}, {result.dtype}, on {result.provenance.device_name}")
        return encode(figure, image_format)


def _median(runs: tuple[StartRun, ...]) -> StartRun:
    return sorted(runs, key=lambda run: run.startup_s)[(len(runs) - 1) // 2]
