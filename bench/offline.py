"""Offline figures of one GPU: decode steps of single batches, and both Azure traces under policies without lanes.

    python -m bench.offline --output-json bench/results/h200/offline.json

Each measurement is a `bullet-graph bench` command in a process of its own, so that none inherits memory or compiled
kernels. `--repeats` runs the whole list again, which interleaves what is compared.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

LATENCY = (
    "latency --model {model} --max-model-len 8192 --input-len 968 --output-len 64 --num-iters 3 --num-iters-warmup 1"
)
THROUGHPUT = "throughput --model {model} --max-model-len 20000"

# Contexts run from 968 to 1,032 tokens: 1,000 on average over the decode steps.
MEASUREMENTS = (
    *(f"{LATENCY} --batch-size {batch_size}" for batch_size in (1, 8, 64, 256)),
    *(
        f"{THROUGHPUT} --trace {trace} --policy {policy}"
        for trace in ("azure:conv --num-prompts 600", "azure:code --num-prompts 400")
        for policy in ("serial", "mixed:2048", "mixed:8192")
    ),
)


def measure(arguments: str) -> dict[str, Any]:
    """Run one command and return its result, the command itself first.

    Raises:
        subprocess.CalledProcessError: the command failed; its messages have been shown.
    """
    command = f"bullet-graph bench {arguments} --json"
    process = subprocess.run(
        [sys.executable, "-m", "bullet_graph", *shlex.split(command)[1:]], check=True, stdout=subprocess.PIPE
    )
    return {"command": command, **json.loads(process.stdout)}


@click.command()
@click.option("--model", default="llama-3.1-8b", show_default=True)
@click.option("--only", default="", help="Run the measurements whose command contains this text.")
@click.option("--repeats", default=1, show_default=True)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(model: str, only: str, repeats: int, output_json: Path) -> None:
    """Run all measurements and write their results as one JSON list."""
    selected = [m.format(model=model) for m in MEASUREMENTS if only in m]
    results = []
    for arguments in selected * repeats:
        click.echo(f"bullet-graph bench {arguments}", err=True)
        results.append(measure(arguments))
        # Written after each, so that a run that is cut short keeps what it has.
        output_json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = Table("measurement", "result", "SM clock MHz", "W")
    for result in results:
        device = result["device"]
        if "decode_step_ms" in result:
            label = f"decode step, batch {result['batch_size']}"
            figure = f"{result['decode_step_ms']['p50']:.3f} ms, {result['share_of_copy_percent']:.1f} % of copy"
        else:
            label = f"{result['trace']}, {result['policy']}"
            figure = f"{result['elapsed_time']:.2f} s, {result['tokens_per_second']:,.0f} tok/s"
        means = [device[name] and f"{device[name]['mean']:.0f}" for name in ("sm_clock_mhz", "power_w")]
        table.add_row(label, figure, *means)
    Console().print(table)


if __name__ == "__main__":
    main()
