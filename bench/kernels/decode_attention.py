"""Decode attention: FlashInfer's tensor-core decode and the Triton kernels, in several layouts of the latter.

    python bench/kernels/decode_attention.py --output-json bench/results/h200/decode_attention.json

Every measurement replays a CUDA graph that runs one batch over the caches of several layers, which together are
larger than the L2. Rates count the keys and values read once. FlashInfer is measured before and after the
Triton kernels, since clocks fall as the GPU warms up.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bullet_graph.models import flashinfer_attention
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.flashinfer_attention import AttentionLane, PagedBatch, decode_workspace_bytes
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.triton_decode_attention import (
    DecodeBatch,
    DecodeKernelSettings,
    TritonDecodeAttention,
    default_settings,
)
from bullet_graph.partition.backend import open_backend
from bullet_graph.partition.spec import SMS_PER_TPC, SmPartition
from bullet_graph.perf.provenance import collect_provenance

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
MAX_ROWS = 256
HND_LAYOUT = 1
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
MEASURED_US = 12_000.0
"""Of each measurement's replays."""


@dataclass
class Cache:
    """What the kernels ask of a KV cache, in either layout."""

    block_tokens: int
    layers: list[tuple[Tensor, Tensor]]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.layers[index]

    @classmethod
    def random(
        cls, config: ModelConfig, tokens: int, block_tokens: int, num_layers: int, *, hnd: bool
    ) -> "Cache":
        inner = (block_tokens, config.num_kv_heads)
        shape = (num_layers, 2, tokens // block_tokens, *(inner[::-1] if hnd else inner), config.head_dim)
        data = torch.empty(shape, dtype=DTYPE, device=DEVICE)
        for layer in data:
            layer.normal_()
        return cls(block_tokens, [(layer[0], layer[1]) for layer in data])

    def turned(self) -> "Cache":
        """The same memory with heads and tokens exchanged."""
        return Cache(self.block_tokens, [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in self.layers])


def lengths(rows: int, context: int, spread: bool) -> np.ndarray[Any, np.dtype[np.int32]]:
    if not spread:
        return np.full(rows, context, dtype=np.int32)
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, rows)
    return np.clip(drawn * context / drawn.mean(), 1, 16384).astype(np.int32)


