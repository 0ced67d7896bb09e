"""A layer's four matrix products by number of rows, sustained under the power cap.

    python -m bench.kernels.layer_products --output-json bench/results/h200/layer_products.json

"engine" calls them as the engine does: SwiGLU fused from some rows on, cuBLAS or cublasLt by rows. The other ways
time each product alone. Weights are those of eight distinct layers, so no product finds its weights in the L2.

With a preset in FP8, "engine" also quantizes.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from bench.kernels.harness import (
    DENSE_PRESETS,
    GpuCommand,
    Run,
    device_text,
    output_option,
    parse_counts,
    product_ceiling_tflops,
    random_tensor,
    sustained_ms,
)
from bench.record import write_report
from bullet_graph.kernels.fp8 import quantize_weight
from bullet_graph.kernels.gpu import Gpu, fitting_blas
from bullet_graph.kernels.ops import Linear
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.roofline import PROJECTIONS, layer_projections

LAYERS = 8


def product_flops(config: ModelConfig, rows: int, *names: str) -> float:
    """Operations of the named products of one layer."""
    return 2.0 * rows * sum(math.prod(layer_projections(config)[name]) for name in names)


def random_linear(config: ModelConfig, rows: int, columns: int) -> Linear:
    weight = random_tensor(rows, columns, std=columns**-0.5)
    if config.fp8 is None:
        return Linear(weight)
    values, scale = quantize_weight(weight, blocks=config.fp8.blocks)
    return Linear(values, None, scale, columns)


def ways(config: ModelConfig, layers: list[dict[str, Linear]], rows: int) -> dict[str, tuple[Run, float]]:
    """What is measured by name: a run over all layers, and its operations per layer."""
    inputs = {name: random_tensor(rows, columns) for name, (_, columns) in layer_projections(config).items()}

    def over_layers(step: Callable[[dict[str, Linear]], object]) -> Run:
        def run() -> None:
            for layer in layers:
                step(layer)

        return run

    ops = TritonOps(Gpu.of(inputs["qkv"].device))
    is_fp8 = config.fp8 is not None
    ready = {name: ops.quantize(x, x.shape[1]) if is_fp8 else x for name, x in inputs.items()}

    def engine(layer: dict[str, Linear]) -> None:
        ops.linear(ready["qkv"], layer["qkv"])
        ops.linear(ops.quantize(inputs["o"], inputs["o"].shape[1]) if is_fp8 else inputs["o"], layer["o"])
        ops.linear(ops.glu(ready["gate_up"], layer["gate_up"], group=layer["down"].group), layer["down"])

    def single(name: str, layer: dict[str, Linear]) -> None:
        ops.linear(ready[name], layer[name])

    found = {"engine": (over_layers(engine), product_flops(config, rows, *PROJECTIONS))}
    for name in PROJECTIONS:
        found[name] = over_layers(partial(single, name)), product_flops(config, rows, name)
    return found


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(DENSE_PRESETS), default="llama-3.1-8b")
@click.option("--rows", default="64,128,256,512,640,1024,2048,4096", callback=parse_counts)
@click.option("--seconds", type=click.FloatRange(min=0.3), default=0.9, help="Per figure.")
@output_option
def main(model: str, rows: tuple[int, ...], seconds: float, output_json: Path) -> None:
    config = PRESETS[model]
    layers = [
        {name: random_linear(config, *shape) for name, shape in layer_projections(config).items()}
        for _ in range(LAYERS)
    ]
    ceiling = product_ceiling_tflops()
    cases: list[dict[str, Any]] = []
    for count in rows:
        for name, (run, flops) in ways(config, layers, count).items():
            with fitting_blas(count, None):
                ms, device = sustained_ms(run, seconds)
            us = 1e3 * ms / LAYERS
            tflops = flops / us / 1e6
            click.echo(
                f"{count:5} rows {name:8} {us:8.1f} us a layer, {tflops:6.1f} TFLOP/s, "
                f"{100 * tflops / ceiling:.0f} % of {ceiling:.0f}, {device_text(device)}"
            )
            cases.append(
                {"rows": count, "name": name, "us_per_layer": round(us, 2), "tflops": round(tflops, 1)}
                | {"watts": device.power_w and round(device.power_w.mean)}
            )
        torch.cuda.empty_cache()
    write_report(output_json, {"model": model, "product_tflops": ceiling, "cases": cases})


if __name__ == "__main__":
    main()
