"""What ``bullet-graph bench online`` tells: a table, and the fields of its JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from bullet_graph.cli.bench.online import OnlineRun
from bullet_graph.cli.bench.online_policies import OnlineComparison
from bullet_graph.cli.serving.table import figure, print_serving, usage_rows

# Of the engine and not of a run: a run's own are OnlineRun's.
_COMMON = ("model", "load_format", "dtype", "seed", "engine", "start", "provenance")


def comparison_fields(comparison: OnlineComparison, *, detailed: bool) -> dict[str, Any]:
    """The JSON's fields: flat for one policy; for several, ``results`` holds what differs between them."""
    record = dataclasses.asdict(comparison.record)
    common = {name: record[name] for name in _COMMON}
    common |= {"trace": comparison.trace, "partitions": comparison.partitions}
    results = [run.fields(detailed=detailed) for run in comparison.runs]
    return results[0] | common if len(results) == 1 else common | {"results": results}


def print_comparison(comparison: OnlineComparison) -> None:
    """Show the runs side by side on stdout, a column for each policy."""
    runs, record = comparison.runs, comparison.record
    print_serving(
        f"{record.model}, {record.dtype}, on {record.provenance.device_name}: {comparison.trace}, {runs[0].slo}",
        {str(run.policy): run.result for run in runs},
        _extra_rows(runs),
    )


def _extra_rows(runs: Sequence[OnlineRun]) -> dict[str, list[str]]:
    """A text for each run by the row's label; – where a run has no such figure."""
    rows = {"steps": [f"{run.num_steps:,}" for run in runs]} | usage_rows(runs)
    for label, field in (("power, mean, W", "power_w"), ("SM clock, mean, MHz", "sm_clock_mhz")):
        ranges = [getattr(run.device, field) for run in runs]
        rows[label] = ["–" if values is None else f"{values.mean:,.0f}" for values in ranges]
    rows["J an output token"] = [figure(run.joules_per_output_token, 3) for run in runs]
    return rows
