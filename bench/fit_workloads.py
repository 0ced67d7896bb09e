"""Fit the synthetic workloads ``conv`` and ``code`` to the full Azure LLM inference traces of 2023.

    python -m bench.fit_workloads AzureLLMInferenceTrace_conv.csv AzureLLMInferenceTrace_code.csv

It writes ``bullet_graph/workloads/data/azure_lengths.json`` and prints how far samples of the tables are from
the traces. The traces are in the public data set Azure/AzurePublicDataset.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from bench.record import Tool
from bullet_graph.cli.options import FILE
from bullet_graph.workloads import WorkloadRequest, load_workload
from bullet_graph.workloads.synthetic import LengthTables

DATA = Path(__file__).resolve().parent.parent / "bullet_graph" / "workloads" / "data"

# Every 5 %, closer towards the ends: between two quantiles the interpolation is log-linear, and in a tail
# as long as that of the code trace's outputs one wide step would add 45 % to the mean.
PROBABILITIES = (
    *(0.0, 0.01, 0.02, 0.05),
    *(round(0.05 * step, 2) for step in range(2, 19)),
    *(0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0),
)

# Ten: enough for the conv trace's bends, and few enough that each share of the code trace has hundreds of
# requests behind its upper quantiles.
NUM_SHARES = 10


@click.command(cls=Tool)
@click.argument("conv", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("code", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=FILE, default=DATA / "azure_lengths.json", help="Where the tables go.")
def main(conv: Path, code: Path, output: Path) -> None:
    tables = {}
    for name, path in (("conv", conv), ("code", code)):
        requests = load_workload(str(path), num_requests=None).requests
        tables[name] = fit(requests, PROBABILITIES, NUM_SHARES)
        recorded = np.array([(request.prompt_tokens, request.output_tokens) for request in requests])
        sampled = tables[name].lengths(np.random.default_rng(0).random((200_000, 2)))
        click.echo(f"{name}: {len(requests)} requests")
        for label, lengths in (("trace", recorded), ("tables", sampled)):
            click.echo(f"  {label:7}{describe(lengths)}")
    output.write_text(format_json({name: asdict(table) for name, table in tables.items()}), encoding="utf-8")
    click.echo(f"wrote {output}")


def fit(requests: Sequence[WorkloadRequest], probabilities: Sequence[float], num_shares: int) -> LengthTables:
    """Measure the tables of at least ``num_shares`` recorded requests."""
    lengths = np.array([(request.prompt_tokens, request.output_tokens) for request in requests])
    by_prompt = lengths[np.argsort(lengths[:, 0], kind="stable")]
    prompts, *shares = (
        tuple(np.rint(np.quantile(column, probabilities)).astype(np.int64).tolist())
        for column in (lengths[:, 0], *np.array_split(by_prompt[:, 1], num_shares))
    )
    return LengthTables(tuple(probabilities), prompts, tuple(shares))


def describe(lengths: npt.NDArray[np.int64]) -> str:
    """Mean and percentiles of both lengths, and the mean of their product (int64 [num_requests, 2] in)."""
    parts = []
    for name, column in zip(("prompt", "output"), lengths.T, strict=True):
        p50, p90, p99 = np.percentile(column, (50, 90, 99))
        parts.append(f"{name} mean {column.mean():.1f} p50 {p50:.0f} p90 {p90:.0f} p99 {p99:.0f}")
    return "; ".join([*parts, f"prompt x output mean {lengths.prod(axis=1).mean():.0f}"])


def format_json(tables: dict[str, dict[str, list[object]]]) -> str:
    """JSON with a table a line, so that a difference can be read."""
    objects = []
    for name, table in tables.items():
        output_rows = ",\n".join(f"      {json.dumps(row)}" for row in table["output_tokens"])
        objects.append(
            f'  "{name}": {{\n'
            f'    "probabilities": {json.dumps(table["probabilities"])},\n'
            f'    "prompt_tokens": {json.dumps(table["prompt_tokens"])},\n'
            f'    "output_tokens": [\n{output_rows}\n    ]\n'
            "  }"
        )
    return "{\n" + ",\n".join(objects) + "\n}\n"


if __name__ == "__main__":
    main()
