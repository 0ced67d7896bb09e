"""The four matrix products of a layer against the number of rows, by cuBLAS and by cublasLt.

    python bench/kernels/layer_rows.py --output-json bench/results/h200/layer_rows.json

Shapes are llama-3.1-8b's, weights random; products of three layers in a CUDA graph, so that none finds its weights in
the cache; short bursts on a warm card.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import click
import torch
from torch import Tensor

from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.provenance import collect_provenance

CONFIG = PRESETS["llama-3.1-8b"]
SHAPES = {  # (out_features, in_features)
    "qkv": (CONFIG.q_size + 2 * CONFIG.kv_size, CONFIG.hidden_size),
    "o": (CONFIG.hidden_size, CONFIG.q_size),
    "gate_up": (2 * CONFIG.intermediate_size, CONFIG.hidden_size),
    "down": (CONFIG.hidden_size, CONFIG.intermediate_size),
}
ROWS = (16, 32, 48, 64, 96, 112, 128, 192, *range(256, 769, 32), 832, 896, 960, 1024)
LAYERS, PASSES, REPLAYS = 3, 2, 10
Library = Literal["cublas", "cublaslt"]


class Bench:
    """Weights and inputs."""

    def __init__(self) -> None:
        def normal(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

        self._weights = {
            name: [normal(*shape) * 0.02 for _ in range(LAYERS)] for name, shape in SHAPES.items()
        }
        self._inputs = {name: normal(ROWS[-1], shape[1]) for name, shape in SHAPES.items()}

    def us_per_layer(self, rows: int, library: Library, names: tuple[str, ...]) -> float:
        """Time of the named products, µs."""
        torch.backends.cuda.preferred_blas_library(library)

        def run() -> None:
            for layer in range(LAYERS):
                for name in names:
                    torch.nn.functional.linear(self._inputs[name][:rows], self._weights[name][layer])

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(PASSES):
                run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (LAYERS * PASSES * REPLAYS)


@click.command()
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(output_json: Path) -> None:
    """Measure, print a table and write the JSON."""
    bench = Bench()
    for _ in range(30):
        bench.us_per_layer(ROWS[-1], "cublas", tuple(SHAPES))
    libraries: tuple[Library, ...] = ("cublas", "cublaslt")
    cases = []
    for rows in ROWS:
        layer = {library: bench.us_per_layer(rows, library, tuple(SHAPES)) for library in libraries}
        each = {
            name: {library: bench.us_per_layer(rows, library, (name,)) for library in libraries}
            for name in SHAPES
        }
        cases.append({"rows": rows, "us_per_layer": layer, "us_each": each})
        click.echo(f"{rows:5d} rows: " + ", ".join(f"{name} {us:.1f} us" for name, us in layer.items()))
    report = {"provenance": dataclasses.asdict(collect_provenance("cuda")), "cases": cases}
    output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
