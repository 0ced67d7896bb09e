"""What the matrix products and the attention of whole workloads take by themselves, sustained under the power cap.

    python bench/kernels/bare_work.py --output-json bench/results/h200/bare_work.json

A limit that is measured: the kernels of the engine, in forwards as the workload has them on average, captured in one
CUDA graph and replayed, with no host, no scheduler and no sampling, at once. Ways: products, SwiGLU among them, alone;
attention alone; both in turn, layer by layer; both side by side on two streams, attention on all SMs or laid out for
fewer; and in turn with the passes between products (norms, rotation, the cache's writes). Weights are those of eight
distinct layers of llama-3.1-8b's shapes, random, gone through four times; blocks of the cache are in random order. A
way's time is that of a forward times the number of them that the workload comes to.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

# Run as a script, only this file's own folder would be looked in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels.bare_attention import SIDE_SMS, Attention
from bench.kernels.bare_steps import BareStep, decode_step, serving_step
from bench.kernels.gpu_command import GpuCommand, parse_block_rows
from bench.kernels.prefill_layers import (
    CONFIG,
    HIDDEN,
    LAYERS,
    OPS,
    SHAPES,
    Chain,
    make_layers,
    normal,
)
from bench.kernels.sustained import Lab, Run
from bullet_graph.cli.result_file import check_result_file, write_result_file
from bullet_graph.graphs.cublas import fitting_blas
from bullet_graph.models.weights import LayerWeights
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.workloads import load_workload

WAYS = (
    "products",
    "attention",
    "in turn",
    "side by side",
    "side by side, attention on 64 SMs",
    "in turn, with passes",
)
WORKLOADS = (("azure:conv", 600), ("azure:code", 400))
"""Of the targets all at once: name and number of requests."""
DECODE_CONTEXT = 1000
WARM_UP_ROWS, WARM_UP_S = 2048, 3.0


def steps_of(rows: tuple[int, ...], decode_rows: tuple[int, ...]) -> Iterator[tuple[str, BareStep]]:
    """What is measured, by the name of the work: workloads in forwards of several sizes, then decode steps."""
    for workload, num_requests in WORKLOADS:
        requests = load_workload(workload, num_requests=num_requests).requests
        for number in rows:
            yield f"{workload}={num_requests}", serving_step(CONFIG, requests, number)
    for number in decode_rows:
        yield f"decode={number}x{DECODE_CONTEXT}", decode_step(number, DECODE_CONTEXT)


class Products:
    """The products of a step, SwiGLU as the engine computes it with so many rows, and the output head's."""

    def __init__(self, layers: list[LayerWeights], head: Tensor, step: BareStep) -> None:
        self._layers, self._head = layers, head
        self._inputs = {name: normal(step.rows, k) for name, (_, k) in SHAPES.items()}
        self._outs = {name: normal(step.rows, n) for name, (n, _) in SHAPES.items() if name != "gate_up"}
        self._sampled, self._logits = normal(step.head_rows, HIDDEN), normal(step.head_rows, len(head))

    def run(self, layer: int) -> None:
        """Of one layer."""
        weights = self._layers[layer]
        for name in ("qkv", "o"):
            torch.mm(self._inputs[name], getattr(weights, name).t(), out=self._outs[name])
        OPS.swiglu(self._inputs["gate_up"], weights.gate_up)
        torch.mm(self._inputs["down"], weights.down.t(), out=self._outs["down"])

    def run_head(self) -> None:
        """Of the rows that are sampled."""
        torch.mm(self._sampled, self._head.t(), out=self._logits)


