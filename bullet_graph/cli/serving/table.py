"""Serving results for people: a column a run."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullet_graph.perf.serving import ServingResult

_LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "e2e": "e2el"}
_LABELS = ("median", "p90", "p99")
_MOST_REASONS_SHOWN = 3


def print_serving(
    title: str, results: Mapping[str, ServingResult], extra: Mapping[str, Sequence[str]]
) -> None:
    """Show results side by side on stdout.

    Args:
        results: by the name of the run, in columns.
        extra: further rows by label, a text for each result.
    """
    table = Table("")
    for name in results:
        table.add_column(Text(name), justify="right")
    runs = tuple(results.values())

    def add(label: str, values: Sequence[str]) -> None:
        if any(value != "–" for value in values):
            table.add_row(label, *values)

    add("duration, s", [f"{run.duration:,.2f}" for run in runs])
    add("requests done / failed", [f"{run.completed:,} / {run.failed:,}" for run in runs])
    add("requests/s", [_number(run.request_throughput, 2) for run in runs])
    add("… that met all targets", [_number(run.request_goodput, 2) for run in runs])
    add("met all targets, %", [_number(_percent(run.slo_attainment), 1) for run in runs])
    add("output tokens/s", [_number(run.output_throughput, 0) for run in runs])
    add("total tokens/s", [_number(run.total_token_throughput, 0) for run in runs])
    for name, field in _LATENCIES.items():
        for label in _LABELS:
            add(f"{name}, {label}, ms", [_number(getattr(run, f"{label}_{field}_ms"), 2) for run in runs])
    for label, values in extra.items():
        add(label, values)
    console = Console()
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)
    # The runs are given the same requests, so they refuse the same.
    reasons = [(i, reason) for i, reason in enumerate(runs[0].details.errors) if reason]
    for index, reason in reasons[:_MOST_REASONS_SHOWN]:
        console.print(f"request {index} failed: {reason}", style="red", markup=False, soft_wrap=True)
    if len(reasons) > _MOST_REASONS_SHOWN:
        console.print(f"… and {len(reasons) - _MOST_REASONS_SHOWN:,} more")


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _number(value: float | None, decimals: int) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"
