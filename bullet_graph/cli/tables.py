"""Results as tables for people, from the fields that their JSON has."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from bullet_graph.cli.result_file import Output
from bullet_graph.engine.output import EngineStats
from bullet_graph.perf.goodput_search import LEAST_REQUESTS, LEAST_SECONDS, SHARES, Goodput, RateRun
from bullet_graph.perf.metrics import ReplayResult

_LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "e2e": "e2el"}
COUNTERS = ("num_steps", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
_MOST_REASONS_SHOWN = 3
_NONE = "–"

Fields = Mapping[str, Any]


def figure(value: float | None, decimals: int = 1) -> str:
    """A number as text; – for None."""
    return _NONE if value is None else f"{value:,.{decimals}f}"


def table_of(*columns: str, title: str | None = None) -> Table:
    """A table of numbers, with their names in the first column."""
    table = Table(title=None if title is None else Text(title), title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left")
    return table


def table_of_texts(*columns: str, rows: Iterable[Sequence[str]], title: str, show_header: bool = True) -> Table:
    """A table of texts, none of which is markup; long ones are folded, but not the first of a row."""
    headers = [Column(column, no_wrap=not index, overflow="fold") for index, column in enumerate(columns)]
    table = Table(*headers, title=Text(title), title_justify="left", show_header=show_header)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_line(text: str, style: str | None = None) -> None:
    """Print a line on stdout, unwrapped and without markup."""
    Console().print(text, markup=False, emoji=False, highlight=False, soft_wrap=True, style=style)


def print_table(table: Table) -> None:
    """Print a table on stdout."""
    Console().print(table)


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One replay, of an engine, a server or a simulation; ``usage`` has fields that only the system knows."""

    result: ReplayResult
    usage: Fields

    def fields(self, *, detailed: bool = False) -> dict[str, Any]:
        """The figures for a JSON file; ``detailed`` adds those of each request."""
        return self.result.fields(detailed=detailed) | dict(self.usage)


def counters(stats: EngineStats) -> dict[str, Any]:
    """An engine's counters, as replays report them."""
    return {name: getattr(stats, name) for name in ("policy_shares", *COUNTERS, "kv_blocks_peak", "kv_blocks_total")}


def emit_replays(title: str, runs: Mapping[str, ReplayRun], common: Fields, output: Output, *, detailed: bool) -> None:
    """Write and print replays of the same requests, by name; ``detailed`` adds the figures of each request to the JSON.

    The fields of a single one are beside those that all ``common`` share; those of several go into a list ``results``.
    """
    fields = [run.fields(detailed=detailed) for run in runs.values()]
    whole = {**fields[0], **common} if len(fields) == 1 else {**common, "results": fields}
    output.emit(whole, lambda: print_replays(title, runs))


