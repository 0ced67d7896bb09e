"""Decode attention: FlashInfer's tensor-core decode and the Triton kernels, in several layouts of the latter.

    python bench/kernels/decode_attention.py --output-json bench/results/h200/decode_attention.json

Every measurement replays a CUDA graph that runs one batch over the caches of several layers, which together are
larger than the L2. Rates count the keys and values read once. FlashInfer is measured before and after the
Triton kernels, since clocks fall as the GPU warms up.
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

from bench.kernels.decode_inputs import DEVICE, Cache, lengths
from bench.kernels.decode_kernels import Bench
from bench.kernels.gpu_command import GpuCommand
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.kernels.decode_attention import DecodeKernelSettings, default_settings
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.backend import open_backend
from bullet_graph.partition.masks import SMS_PER_TPC, SmPartition
from bullet_graph.perf.provenance import collect_provenance

CASES = [
    (1, 1000, False),
    (8, 1000, False),
    (16, 2000, False),
    (64, 1000, False),
    (64, 2000, False),
    (128, 1000, False),
    (256, 1000, False),
    (256, 1000, True),
    (64, 4000, True),
]
"""(rows, tokens of context, whether that is the mean of a lognormal distribution)."""
FEW_CASES = [(8, 1000, False), (64, 1000, False), (256, 1000, False)]


def candidates(config: ModelConfig) -> list[DecodeKernelSettings]:
    """About a dozen layouts around the default number of key heads a tile."""
    usual = default_settings(config).kv_heads
    double = min(2 * usual, config.num_kv_heads)
    # As many as fit an SM of Hopper's: counted in bytes of a tile, of which heads of 128 have 256 a key.
    shorter = max(1, 128 // config.head_dim)
    chosen = [
        DecodeKernelSettings(
            kv_heads=heads,
            tile=tile * shorter,
            num_warps=warps,
            num_stages=stages,
            ctas_per_sm=ctas,
            max_registers=registers,
        )
        for heads, tile, warps, stages, ctas, registers in (
            (usual, 64, 4, 3, 3, 168),
            (usual, 64, 4, 4, 2, None),
            (usual, 64, 4, 3, 2, None),
            (usual, 64, 8, 3, 2, 128),
            (usual, 128, 8, 3, 1, None),
            (usual, 32, 4, 4, 4, 128),
            (usual, 32, 4, 5, 3, 168),
            (usual, 32, 2, 4, 4, None),
            (double, 64, 4, 3, 2, None),
            (double, 64, 4, 4, 2, None),
            (double, 128, 8, 3, 1, None),
            (1, 64, 4, 3, 3, 168),
        )
    ]
    return list(dict.fromkeys(chosen))


def show(case: dict[str, Any]) -> None:
    """One line for FlashInfer and one for each layout, the best marked."""
    kind = "lognormal" if case["lognormal"] else "equal"
    click.echo(
        f"\n{case['rows']} x {case['context']} {kind}, {case['num_sms']} SMs, {case['layout']}, blocks of "
        f"{case['block_tokens']}: FlashInfer {case['flashinfer']['us_per_layer']:.1f} us "
        f"{case['flashinfer']['gb_per_s']:.0f} GB/s, after: {case['flashinfer_after']['gb_per_s']:.0f} GB/s"
    )
    best = min((r["us_per_layer"] for r in case["triton"] if "error" not in r), default=None)
    for row in case["triton"]:
        values = " ".join(str(value) for value in row["settings"].values())
        if "error" in row:
            click.echo(f"  {values:28} {row['error']}")
            continue
        click.echo(
            f"  {values:28} {row['us_per_layer']:8.1f} us {row['gb_per_s']:6.0f} GB/s, error "
            f"{row['relative_error']:.1e}{'  <- best' if row['us_per_layer'] == best else ''}"
        )


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="llama-3.1-8b", show_default=True)
@click.option("--layers", default=16, show_default=True, help="Caches that a graph goes through.")
@click.option("--lane-sms", default=64, show_default=True, help="Also on a lane of so many SMs; 0: not.")
@click.option(
    "--overlap/--no-overlap", default=True, show_default=True, help="Programmatic dependent launch."
)
@click.option("--hnd", is_flag=True, help="Compare layouts and block sizes instead.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
@torch.inference_mode()
def main(model: str, layers: int, lane_sms: int, overlap: bool, hnd: bool, output_json: Path) -> None:
    """Measure every case and print the best layout of each."""
    check_result_file(output_json, overwrite=True)
    config = PRESETS[model]
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    tokens = max(sum(-(-n // 64) * 64 for n in lengths(*case).tolist()) for case in CASES)
    kernels = candidates(config)
    cases: list[dict[str, Any]] = []

    def measured(case: dict[str, Any]) -> None:
        show(case)
        cases.append(case)

    if hnd:
        for block_tokens in (16, 32, 64):
            for is_hnd in (False, True):
                cache = Cache.random(config, tokens, block_tokens, layers, hnd=is_hnd)
                bench = Bench(config, cache, is_hnd, num_sms, layers, overlap)
                for shape in ((64, 2000, False), (256, 1000, False)):
                    measured(bench.case(shape, [kernels[0], kernels[-1]], num_sms, torch.cuda.Stream()))
                del cache, bench
    else:
        opened = None
        if lane_sms:
            # Before anything else runs: partitions are verified on an idle device.
            torch.cuda.init()
            partition = SmPartition(lane_sms // SMS_PER_TPC, (num_sms - lane_sms) // SMS_PER_TPC)
            opened, why = open_backend("auto", [partition])
            click.echo(why, err=True)
        bench = Bench(
            config, Cache.random(config, tokens, 16, layers, hnd=False), False, num_sms, layers, overlap
        )
        for shape in CASES:
            measured(bench.case(shape, kernels, num_sms, torch.cuda.Stream()))
        if opened is not None:
            lane = torch.cuda.ExternalStream(opened.stream("decode", partition))
            for shape in FEW_CASES:
                measured(bench.case(shape, kernels, lane_sms, lane))
    report = {"model": model, "layers": layers, "overlap": overlap, "cases": cases}
    report["provenance"] = dataclasses.asdict(collect_provenance("cuda"))
    output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
