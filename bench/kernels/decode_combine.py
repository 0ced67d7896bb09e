"""Decode attention whose partial results the last worker adds up, against a second kernel that does.

    python bench/kernels/decode_combine.py --output-json bench/results/h200/decode_combine.json

Both ways take turns, replay by replay of a CUDA graph over --layers caches, so that the power cap weighs on both alike;
figures are medians. A case is a batch of equal lengths, of lognormal ones, or of one long sequence among short ones.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

# Run as a script, only this file's own folder would be looked in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels.decode_inputs import DEVICE, DTYPE, Cache, Int32Array, lengths
from bench.kernels.decode_kernels import decode_batch, paged_batch
from bench.kernels.gpu_command import GpuCommand
from bench.kernels.prefill_attention import interleaved
from bullet_graph.cli.result_file import check_result_file, write_result_file
from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.triton_decode_attention import (
    PlannedDecode,
    TritonDecodeAttention,
    default_settings,
)
from bullet_graph.perf.provenance import collect_provenance

MAX_ROWS = 512
WAYS = {"second kernel": MAX_ROWS + 1, "last worker": 1}
"""From how many rows on the last worker adds up."""
LONG_TOKENS = 60_000


def cases() -> dict[str, Int32Array]:
    """Tokens that each row attends to, by the case's name."""
    equal = [(1, 1000), (8, 1000), (14, 2600), (32, 2000), (64, 1000), (256, 1000), (460, 1128)]
    lognormal = [(64, 1000), (200, 1100), (40, 4000)]
    named = {f"{rows} x {context}": lengths(rows, context, False) for rows, context in equal}
    named |= {f"{rows} x {context}, lognormal": lengths(rows, context, True) for rows, context in lognormal}
    named[f"1 x {LONG_TOKENS} and 31 x 500"] = np.array([LONG_TOKENS, *[500] * 31], dtype=np.int32)
    return named


def measure(config: ModelConfig, kv_lens: Int32Array, num_layers: int, seconds: float) -> dict[str, Any]:
    """Median µs a layer of each way."""
    num_blocks = int((-(-kv_lens // KV_BLOCK_TOKENS)).sum())
    cache = Cache.random(config, num_blocks * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS, num_layers, hnd=False)
    batch = decode_batch(paged_batch(kv_lens, num_blocks, KV_BLOCK_TOKENS))
    q = torch.randn(len(kv_lens), config.num_heads, config.head_dim, device=DEVICE).to(DTYPE)

    def run(plan: PlannedDecode, out: torch.Tensor) -> torch.Tensor:
        for layer in range(num_layers):
            plan.run_into(layer, q, out)
        return out

    runs: dict[str, Callable[[], torch.Tensor]] = {}
    for way, combine_rows in WAYS.items():
        lane = TritonDecodeAttention(
            config,
            cache,  # type: ignore[arg-type]
            max_rows=MAX_ROWS,
            num_sms=torch.cuda.get_device_properties(DEVICE).multi_processor_count,
            settings=dataclasses.replace(default_settings(config), combine_rows=combine_rows),
        )
        runs[way] = partial(run, lane.plan(batch), torch.empty_like(q))
    times_ms, error = interleaved(runs, seconds)
    return {
        "rows": len(kv_lens),
        "tokens": int(kv_lens.sum()),
        "us_per_layer": {way: round(1e3 * ms / num_layers, 2) for way, ms in times_ms.items()},
        "relative_error": error,
    }


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="llama-3.1-8b", show_default=True)
@click.option("--layers", default=8, show_default=True, help="Caches that a graph goes through.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=0.8, show_default=True, help="A case.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
@torch.inference_mode()
def main(model: str, layers: int, seconds: float, output_json: Path) -> None:
    """Measure every case, print a line for each and write the JSON."""
    check_result_file(output_json, overwrite=True)
    torch.manual_seed(0)
    found = []
    for name, kv_lens in cases().items():
        case = {"case": name} | measure(PRESETS[model], kv_lens, layers, seconds)
        second, last = (case["us_per_layer"][way] for way in WAYS)
        click.echo(
            f"{name:28} second kernel {second:8.2f} us, last worker {last:8.2f} us {100 * (last / second - 1):+7.2f} %"
        )
        found.append(case)
    report = {"model": model, "layers": layers, "cases": found}
    report["provenance"] = dataclasses.asdict(collect_provenance("cuda"))
    write_result_file(output_json, json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
