"""The simulator held against the GPU: the same requests, arrivals, policies and targets, from the measured table alone.

    python bench/simulation_error.py RUNS.json --output-json bench/results/h200/simulation_error.json

Each serving run in a file of `bench/join_runs.py` is simulated again; the error of the medians of TTFT and TPOT is
told for each.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bullet_graph._version import __version__
from bullet_graph.cli.simulate.run import SimulationSpec, Simulator
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.slo import Slo

FIELDS = ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "slo_attainment", "request_goodput")


def simulated(run: dict[str, Any], gpu: str) -> dict[str, Any]:
    """The same run in virtual time."""
    trace, num_prompts, rate, *targets = run["setting"].split()
    config = EngineConfig(
        model=run["model_id"], max_num_seqs=512, max_model_len=16384, seed=run["seed"], slo=Slo.parse(targets)
    )
    spec = SimulationSpec(
        gpu=gpu,
        config=config,
        policies=(Policy.parse(run["policy"]),),
        trace=trace,
        num_prompts=int(num_prompts),
        request_rate=float(rate),
        time_scale=1.0,
        burstiness=1.0,
        max_concurrency=None,
        host_overhead_ms=0.2,
        attainment=0.9,
    )
    return Simulator(spec).run(Policy.parse(run["policy"]), float(rate)).result.fields()


@click.command()
@click.argument("policies_json", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--gpu", default="h200", show_default=True, help="As `bullet-graph simulate` takes it.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(policies_json: Path, gpu: str, output_json: Path) -> None:
    """Compare and write the errors as JSON."""
    reports = json.loads(policies_json.read_text(encoding="utf-8"))["runs"]
    runs = [run for report in reports for run in report["serving"]]
    compared: list[dict[str, Any]] = []
    table = Table(
        "setting", "policy", "TTFT p50 real / simulated", "error", "TPOT p50 real / simulated", "error"
    )
    for run in runs:
        predicted = simulated(run, gpu)
        errors = {name: predicted[name] / run[name] - 1 for name in ("median_ttft_ms", "median_tpot_ms")}
        compared.append(
            {
                "setting": run["setting"],
                "policy": run["policy"],
                "measured": {name: run[name] for name in FIELDS},
                "simulated": {name: predicted[name] for name in FIELDS},
                "error": errors,
            }
        )
        table.add_row(
            run["setting"],
            run["policy"],
            *(
                cell
                for name in errors
                for cell in (f"{run[name]:.1f} / {predicted[name]:.1f} ms", f"{100 * errors[name]:+.0f} %")
            ),
        )
    summary = {
        name: {
            "median_absolute": statistics.median(abs(c["error"][name]) for c in compared),
            "within_15_percent": sum(abs(c["error"][name]) <= 0.15 for c in compared),
            "of": len(compared),
        }
        for name in ("median_ttft_ms", "median_tpot_ms")
    }
    Console(width=150).print(table)
    for name, told in summary.items():
        click.echo(
            f"{name}: median error {100 * told['median_absolute']:.0f} %, "
            f"{told['within_15_percent']} of {told['of']} within 15 %"
        )
    report = {
        "version": __version__,
        "gpu": gpu,
        "measured_by": policies_json.name,
        "summary": summary,
        "runs": compared,
    }
    output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
