"""``bullet-graph explain``: sums up a decision trace in tables, JSON and pictures."""

import json
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from bullet_graph.cli.options import FILE, json_option
from bullet_graph.cli.result_file import check_plot_file, check_result_file, print_json, write_result_file
from bullet_graph.cli.tables import print_line, print_table, table_of
from bullet_graph.errors import ConfigError
from bullet_graph.perf.explain import TraceSummary, Window, summarize_trace, to_chrome_trace
from bullet_graph.perf.trace import Trace, read_trace

_MOST_MISSES_SHOWN = 10
_OUTCOMES = {
    "completed": "completed",
    "met": "met their targets",
    "missed_ttft": "missed TTFT",
    "missed_tpot": "missed TPOT",
    "without_targets": "had no targets",
    "cut_off": "aborted or failed",
}


@click.command()
@click.argument("file", type=FILE)
@json_option
@click.option("--chrome-trace", type=FILE, help="Write it in Chrome's format, for ui.perfetto.dev or chrome://tracing.")
@click.option(
    "--timeline", type=FILE, help="Draw SMs, policies, queue and times between tokens; the name ends in .svg or .png."
)
@click.option("--overwrite", is_flag=True, help="Replace existing files of --chrome-trace and --timeline.")
@click.option("--from", "from_s", type=float, metavar="S", help="Start at this second of the trace.")
@click.option("--to", "to_s", type=float, metavar="S", help="End at this second of the trace.")
def explain(
    file: Path,
    as_json: bool,
    chrome_trace: Path | None,
    timeline: Path | None,
    overwrite: bool,
    from_s: float | None,
    to_s: float | None,
) -> None:
    """Sum up a decision trace: time by policy, prediction errors, and why requests missed their targets.

    FILE is what --trace-decisions wrote.

    \b
    Examples:
      bullet-graph explain decisions.jsonl
      bullet-graph explain decisions.jsonl --timeline decisions.svg --from 10 --to 12
      bullet-graph explain decisions.jsonl --json --chrome-trace perfetto.json
    """
    check_result_file(chrome_trace, overwrite=overwrite, option="--chrome-trace")
    check_plot_file(timeline, overwrite=overwrite, option="--timeline")
    trace = read_trace(file)
    window = _window(trace, from_s, to_s)
    summary = summarize_trace(trace, window)
    if timeline is not None:
        if window.start_s == window.end_s:
            raise ConfigError("--timeline needs a trace with events, but this one has none: trace a run with requests")
        # matplotlib is an extra.
        from bullet_graph.cli.plots import draw_timeline  # noqa: PLC0415

        write_result_file(timeline, draw_timeline(timeline.suffix[1:].lower(), trace, window))
    if chrome_trace is not None:
        events = to_chrome_trace(trace, window)
        write_result_file(chrome_trace, json.dumps(events, separators=(",", ":"), allow_nan=False))
    if as_json:
        print_json(summary)
    else:
        _print(summary)
        for path in filter(None, (chrome_trace, timeline)):
            print_line(f"wrote {path}")


def _window(trace: Trace, from_s: float | None, to_s: float | None) -> Window:
    length_s = trace.end_s - trace.start_s
    first_s = 0.0 if from_s is None else from_s
    last_s = length_s if to_s is None else to_s
    # A trace without events has no length, and all of it may be asked for.
    if not ((0 <= first_s < last_s and first_s <= length_s) or first_s == last_s == length_s == 0):
        raise ConfigError(
            f"--from must be at least 0, less than --to and within the trace, but they are {first_s:g} and {last_s:g}, "
            f"and the trace is {length_s:g} s long"
        )
    return Window(trace.start_s + first_s, trace.end_s if last_s >= length_s else trace.start_s + last_s)


def _print(summary: TraceSummary) -> None:
    header = summary.header
    print_line(f"{header.model} on {header.device}, policy {header.policy}, {header.slo}")
    for table in _tables(summary):
        if table.row_count:
            print_table(table)
    if len(summary.misses) > _MOST_MISSES_SHOWN:
        print_line(f"… and {len(summary.misses) - _MOST_MISSES_SHOWN:,} more (all are in the JSON)")
    for note in summary.notes:
        print_line(f"note: {note}", style="yellow")


def _tables(summary: TraceSummary) -> list[Table]:
    lanes = summary.lanes
    run = table_of("run", "")
    run.add_row("time", f"{summary.duration_s:,.3f} s")
    run.add_row("launches", f"{summary.num_launches:,}")
    run.add_row("plans made", f"{summary.num_decisions:,}")
    if summary.num_infeasible:
        run.add_row("… no option could hold TPOT", f"{summary.num_infeasible:,}")
    run.add_row("decode lane busy", _percent(lanes["decode"]))
    run.add_row("prefill lane busy", _percent(lanes["prefill"]))
    run.add_row("both lanes busy", _percent(lanes["both"]))
    run.add_row("device idle", _percent(lanes["idle"]))
    if summary.cached_tokens:
        run.add_row("prompt tokens in the prefix cache", _percent(summary.cached_tokens / summary.prompt_tokens))

    policies = table_of("policy", "launches", "of device time", "of time passed")
    for share in summary.policies:
        policies.add_row(
            Text(share.policy), f"{share.num_launches:,}", _percent(share.device_share), _percent(share.wall_share)
        )
    bounds = table_of("decided by", "plans", "of all")
    for bound, count in summary.bounds.items():
        bounds.add_row(Text(bound), f"{count:,}", _percent(count / summary.num_decisions))
    errors = table_of("prediction error", "launches", "median", "p90", "bias")
    for error in summary.errors:
        errors.add_row(
            Text(f"{error.policy}, {error.lane} lane, up to {error.most_rows:,} rows"),
            f"{error.num_launches:,}",
            f"{error.median_percent:.1f} %",
            f"{error.p90_percent:.1f} %",
            f"{error.bias_percent:+.1f} %",
        )
    fared = table_of("requests", "")
    for name, label in _OUTCOMES.items():
        if summary.requests[name] or name == "completed":
            fared.add_row(label, f"{summary.requests[name]:,}")
    causes = table_of("why targets were missed", "misses")
    for cause, count in summary.causes.items():
        causes.add_row(Text(cause), f"{count:,}")
    misses = table_of("worst misses", "target", "ms", "limit, ms", "why")
    misses.columns[0].overflow, misses.columns[-1].justify = "fold", "left"
    for miss in summary.misses[:_MOST_MISSES_SHOWN]:
        misses.add_row(
            Text(miss.request_id),
            miss.target.upper(),
            f"{miss.measured_ms:,.1f}",
            f"{miss.limit_ms:,.1f}",
            Text(", ".join(f"{cause} {_percent(share)}" for cause, share in miss.shares.items())),
        )
    return [run, policies, bounds, errors, fared, causes, misses]


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")
