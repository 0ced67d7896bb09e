"""A comparison's runs for people: a row a run."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullet_graph.cli.bench.sweep_file import Sweep
from bullet_graph.cli.serving.table import figure

_LEAST_WIDTH = 160
_COLUMNS = (
    "at, requests/s",
    "system",
    "met all targets, %",
    "requests/s",
    "output tokens/s",
    "TTFT, median / p90, ms",
    "TPOT, median / p90, ms",
    "ITL, p99, ms",
    "failed",
    "J/token",
    "W",
)


def print_runs(sweep: Sweep) -> None:
    """Show all runs on stdout: by workload, then rate, systems side by side."""
    # Columns too narrow to read help nobody: a file, or a narrow terminal, gets long lines.
    console = Console(width=max(Console().width, _LEAST_WIDTH))
    loads = dict.fromkeys((cell.key.workload, cell.key.num_prompts, cell.key.slo) for cell in sweep.cells)
    for load in loads:
        workload, num_prompts, slo = load
        table = Table(title=f"{workload} × {num_prompts:,}, {slo}", title_justify="left")
        for name in _COLUMNS:
            is_system = name == "system"
            table.add_column(name, justify="left" if is_system else "right", no_wrap=is_system)
        cells = [
            cell for cell in sweep.cells if (cell.key.workload, cell.key.num_prompts, cell.key.slo) == load
        ]
        runs = [(run, cell.key.system) for cell in cells for run in cell.runs]
        for rate in sorted({run["request_rate"] for run, _ in runs}):
            for run, system in runs:
                if run["request_rate"] == rate:
                    table.add_row(*_row(run, system))
            table.add_section()
        console.print(table)


def _row(run: Mapping[str, Any], system: str) -> list[str | Text]:
    power = run["device"]["power_w"]
    return [
        "all at once" if run["all_at_once"] else f"{run['request_rate']:.4g}",
        Text(system),
        f"{100 * run['slo_attainment']:.1f}",
        figure(run["request_throughput"], 2),
        figure(run["output_throughput"], 0),
        f"{figure(run['median_ttft_ms'])} / {figure(run['p90_ttft_ms'])}",
        f"{figure(run['median_tpot_ms'])} / {figure(run['p90_tpot_ms'])}",
        figure(run["p99_itl_ms"]),
        f"{run['failed']:,}",
        figure(run["joules_per_token"], 3),
        figure(power["mean"] if power else None, 0),
    ]
