"""Measure which of torch's caches skips most of a start: the compiled halves of one model, in fresh processes.

    python bench/startup_caches.py --model llama-3.1-8b --output-json bench/results/h200/startup_caches.json

Each way is first recorded, then used by a process whose other cache folders are empty. ``aot`` are AOTInductor's
packages (what `bullet-graph capture build` keeps), ``mega-cache`` the archive of torch.compiler.save_cache_artifacts,
``folder`` Inductor's cache folder. Seconds are those of the halves, imports of torch's compiler included.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from bullet_graph.graphs.aot import stored
from bullet_graph.graphs.compile_counts import CompileCounter
from bullet_graph.graphs.compiled import compile_now, compiled_functions
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.kv_cache import KVCache
from bullet_graph.models.loader import dummy_weights
from bullet_graph.models.ops import LayerOps, TorchOps
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.rope import cos_sin_table
from bullet_graph.perf.provenance import collect_provenance

WAYS = ("nothing", "aot", "mega-cache", "folder")
MAX_ROWS = 256


class Folder:
    """Keeps halves as files; see :class:`~bullet_graph.graphs.aot.HalfStore`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name):
        file = self._folder / name.replace("/", "_")
        return file if file.exists() else None

    def save(self, name, ahead, now):
        del now
        half, data = ahead()
        (self._folder / name.replace("/", "_")).write_bytes(data)
        return half

    def refuse(self, name, problem):
        raise RuntimeError(f"{name} cannot be loaded: {problem}")


def run_way(way: str, model: str, device: str, folder: Path) -> dict[str, object]:
    """Compile the halves, or take them from where the way keeps them."""
    config = dataclasses.replace(PRESETS[model], num_layers=1)
    where, dtype = torch.device(device), torch.float32 if device == "cpu" else torch.bfloat16
    weights = dummy_weights(config, dtype=dtype, device=where, seed=0)
    cache = KVCache(config, num_blocks=1, block_tokens=16, dtype=dtype, device=where)
    decoder = Decoder(config, weights, cache, cos_sin_table(config, 16, where))
    fused: LayerOps = TorchOps()
    if device == "cuda":
        from bullet_graph.graphs.halves import TritonNormOps  # noqa: PLC0415 - needs Triton

        fused = TritonNormOps()
    archive = folder / "mega-cache"
    compiler = stored(Folder(folder), "halves") if way == "aot" else compile_now
    start_s = time.perf_counter()
    with torch.inference_mode(), CompileCounter(gpu=device == "cuda") as counter:
        if way == "mega-cache" and archive.exists():
            torch.compiler.load_cache_artifacts(archive.read_bytes())
        compiled_functions(decoder, TorchOps(), fused, MAX_ROWS, compiler)
    seconds = time.perf_counter() - start_s
    if way == "mega-cache" and not archive.exists():
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        archive.write_bytes(saved[0])
    return {"way": way, "seconds": seconds, "compiles": dataclasses.asdict(counter.counts)}


def in_process(way: str, model: str, device: str, folder: Path, libraries: Path) -> dict[str, object]:
    """As :func:`run_way`, in a process of its own with cache folders of its own."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(libraries / "inductor"),
        "TRITON_CACHE_DIR": str(libraries / "triton"),
    }
    command = [sys.executable, __file__, "--model", model, "--device", device, "--way", way, str(folder)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def measure(way: str, model: str, device: str) -> dict[str, object]:
    """Record what a way keeps, then start from that alone."""
    with tempfile.TemporaryDirectory() as name:
        folder, first, second = Path(name) / "kept", Path(name) / "first", Path(name) / "second"
        folder.mkdir()
        if way != "nothing":
            in_process(way, model, device, folder, first)
        if way == "folder":
            shutil.copytree(first, second)
        return in_process(way, model, device, folder, second)


@click.command()
@click.option("--model", type=click.Choice(tuple(PRESETS)), default="tiny", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--repeats", default=2, show_default=True)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True))
@click.option("--way", type=click.Choice(WAYS), hidden=True)
@click.argument("folder", required=False, type=click.Path(path_type=Path))
def main(
    model: str, device: str, repeats: int, output_json: Path | None, way: str | None, folder: Path | None
) -> None:
    """Compare the ways; each is measured ``--repeats`` times, in turns."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if way is not None and folder is not None:
        print(json.dumps(run_way(way, model, device, folder)))
        return
    runs = [measure(way, model, device) for _ in range(repeats) for way in WAYS]
    if output_json is not None:
        page = {
            "command": " ".join(["python", "bench/startup_caches.py", *sys.argv[1:]]),
            "runs": runs,
            "provenance": dataclasses.asdict(collect_provenance(device)),
        }
        output_json.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    table = Table("way", "seconds", "compiled")
    for run in runs:
        counts = {name: count for name, count in run["compiles"].items() if count}
        table.add_row(run["way"], f"{run['seconds']:.2f}", json.dumps(counts))
    Console().print(table)


if __name__ == "__main__":
    main()
