"""Prefill's layers and their matrix products on one GPU, sustained under its power cap.

    python bench/kernels/prefill_gemm.py --output-json bench/results/h200/prefill_gemm.json

Parts: layer, the engine's layer with SwiGLU as the engine chooses, in two steps and fused, its products alone, and
its time by step; products, each of them by itself; cublaslt, the other algorithms of cublasLt. Each figure is a CUDA
graph replayed for --seconds, the first third of it unmeasured. Weights are those of eight distinct layers of
llama-3.1-8b's shapes, random.
"""

import dataclasses
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

# Run as a script, only this file's own folder would be looked in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels.cublaslt import LtProduct
from bench.kernels.gpu_command import GpuCommand, parse_block_rows
from bench.kernels.prefill_layers import (
    BLOCK_TOKENS,
    LAYERS,
    SHAPES,
    Chain,
    each_layer,
    flops_of,
    make_layers,
    normal,
    split_ns,
    two_steps,
    weight_of,
)
from bench.kernels.sustained import Lab, Run, burst_ms, print_table
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.kernels.triton_ops import swiglu_matmul
from bullet_graph.models.weights import LayerWeights
from bullet_graph.perf.provenance import collect_provenance

PARTS = ("layer", "products", "cublaslt")
WARM_UP_ROWS, WARM_UP_S = 2048, 2.0
WORKSPACE_BYTES = 64 << 20
MAX_TRANSPOSED_ALGOS = 16


def measure_layer(lab: Lab, layers: list[LayerWeights], rows_list: tuple[int, ...]) -> None:
    """Whole layers; what the engine chooses is one of the ways beside it, which shows how far figures repeat."""
    for rows in rows_list:
        chain, flops = Chain(layers, rows), flops_of(*SHAPES, rows=rows)
        inputs = {name: normal(rows, k) for name, (_, k) in SHAPES.items()}
        outs = {name: normal(rows, n) for name, (n, _) in SHAPES.items()}

        def products(layer: LayerWeights, inputs: dict = inputs, outs: dict = outs) -> None:
            for name in SHAPES:
                torch.mm(inputs[name], weight_of(layer, name).t(), out=outs[name])

        ways: dict[str, Run] = {
            "engine": chain.engine,
            "engine, SwiGLU in two steps": partial(chain.engine, two_steps),
            "engine, SwiGLU fused": partial(chain.engine, swiglu_matmul),
            "products alone": each_layer(layers, products),
        }
        for name, run in ways.items():
            lab.measure("layer", name, rows, run, flops, LAYERS)
        lab.note(part="layer", name="split, ns a token-layer", rows=rows, **split_ns(chain))


def torch_product(layers: list[LayerWeights], name: str, x: Tensor, y: Tensor) -> Run:
    """A run of one product of every layer by torch, which calls cuBLAS."""
    return each_layer(layers, lambda layer: torch.mm(x, weight_of(layer, name).t(), out=y))


def measure_products(lab: Lab, layers: list[LayerWeights], rows_list: tuple[int, ...]) -> None:
    """Each product by itself, and the gate and up projections with SwiGLU in both ways."""
    for rows, (name, (n, k)) in itertools.product(rows_list, SHAPES.items()):
        x, y = normal(rows, k), normal(rows, n)
        ways: dict[str, Run] = {name: torch_product(layers, name, x, y)}
        if name == "gate_up":
            ways["gate_up, SwiGLU in two steps"] = each_layer(layers, partial(apply_gate_up, two_steps, x))
            ways["gate_up, SwiGLU fused"] = each_layer(layers, partial(apply_gate_up, swiglu_matmul, x))
        for label, run in ways.items():
            lab.measure("products", label, rows, run, flops_of(name, rows=rows), LAYERS)


def apply_gate_up(swiglu: Any, x: Tensor, layer: LayerWeights) -> None:
    """SwiGLU of one layer's weights."""
    swiglu(x, layer.gate_up)