def ways_of(products: Products, attention: Attention, chain: Chain) -> dict[str, Run]:
    """Whole steps, by the names of WAYS."""

    def only_products() -> None:
        for index in range(CONFIG.num_layers):
            products.run(index % LAYERS)
        products.run_head()

    def only_attention(num_sms: int | None = None) -> None:
        for index in range(CONFIG.num_layers):
            attention.run(index % LAYERS, num_sms)

    def in_turn() -> None:
        for index in range(CONFIG.num_layers):
            products.run(index % LAYERS)
            attention.run(index % LAYERS)
        products.run_head()

    def side_by_side(num_sms: int | None) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            only_attention(num_sms)
        only_products()
        torch.cuda.current_stream().wait_stream(stream)

    def with_passes() -> None:
        for _ in range(CONFIG.num_layers // LAYERS):
            chain.engine()
            for index in range(LAYERS):
                attention.run(index)
        products.run_head()

    runs = (
        only_products,
        only_attention,
        in_turn,
        partial(side_by_side, None),
        partial(side_by_side, SIDE_SMS),
        with_passes,
    )
    return dict(zip(WAYS, runs, strict=True))


def measure(
    lab: Lab, layers: list[LayerWeights], head: Tensor, name: str, step: BareStep, wanted: tuple[str, ...]
) -> None:
    """The wanted ways of one step; the rows also tell what the whole work takes."""
    chain = Chain(layers, step.rows)
    ways = ways_of(Products(layers, head, step), Attention(step), chain)
    for way in wanted:
        run = ways[way]
        with fitting_blas(step.rows, None):
            ms = lab.measure(name, way, step.rows, run, step.flops(CONFIG), CONFIG.num_layers)
        if math.isfinite(ms):
            seconds = ms * step.repeats / 1e3
            lab.rows[-1] |= dataclasses.asdict(step) | {
                "step_ms": round(ms, 4),
                "seconds": round(seconds, 6),
                "joules": round(seconds * lab.rows[-1]["watts"], 3),
            }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each way of each work."""
    lines = [f"{'work':18} {'rows':>5} {'step, ms':>9} {'s':>8} {'J':>8} {'W':>4} {'MHz':>5}  way"]
    for row in rows:
        if "seconds" in row:
            lines.append(
                f"{row['part']:18} {row['rows']:5} {row['step_ms']:9.3f} {row['seconds']:8.3f} {row['joules']:8.0f} "
                f"{row['watts']:4} {row['mhz']:5}  {row['name']}"
            )
        elif "tflops" not in row:
            lines.append(" ".join(f"{key}={value}" for key, value in row.items()))
    return lines


@click.command(cls=GpuCommand)
@click.option(
    "--way", "ways", type=click.Choice(WAYS), multiple=True, help="Only this, or these; otherwise all."
)
@click.option(
    "--rows",
    default="2048,4096",
    show_default=True,
    callback=parse_block_rows,
    help="Of a workload's forwards.",
)
@click.option(
    "--decode-rows", default="64,256", show_default=True, callback=parse_block_rows, help="Of decode steps."
)
@click.option("--seconds", type=click.FloatRange(min=0.3), default=2.4, show_default=True, help="A figure.")
@click.option(
    "--budget-s", default=180.0, show_default=True, help="No new figure is begun after so many seconds."
)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
@torch.inference_mode()
def main(
    ways: tuple[str, ...],
    rows: tuple[int, ...],
    decode_rows: tuple[int, ...],
    seconds: float,
    budget_s: float,
    output_json: Path,
) -> None:
    """Measure, print a table and write the JSON."""
    check_result_file(output_json, overwrite=True)
    torch.manual_seed(0)
    lab = Lab(seconds, budget_s)
    layers = make_layers()
    head = normal(CONFIG.vocab_size, HIDDEN, std=HIDDEN**-0.5)
    lab.measure("warm-up", "layers", WARM_UP_ROWS, Chain(layers, WARM_UP_ROWS).engine, 0.0, LAYERS, WARM_UP_S)
    try:
        for name, step in steps_of(rows, decode_rows):
            measure(lab, layers, head, name, step, ways or WAYS)
            torch.cuda.empty_cache()
    finally:
        click.echo("\n".join(table(lab.rows)))
        report = {
            "model": "llama-3.1-8b",
            "rows": lab.rows,
            "provenance": dataclasses.asdict(collect_provenance("cuda")),
        }
        write_result_file(output_json, json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
