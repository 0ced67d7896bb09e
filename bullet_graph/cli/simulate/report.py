"""What ``bullet-graph simulate`` tells: tables, a picture, and the fields of its JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullet_graph.cli.serving.table import figure, print_serving, usage_rows
from bullet_graph.cli.simulate.run import PolicyRun, RateSearch, Simulator


def report_runs(
    simulator: Simulator, runs: Mapping[str, PolicyRun], *, detailed: bool, quiet: bool
) -> dict[str, Any]:
    """Show the runs side by side unless quiet, and return the JSON's fields: flat for a single run."""
    if not quiet:
        extra = usage_rows([run.stats for run in runs.values()])
        print_serving(_title(simulator), {policy: run.result for policy, run in runs.items()}, extra)
    common = simulator.describe()
    flat = [
        run.result.fields(detailed=detailed)
        | {
            "policy": policy,
            "policy_shares": run.stats.policy_shares,
            "num_steps": run.stats.num_steps,
            "num_preemptions": run.stats.num_preemptions,
            "kv_blocks_peak": run.stats.kv_blocks_peak,
            "kv_blocks_total": run.stats.kv_blocks_total,
        }
        for policy, run in runs.items()
    ]
    return flat[0] | common if len(flat) == 1 else common | {"results": flat}


def report_sweep(
    simulator: Simulator,
    searches: Mapping[str, RateSearch],
    *,
    plot: Path | None,
    detailed: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Show each policy's goodput unless quiet, draw the sweep if asked to, and return the JSON's fields."""
    attainment = simulator.spec.attainment
    if plot is not None:
        _draw(simulator, searches, plot)
    if not quiet:
        console = Console()
        console.print(
            f"{_title(simulator)}: highest rate at which {100 * attainment:g} % of the requests meet all targets",
            markup=False,
            soft_wrap=True,
        )
        console.print(_goodput_table(searches))
        if plot is not None:
            console.print(f"wrote {plot}", markup=False, soft_wrap=True)
    policies = {
        policy: {
            "goodput": search.goodput,
            "results": [result.fields(detailed=detailed) for result in search.results],
        }
        for policy, search in searches.items()
    }
    return simulator.describe() | {"attainment": attainment, "policies": policies}


def _title(simulator: Simulator) -> str:
    device, spec = simulator.device, simulator.spec
    estimate = "" if device.is_measured else ", roofline"
    return f"{spec.config.model} on {device.gpu} (simulated{estimate}), {simulator.workload.name}, {spec.config.slo}"


def _goodput_table(searches: Mapping[str, RateSearch]) -> Table:
    table = Table("policy")
    for name in (
        "requests/s",
        "met, %",
        "TTFT, median / p99, ms",
        "TPOT, median / p99, ms",
        "ITL, p99, ms",
        "runs",
    ):
        table.add_column(name, justify="right")
    for policy, search in searches.items():
        best = next((r.fields() for r in search.results if r.request_rate == search.goodput), None)
        if best is None:
            rate = search.results[0].request_rate
            table.add_row(Text(policy), f"none, down to {rate:.3g}", "", "", "", "", str(len(search.results)))
            continue
        table.add_row(
            Text(policy),
            f"{search.goodput:.2f}",
            f"{100 * (best['slo_attainment'] or 0.0):.1f}",
            f"{figure(best['median_ttft_ms'])} / {figure(best['p99_ttft_ms'])}",
            f"{figure(best['median_tpot_ms'])} / {figure(best['p99_tpot_ms'])}",
            figure(best["p99_itl_ms"]),
            str(len(search.results)),
        )
    return table


def _draw(simulator: Simulator, searches: Mapping[str, RateSearch], path: Path) -> None:
    # matplotlib is an extra.
    from bullet_graph.cli.serving.plot import draw_rates  # noqa: PLC0415

    image = draw_rates(
        {policy: search.results for policy, search in searches.items()},
        title=_title(simulator),
        slo=simulator.spec.config.slo,
        attainment=simulator.spec.attainment,
        image_format=path.suffix[1:].lower(),
    )
    path.write_bytes(image)
