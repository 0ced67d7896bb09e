"""Where the time of a capture goes: the launches, recording them, and making a graph of them that can be replayed.

    python bench/kernels/capture_cost.py --output-json bench/results/h200/capture_cost.json

Pieces of short forwards (``graphs/layer_graphs.py``) of llama-3.1-8b, some layers of it; times are the host's, medians.
"""

import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import torch

# Run as a script, only this file's own folder would be looked in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels.gpu_command import GpuCommand
from bullet_graph.cli.result_file import check_result_file, write_result_file
from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.graphs.collector import paused_collector
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.kv_cache import KVCache
from bullet_graph.models.loader import dummy_weights
from bullet_graph.models.pieces import LayerPieces
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.rope import cos_sin_table
from bullet_graph.models.triton_ops import TritonOps
from bullet_graph.perf.provenance import collect_provenance

LAYERS = 8
ROWS = (16, 256, 1024)
REPEATS = 8
THREADS = (1, 2, 4)


def make_pieces() -> LayerPieces:
    """Pieces of a short model, on the GPU."""
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], num_layers=LAYERS)
    device, dtype = torch.device("cuda"), torch.bfloat16
    cache = KVCache(config, num_blocks=4, block_tokens=KV_BLOCK_TOKENS, dtype=dtype, device=device)
    weights = dummy_weights(config, dtype=dtype, device=device, seed=0)
    decoder = Decoder(config, weights, cache, cos_sin_table(config, 2048, device))
    return LayerPieces(decoder, TritonOps(), ROWS[-1])


class Case:
    """Captures of pieces of one size, into one memory pool.

    Args:
        pieces: to capture.
        rows: of the forward.
    """

    def __init__(self, pieces: LayerPieces, rows: int) -> None:
        self._pieces = pieces
        self._rows = rows
        self._pool = torch.cuda.graph_pool_handle()
        pieces.run(1, rows)

    def launch(self) -> None:
        """The kernels of all layers, one by one."""
        for layer in range(LAYERS):
            self._pieces.run(layer, self._rows)

    def record(self, *, keep_graph: bool) -> list[torch.cuda.CUDAGraph]:
        """A graph for each layer; with ``keep_graph`` they are not made ready for replay."""
        graphs = []
        for layer in range(LAYERS):
            graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._pieces.run(layer, self._rows)
            graph.capture_end()
            graphs.append(graph)
        return graphs

    def times_ms(self) -> dict[str, float]:
        """Host time of a layer, ms, by what is done."""
        figures = {"launch": self._ms(self.launch)}
        for collector in ("on", "paused"):
            with paused_collector() if collector == "paused" else nullcontext():
                figures[f"capture, collector {collector}"] = self._ms(lambda: self.record(keep_graph=False))
        with paused_collector():
            figures["record"] = self._ms(lambda: self.record(keep_graph=True))
            for threads in THREADS:
                figures[f"instantiate, {threads} threads"] = self._instantiate_ms(threads)
        return figures

    def _instantiate_ms(self, threads: int) -> float:
        times = []
        for _ in range(REPEATS):
            graphs = self.record(keep_graph=True)
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda _: None, range(threads)))  # threads begin when they are first asked
                start_s = time.perf_counter()
                list(pool.map(lambda graph: graph.instantiate(), graphs))
                times.append(time.perf_counter() - start_s)
        return statistics.median(times) * 1e3 / LAYERS

    @staticmethod
    def _ms(work: Callable[[], Any]) -> float:
        times = []
        kept = []  # as an engine keeps its graphs: freeing them is no part of the time
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            kept.append(work())
            times.append(time.perf_counter() - start_s)
        return statistics.median(times) * 1e3 / LAYERS


@click.command(cls=GpuCommand)
@click.option("--output-json", type=click.Path(path_type=Path), required=True)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@torch.inference_mode()
def main(output_json: Path, overwrite: bool) -> None:
    """Measure, print and write the JSON."""
    check_result_file(output_json, overwrite=overwrite)
    pieces = make_pieces()
    cases = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for rows in ROWS:
            gc.collect()
            free_before, _ = torch.cuda.mem_get_info()
            times_ms = Case(pieces, rows).times_ms()
            free_after, _ = torch.cuda.mem_get_info()
            cases.append({"rows": rows, "ms": times_ms, "num_bytes": free_before - free_after})
            click.echo(
                f"{rows:5d} rows: " + ", ".join(f"{what} {ms:.3f} ms" for what, ms in times_ms.items())
            )
    report = {"provenance": dataclasses.asdict(collect_provenance("cuda")), "layers": LAYERS, "cases": cases}
    write_result_file(output_json, json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
