"""Decode attention: keys and values read per second, beside what a large copy reaches.

    python -m bench.kernels.decode_attention --output-json bench/results/h200/decode_attention.json

One batch attends over the caches of several layers, which together are larger than the L2, in a CUDA graph. Rates
count keys and values once. ``--lane-sms`` repeats some batches on part of the GPU.
"""

import dataclasses
from pathlib import Path
from typing import Any

import click
import torch

from bench.kernels.harness import (
    DEVICE,
    DTYPE,
    GpuCommand,
    blocks_for,
    burst_us,
    lengths,
    output_option,
    paged_batch,
    random_cache,
    random_tensor,
)
from bench.record import write_report
from bullet_graph.kernels.attention import LayerRows
from bullet_graph.kernels.decode_attention import DecodeBatch, TritonDecodeAttention
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.backend import open_backend
from bullet_graph.partition.masks import SMS_PER_TPC, SmPartition
from bullet_graph.perf.bandwidth import measure_copy_gb_per_s

CASES = (
    (1, 1000, False),
    (8, 1000, False),
    (16, 2000, False),
    (64, 1000, False),
    (64, 2000, False),
    (128, 1000, False),
    (256, 1000, False),
    (256, 1000, True),
    (64, 4000, True),
)
"""(rows, context tokens, whether lengths are lognormal with that mean)"""
LANE_CASES = ((8, 1000, False), (64, 1000, False), (256, 1000, False))


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="llama-3.1-8b")
@click.option("--layers", type=click.IntRange(min=1), default=16, help="KV caches read.")
@click.option("--lane-sms", default=64, help="SMs of the partial lane; 0 measures none.")
@output_option
def main(model: str, layers: int, lane_sms: int, output_json: Path) -> None:
    config = dataclasses.replace(PRESETS[model], num_layers=layers)
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    torch.cuda.init()
    lane_stream = None
    if lane_sms:
        # Before anything else runs: partitions are verified on an idle device.
        partition = SmPartition(lane_sms // SMS_PER_TPC, (num_sms - lane_sms) // SMS_PER_TPC)
        backend, why = open_backend("auto", [partition])
        click.echo(why, err=True)
        lane_stream = torch.cuda.ExternalStream(backend.stream("decode", partition))
    ceiling = measure_copy_gb_per_s("cuda")
    torch.cuda.empty_cache()
    num_blocks = max(blocks_for(lengths(*case)) for case in CASES)
    attention = TritonDecodeAttention(
        config, random_cache(config, num_blocks), max_rows=max(case[0] for case in CASES), gpu=Gpu.of(DEVICE)
    )

    def measure(case: tuple[int, int, bool], sms: int | None, stream: torch.cuda.Stream | None) -> dict[str, Any]:
        rows, context, spread = case
        kv_lens = lengths(*case)
        paged = paged_batch(kv_lens, num_blocks)
        plan = attention.plan(DecodeBatch(paged.kv_indptr, paged.kv_indices, paged.last_block_tokens), num_sms=sms)
        q = random_tensor(rows, config.num_heads, config.head_dim)
        layer_rows, out = LayerRows(q, q, q), torch.empty_like(q)

        def run() -> None:
            for layer in range(layers):
                plan.run_into(layer, layer_rows, out)

        us = burst_us(run, stream) / layers
        gb_per_s = int(kv_lens.sum()) * 2 * config.kv_size * DTYPE.itemsize / us / 1e3
        kind = "lognormal" if spread else "equal"
        click.echo(
            f"{rows:4} x {context} tokens, {kind}, on {sms or num_sms} SMs: {us:7.1f} us a layer, "
            f"{gb_per_s:5.0f} GB/s, {100 * gb_per_s / ceiling:.0f} % of a copy's {ceiling:.0f}"
        )
        return {
            "rows": rows,
            "context": context,
            "lognormal": spread,
            "num_sms": sms or num_sms,
            "us_per_layer": round(us, 2),
            "gb_per_s": round(gb_per_s, 1),
        }

    cases = [measure(case, None, None) for case in CASES]
    if lane_stream is not None:
        cases += [measure(case, lane_sms, lane_stream) for case in LANE_CASES]
    write_report(output_json, {"model": model, "layers": layers, "copy_gb_per_s": ceiling, "cases": cases})


if __name__ == "__main__":
    main()
