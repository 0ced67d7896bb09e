"""Simulate each sustained run that was measured, for a comparison of both. A run takes some 30 s.

    python -m bench.simulator_error --output-json bench/results/simulated/error.json

Model, workload, rate, targets, limits and KV cache are those of the measured run. Other policies are simulated as well.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from bench.evidence import CLAIMED, Run, Source, dicts, read_results
from bench.record import Tool, write_report
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.errors import ConfigError
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.quantization import in_formats
from bullet_graph.models.sharding import shard
from bullet_graph.perf.roofline import kv_cache_bytes_per_token
from bullet_graph.perf.table import gpu_nickname

FIGURES = ("slo_attainment", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "output_throughput")
POLICIES = ("auto", "mixed", "split")
_LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "tensor_parallel_size", "seed")


def measured_runs(source: Source) -> Iterator[tuple[dict[str, Any], Run]]:
    """The sustained runs of ``auto`` in a comparison, each with its cell."""
    for cell in dicts(source.fields["cells"]) if source.is_comparison else ():
        for run in dicts(cell["runs"]) if cell["system"] == CLAIMED else ():
            if run.get("sustained"):
                yield cell, run


def command_of(settings: dict[str, Any], cell: dict[str, Any], run: Run) -> list[str]:
    """Arguments of ``bullet-graph`` that simulate a run of a file with these settings."""
    limits = {name: settings[name] for name in _LIMITS if settings.get(name) is not None}
    kv_cache_dtype = settings.get("kv_cache_dtype") or "auto"
    whole = in_formats(resolve_model(settings["model"]).config, quantization=None, kv_cache_dtype=kv_cache_dtype)
    model = shard(whole, settings.get("tensor_parallel_size", 1), 0)
    # Hits in the prefix cache depend on its size. One block is padding.
    tokens = run["system_settings"]["kv_cache_tokens"] + KV_BLOCK_TOKENS
    options = {
        "gpu": gpu_nickname(settings["device_name"]),
        "model": settings["model"],
        "trace": cell["workload"],
        "goodput": cell["slo"],
        "first-rate": run["request_rate"],
        "burstiness": run.get("burstiness", 1.0),
        "max-runs": 1,
        "gpu-memory-utilization": 1.0,
        "kv-cache-bytes": tokens * kv_cache_bytes_per_token(model, dtype_bytes=2),
        **{name.replace("_", "-"): value for name, value in limits.items()},
    }
    words = [*options.items(), *(("policy", policy) for policy in POLICIES)]
    return ["simulate", "--sweep", *(word for name, value in words for word in (f"--{name}", str(value)))]


def simulated(arguments: list[str]) -> dict[str, Run]:
    """The figures of the one run that a command simulates of each policy. Raises ConfigError where it fails."""
    command = [sys.executable, "-m", "bullet_graph", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"bullet-graph {' '.join(arguments)} failed: {done.stderr.strip()}")
    found = json.loads(done.stdout)["policies"]
    return {policy: found[policy]["results"][0] for policy in POLICIES}


def row_of(source: Source, cell: dict[str, Any], run: Run) -> dict[str, Any]:
    """A measured run's figures beside the simulated ones."""
    settings = source.fields["settings"]
    arguments = command_of(settings, cell, run)
    click.echo(f"bullet-graph {' '.join(arguments)}", err=True)
    row = {"file": source.name, "model": settings["model"], "gpu": gpu_nickname(settings["device_name"])}
    row |= {name: cell[name] for name in ("workload", "slo")} | {
        name: run[name] for name in ("request_rate", "stable", "date")
    }
    runs = simulated(arguments)
    row |= {way: {name: one[name] for name in FIGURES} for way, one in (("measured", run), ("simulated", runs["auto"]))}
    return row | {"on_time": {policy: one["slo_attainment"] for policy, one in runs.items()}}


@click.command(cls=Tool)
@click.option(
    "--results",
    "folders",
    type=click.Path(path_type=Path),
    multiple=True,
    default=[Path(__file__).resolve().parent / "results" / gpu for gpu in ("h200", "h100")],
    help="Folder of measured comparisons; repeat it for several.",
)
@click.option("--output-json", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The result.")
def main(folders: tuple[Path, ...], output_json: Path) -> None:
    check_result_file(output_json, overwrite=True)
    jobs = [(source, *one) for each in folders for source in read_results(each) for one in measured_runs(source)]
    for name in {cell["workload"] for _, cell, _ in jobs if ":" not in cell["workload"]}:
        if not Path(name).is_file():
            raise ConfigError(f"{name}: a measured run had this trace, but it is not here: see bench/README.md")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(row_of, *zip(*jobs, strict=True)))
    write_report(output_json, {"rows": rows}, device="cpu")


if __name__ == "__main__":
    main()
