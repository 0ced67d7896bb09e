"""A whole captured decode step, computed in several ways, and where the time of the product's goes.

    python bench/kernels/decode_step.py --output-json bench/results/h200/decode_step.json

The ways are the ``Halves`` of bullet_graph/graphs/compiled.py; one row is always computed eagerly. Weights, cache and
tokens are random. For each number of rows the ways take turns, round by round, once the GPU has run long enough to be
at its power cap; a time is the median over a way's steps, each with its inputs' upload, by events. Logits are compared
with those of the first way.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click
import torch

# Run as a script, only this file's own folder would be looked in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels.gpu_command import GpuCommand
from bench.kernels.step_breakdown import breakdown_rows, profile, work_by_group
from bench.kernels.step_lab import MAX_ERROR, VARIANTS, Bench, inputs_for
from bullet_graph.cli.options import parse_sizes
from bullet_graph.cli.result_file import check_result_file, write_result_file
from bullet_graph.graphs.halves import DEFAULT_HALVES, Halves
from bullet_graph.graphs.key import batch_size_buckets
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.bandwidth import measure_copy_gb_per_s
from bullet_graph.perf.provenance import collect_provenance

BREAKDOWN_ROWS = (64, 256)
WARM_UP_S = 3.0


def table(report: dict[str, Any]) -> list[str]:
    """What was measured, as lines: steps by rows and variant, then groups of kernels."""
    lines = []
    for case in report["cases"]:
        device = case["device"]
        watts, mhz = (device[key] and round(device[key]["mean"]) for key in ("power_w", "sm_clock_mhz"))
        lines.append(f"{case['rows']} rows x {report['context']} tokens, {watts} W, {mhz} MHz")
        base = case["variants"][0]["step_ms"]
        for one in case["variants"]:
            if one["same_launches_as"]:
                continue
            lines.append(
                f"  {one['name']:18} {one['step_ms']:8.3f} ms {100 * (one['step_ms'] / base - 1):+6.2f} %  error "
                f"{one['relative_error']:.1e}, same tokens {100 * one['same_tokens']:.0f} %"
                f"{'' if one['agrees'] else '  DISAGREES'}"
            )
    for part in report["breakdowns"]:
        if "failed" in part:
            lines.append(f"{part['rows']} rows by kernel: {part['failed']}")
            continue
        lines.append(
            f"{part['rows']} rows by kernel ({report['cases'][0]['variants'][0]['name']}), copy ceiling "
            f"{report['copy_gb_per_s']:.0f} GB/s"
        )
        for row in part["groups"]:
            lines.append(
                f"  {row['group']:10} {row['us']:9.1f} us {100 * row['share_of_step']:5.1f} %"
                f" {row['num_bytes'] / 1e6:9.1f} MB {row['gb_per_s']:7.0f} GB/s"
                f" {100 * row['share_of_copy']:5.1f} % of copy {row['tflops']:6.1f} TFLOP/s"
            )
    return lines


def breakdown(bench: Bench, config: ModelConfig, rows: int, copy_gb_per_s: float) -> dict[str, Any]:
    """By kernel, of the first variant, which has been captured; the profiler's own cost is in it."""
    name = bench.variants[0]
    inputs = inputs_for(rows, bench.context, bench.num_blocks)
    try:
        times = profile(lambda: bench.step(name, inputs))
    except Exception as error:  # what the profiler cannot do must not lose the steps' times
        return {"rows": rows, "failed": repr(error)[:300]}
    work = work_by_group(config, rows, bench.context)
    return {"rows": rows, "groups": breakdown_rows(times, work, copy_gb_per_s)}


def parse_rows(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """An option's callback: read numbers of rows such as ``1,64``, which steps are captured for."""
    rows = parse_sizes(context, parameter, value)
    captured = batch_size_buckets(max(rows, default=1))
    if not rows or min(rows) < 1 or set(rows) - set(captured):
        raise click.BadParameter(f"{value!r}: write numbers that steps are captured for: {captured}")
    return rows


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="llama-3.1-8b", show_default=True)
@click.option(
    "--rows", default="1,8,16,32,64,128,192,256", show_default=True, callback=parse_rows, help="Of a step."
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Tokens that a row attends to.",
)
@click.option(
    "--variant",
    "names",
    type=click.Choice(VARIANTS),
    multiple=True,
    help="Only this, or these, besides the product's; otherwise all.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Turns of each.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
@click.pass_context
@torch.inference_mode()
def main(
    ctx: click.Context,
    model: str,
    rows: tuple[int, ...],
    context: int,
    names: tuple[Halves, ...],
    rounds: int,
    output_json: Path,
) -> None:
    """Measure, print a table and write the JSON; exit with 1 if logits disagree."""
    check_result_file(output_json, overwrite=True)
    torch.manual_seed(0)
    config, largest = PRESETS[model], max(rows)
    copy_gb_per_s = measure_copy_gb_per_s("cuda")
    torch.cuda.empty_cache()
    wanted = [name for name in VARIANTS if name == DEFAULT_HALVES or not names or name in names]
    bench = Bench(config, wanted, largest, context)
    bench.capture(DEFAULT_HALVES, largest)
    bench.times_ms(DEFAULT_HALVES, inputs_for(largest, context, bench.num_blocks), WARM_UP_S)
    report: dict[str, Any] = {
        "model": model,
        "context": context,
        "rounds": rounds,
        "max_error": MAX_ERROR,
        "copy_gb_per_s": round(copy_gb_per_s, 1),
        "cases": [],
        "breakdowns": [],
    }
    try:
        for count in sorted(set(rows), reverse=True):
            report["cases"].insert(0, bench.case(count, rounds))
            click.echo(f"{count} rows done", err=True)
        for count in sorted(set(rows) & set(BREAKDOWN_ROWS)):
            report["breakdowns"].append(breakdown(bench, config, count, copy_gb_per_s))
    finally:
        report["provenance"] = dataclasses.asdict(collect_provenance("cuda"))
        write_result_file(output_json, json.dumps(report, indent=1))
        click.echo("\n".join(table(report)))
    if not all(one["agrees"] for case in report["cases"] for one in case["variants"]):
        ctx.exit(1)


if __name__ == "__main__":
    main()