def print_replays(title: str, named: Mapping[str, ReplayRun]) -> None:
    """Show replays of the same requests side by side on stdout, without the rows that none has a figure for."""
    runs = {name: run.fields() for name, run in named.items()}
    table = table_of("", *runs)

    def add(label: str, values: Iterable[float | None], decimals: int = 0) -> None:
        texts = [figure(value, decimals) for value in values]
        if any(text != _NONE for text in texts):
            table.add_row(label, *texts)

    def of(field: str, factor: float = 1.0) -> list[float | None]:
        return [None if value is None else factor * value for value in (run.get(field) for run in runs.values())]

    add("duration, s", of("duration"), 2)
    table.add_row("requests done / failed", *[f"{run['completed']:,} / {run['failed']:,}" for run in runs.values()])
    tokens = [f"{run['total_input_tokens']:,} / {run['total_output_tokens']:,}" for run in runs.values()]
    table.add_row("tokens in / out", *tokens)
    add("requests/s", of("request_throughput"), 2)
    add("… that met all targets", of("request_goodput"), 2)
    add("met all targets, %", of("slo_attainment", 100), 1)
    add("output tokens/s", of("output_throughput"))
    add("total tokens/s", of("total_token_throughput"))
    for name, field in _LATENCIES.items():
        for label in ("median", "p90", "p99"):
            add(f"{name}, {label}, ms", of(f"{label}_{field}_ms"), 2)
    add("steps", of("num_steps"))
    add("preemptions", of("num_preemptions"))
    hits = zip(of("prefix_cache_hits", 100), of("prefix_cache_queries"), strict=True)
    add("prompt tokens in the prefix cache, %", [hit / asked if hit and asked else None for hit, asked in hits], 1)
    blocks = zip(of("kv_blocks_peak", 100), of("kv_blocks_total"), strict=True)
    add("KV blocks, peak, %", [None if not total else (peak or 0.0) / total for peak, total in blocks], 1)
    shares = [run.get("policy_shares") or {} for run in runs.values()]
    for policy in sorted({policy for share in shares for policy in share}):
        add(f"device time in {policy}, %", [100 * share[policy] if policy in share else None for share in shares], 1)
    for label, field in (("power, mean, W", "power_w"), ("SM clock, mean, MHz", "sm_clock_mhz")):
        add(label, [mean_of(run.get("device"), field) for run in runs.values()])
    add("energy, J", of("energy_joules"))
    add("J an output token", of("joules_per_output_token"), 3)
    print_line(title)
    print_table(table)
    # The runs refuse the same requests.
    errors = next(iter(named.values())).result.errors
    failed = [f"request {index} failed: {reason}" for index, reason in enumerate(errors) if reason]
    for line in failed[:_MOST_REASONS_SHOWN]:
        print_line(line, style="red")
    if len(failed) > _MOST_REASONS_SHOWN:
        print_line(f"… and {len(failed) - _MOST_REASONS_SHOWN:,} more (the JSON has them)")


def mean_of(device: Fields | None, field: str) -> float | None:
    """The mean of a range in a device report's fields; None where it has none."""
    values = (device or {}).get(field)
    return None if values is None else values["mean"]


def goodput_text(goodput: Goodput, tolerance: float, form: str) -> str:
    """A goodput; ``≥``: it may be higher by more than the relative ``tolerance``; ``<``: no rate was low enough."""
    rate, below = goodput
    if rate is None:
        return _NONE if below is None else f"< {below:{form}}"
    return f"{'' if below is not None and below <= rate * (1 + tolerance) else '≥ '}{rate:{form}}"


def fastest_run(runs: Sequence[Fields], rate: float | None) -> Fields | None:
    """The run at the highest rate up to this one; None: there is none."""
    slower = [run for run in runs if rate is not None and run["request_rate"] <= rate]
    return max(slower, key=lambda run: float(run["request_rate"]), default=None)


def goodput_table(title: str | None, cells: Mapping[str, Sequence[Fields]], tolerance: float) -> Table:
    """The goodputs that the runs of each system or policy tell of, as :func:`goodput_text` shows them: a row for each.

    Goodputs are in requests per second; beside each is TTFT in the fastest run at or below it.
    """
    shows_energy = any(run.get("joules_per_token") is not None for runs in cells.values() for run in runs)
    columns = [text for share in SHARES for text in (f"goodput_{100 * share:.0f}", "TTFT, p99 / max, ms")]
    table = table_of("policy", *columns, *["J/token"] * shows_energy, "runs", "unstable", title=title)
    table.columns[0].no_wrap = True
    for name, runs in cells.items():
        row: list[str] = []
        points = [RateRun.of(run) for run in runs]
        goodputs = [Goodput.of(points, share) for share in SHARES]
        for goodput in goodputs:
            best = fastest_run(runs, goodput.rate) or {}
            ttft = " / ".join(figure(best.get(f"{label}_ttft_ms"), 0) for label in ("p99", "max"))
            row += [goodput_text(goodput, tolerance, ".2f"), ttft]
        if shows_energy:
            row.append(figure((fastest_run(runs, goodputs[0].rate) or {}).get("joules_per_token"), 3))
        table.add_row(Text(name), *row, str(len(runs)), str(sum(not point.stable for point in points)))
    if not all(run["sustained"] for runs in cells.values() for run in runs):
        table.caption = f"Not sustained: runs of less than {LEAST_SECONDS} s or {LEAST_REQUESTS} requests."
    return table