def measure_cublaslt(lab: Lab, layers: list[LayerWeights], rows_list: tuple[int, ...], kept: int) -> None:
    """For each product torch's choice, then the fastest algorithms for weights as stored and as transposed."""
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for rows, (name, (n, k)) in itertools.product(rows_list, SHAPES.items()):
        x, y = normal(rows, k), normal(rows, n)
        flops = flops_of(name, rows=rows)
        weights = [weight_of(layer, name) for layer in layers]
        lab.measure("cublaslt", f"{name} torch", rows, torch_product(layers, name, x, y), flops, LAYERS)
        reference = x.float() @ weights[0].float().t()
        for transposed in (False, True):
            product = LtProduct(rows, n, k, transposed, workspace)
            stored = [w.t().contiguous() for w in weights] if transposed else weights
            screened = []
            for algo in product.variants()[: MAX_TRANSPOSED_ALGOS if transposed else None]:
                run_one = partial(product.run, algo, x, stored[0], y)
                if lab.check("cublaslt", f"{name} {product.config(algo)}", y, run_one, reference):
                    screened.append((burst_ms(run_one), product.config(algo), algo))
            for ms, config, algo in fastest_of_each_tile(screened)[: 1 if transposed else kept]:
                settings = " ".join(f"{key}={value}" for key, value in config.items())
                tflops = 2e-9 * rows * n * k / ms
                label = f"{name}{' w[K,N]' if transposed else ''} {settings} burst={tflops:.0f}T"

                def chosen(algo: Any = algo, product: LtProduct = product, stored: list = stored) -> None:
                    for w in stored:
                        product.run(algo, x, w, y)  # noqa: B023 - used in this round only

                lab.measure("cublaslt", label, rows, chosen, flops, LAYERS)


def fastest_of_each_tile(
    screened: list[tuple[float, dict[str, int], Any]],
) -> list[tuple[float, dict[str, int], Any]]:
    """Of (ms, config, algorithm), the fastest of each tile and cluster, fastest first.

    Only one of each, since what saves energy is what is kept near the units.
    """
    best: dict[tuple[int, int], tuple[float, dict[str, int], Any]] = {}
    for entry in sorted(screened, key=lambda entry: entry[0]):
        best.setdefault((entry[1]["tile"], entry[1]["cluster"]), entry)
    return list(best.values())


def parse_rows(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """As :func:`parse_block_rows`, of which there must be some."""
    rows = parse_block_rows(context, parameter, value)
    if not rows:
        raise click.BadParameter(f"{value!r}: write positive multiples of {BLOCK_TOKENS}, such as 512,1024")
    return rows


@click.command(cls=GpuCommand)
@click.option(
    "--part", "parts", type=click.Choice(PARTS), multiple=True, help="Only this, or these; otherwise all."
)
@click.option("--seconds", type=click.FloatRange(min=0.3), default=0.9, show_default=True, help="A figure.")
@click.option(
    "--budget-s", default=135.0, show_default=True, help="No new figure is begun after so many seconds."
)
@click.option(
    "--rows",
    default="512,1024,2048,4096,8192",
    show_default=True,
    callback=parse_rows,
    help="Of whole layers.",
)
@click.option("--product-rows", default="2048", show_default=True, callback=parse_rows, help="Of products.")
@click.option(
    "--algos", type=click.IntRange(min=1), default=4, show_default=True, help="Of cublasLt's, a product."
)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(
    parts: tuple[str, ...],
    seconds: float,
    budget_s: float,
    rows: tuple[int, ...],
    product_rows: tuple[int, ...],
    algos: int,
    output_json: Path,
) -> None:
    """Measure, print a table and write the JSON."""
    check_result_file(output_json, overwrite=True)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    lab = Lab(seconds, budget_s)
    layers = make_layers()
    warm_up, flops = Chain(layers, WARM_UP_ROWS), flops_of(*SHAPES, rows=WARM_UP_ROWS)
    lab.measure("layer", "warm-up", WARM_UP_ROWS, warm_up.engine, flops, LAYERS, WARM_UP_S)
    runs: dict[str, Run] = {
        "layer": partial(measure_layer, lab, layers, rows),
        "products": partial(measure_products, lab, layers, product_rows),
        "cublaslt": partial(measure_cublaslt, lab, layers, product_rows, algos),
    }
    try:
        for name in PARTS:
            if parts and name not in parts:
                continue
            try:
                runs[name]()
            except RuntimeError as error:  # a part that fails must not lose the others' figures
                lab.note(part=name, name="part", failed=repr(error)[:300])
    finally:
        print_table(lab.rows)
        report = {"rows": lab.rows, "provenance": dataclasses.asdict(collect_provenance("cuda"))}
        output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
