"""Serving results for people: a column a run."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullet_graph.perf.replay_metrics import ReplayResult

_LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "e2e": "e2el"}
_LABELS = ("median", "p90", "p99")
_MOST_REASONS_SHOWN = 3


class Usage(Protocol):
    """Counters of one run; :class:`~bullet_graph.engine.output.EngineStats` has them."""

    @property
    def num_preemptions(self) -> int: ...
    @property
    def kv_blocks_peak(self) -> int: ...
    @property
    def kv_blocks_total(self) -> int: ...
    @property
    def policy_shares(self) -> Mapping[str, float]: ...


def usage_rows(runs: Sequence[Usage]) -> dict[str, list[str]]:
    """A text for each run by the row's label; – where a run spent no time in a policy."""
    rows = {
        "preemptions": [f"{run.num_preemptions:,}" for run in runs],
        "KV blocks, peak, %": [f"{100 * run.kv_blocks_peak / run.kv_blocks_total:.1f}" for run in runs],
    }
    shares = [run.policy_shares for run in runs]
    for policy in sorted({policy for share in shares for policy in share}):
        rows[f"device time in {policy}, %"] = [
            f"{100 * share[policy]:.1f}" if policy in share else "–" for share in shares
        ]
    return rows


def print_serving(
    title: str, results: Mapping[str, ReplayResult], extra: Mapping[str, Sequence[str]]
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
    add("requests/s", [figure(run.request_throughput, 2) for run in runs])
    add("… that met all targets", [figure(run.request_goodput, 2) for run in runs])
    add("met all targets, %", [figure(_percent(run.slo_attainment), 1) for run in runs])
    add("output tokens/s", [figure(run.output_throughput, 0) for run in runs])
    add("total tokens/s", [figure(run.total_token_throughput, 0) for run in runs])
    for name, field in _LATENCIES.items():
        for label in _LABELS:
            add(f"{name}, {label}, ms", [figure(run.fields()[f"{label}_{field}_ms"], 2) for run in runs])
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


def figure(value: float | None, decimals: int = 1) -> str:
    """A number as text; – for None."""
    return "–" if value is None else f"{value:,.{decimals}f}"