def paged_batch(
    kv_lens: np.ndarray[Any, np.dtype[np.int32]], num_blocks: int, block_tokens: int
) -> PagedBatch:
    """Blocks in random order, as a cache has them after hours of service."""
    rows = len(kv_lens)
    indptr = np.concatenate(([0], np.cumsum(-(-kv_lens // block_tokens)))).astype(np.int32)
    indices = np.random.default_rng(1).permutation(num_blocks)[: indptr[-1]].astype(np.int32)
    if len(indices) < indptr[-1]:
        raise click.ClickException(f"a case needs {indptr[-1]} blocks, the cache holds {num_blocks}")
    q_indptr = torch.arange(rows + 1, dtype=torch.int32)
    return PagedBatch(
        q_indptr=q_indptr.to(DEVICE),
        kv_indptr=torch.from_numpy(indptr).to(DEVICE),
        kv_indices=torch.from_numpy(indices).to(DEVICE),
        last_block_tokens=torch.from_numpy((kv_lens - 1) % block_tokens + 1).to(DEVICE),
        host_q_indptr=q_indptr,
        host_kv_indptr=torch.from_numpy(indptr),
        host_kv_lens=torch.from_numpy(kv_lens),
        num_rows=rows,
    )


def us_per_layer(run_layer: Callable[[int], None], num_layers: int, stream: torch.cuda.Stream) -> float:
    """Median over replays of a graph of all layers."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_layer(0)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for layer in range(num_layers):
                run_layer(layer)
        finally:
            graph.capture_end()

        def replays_us(count: int) -> list[float]:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]

        estimate = min(replays_us(3))
        return float(np.median(replays_us(max(5, int(MEASURED_US / estimate))))) / num_layers


@dataclass
class Bench:
    """One model's cache and both kinds of kernels."""

    config: ModelConfig
    cache: Cache
    hnd: bool
    num_sms: int
    num_layers: int
    overlap: bool

    def __post_init__(self) -> None:
        self.flashinfer = AttentionLane(
            self.config,
            self.cache,  # type: ignore[arg-type]
            dtype=DTYPE,
            backend="fa2",
            causal=False,
            float_workspace=torch.zeros(
                decode_workspace_bytes(self.config, MAX_ROWS), dtype=torch.uint8, device=DEVICE
            ),
        )
        self.triton_cache = self.cache.turned() if self.hnd else self.cache
        self.lanes: dict[DecodeKernelSettings, TritonDecodeAttention] = {}

    def lane(self, settings: DecodeKernelSettings) -> TritonDecodeAttention:
        if settings not in self.lanes:
            self.lanes[settings] = TritonDecodeAttention(
                self.config,
                self.triton_cache,  # type: ignore[arg-type]
                max_rows=MAX_ROWS,
                num_sms=self.num_sms,
                settings=settings,
                overlap_launches=self.overlap,
            )
        return self.lanes[settings]

    def case(
        self,
        shape: tuple[int, int, bool],
        kernels: list[DecodeKernelSettings],
        num_sms: int,
        stream: torch.cuda.Stream,
    ) -> dict[str, Any]:
        kv_lens = lengths(*shape)
        batch = paged_batch(kv_lens, len(self.cache.layer(0)[0]), self.cache.block_tokens)
        num_bytes = int(kv_lens.sum()) * 2 * self.config.kv_size * DTYPE.itemsize
        q = torch.randn(len(kv_lens), self.config.num_heads, self.config.head_dim, device=DEVICE).to(DTYPE)
        expected, out = torch.empty_like(q), torch.empty_like(q)
        layout = HND_LAYOUT if self.hnd else flashinfer_attention._NHD_LAYOUT

        def timed(run_layer: Callable[[int], None]) -> dict[str, float]:
            us = us_per_layer(run_layer, self.num_layers, stream)
            return {"us_per_layer": us, "gb_per_s": num_bytes / us / 1e3}

        def flashinfer_timed() -> dict[str, float]:
            # Planned on the stream that runs it, whose copy it waits for.
            with torch.cuda.stream(stream):
                planned = self.flashinfer.plan(batch, captured=True, num_sms=num_sms)
            return timed(lambda layer: planned.run_into(layer, q, expected))

        results: list[dict[str, Any]] = []
        with mock.patch.object(flashinfer_attention, "_NHD_LAYOUT", layout):
            before = flashinfer_timed()
            for settings in kernels:
                plan = self.lane(settings).plan(
                    DecodeBatch(batch.kv_indptr, batch.kv_indices, batch.last_block_tokens), num_sms=num_sms
                )
                row: dict[str, Any] = {"settings": dataclasses.asdict(settings)}
                out.fill_(float("nan"))
                try:
                    row |= timed(lambda layer, plan=plan: plan.run_into(layer, q, out))  # type: ignore[misc]
                except OutOfResources as error:
                    row["error"] = str(error)
                else:
                    difference = (out.float() - expected.float()).norm() / expected.float().norm()
                    row["relative_error"] = float(difference)
                results.append(row)
            after = flashinfer_timed()
        return {
            "rows": shape[0],
            "context": shape[1],
            "lognormal": shape[2],
            "tokens": int(kv_lens.sum()),
            "num_sms": num_sms,
            "layout": "HND" if self.hnd else "NHD",
            "block_tokens": self.cache.block_tokens,
            "flashinfer": before,
            "flashinfer_after": after,
            "triton": results,
        }


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


@click.command()
@click.option("--model", default="llama-3.1-8b", show_default=True)
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
