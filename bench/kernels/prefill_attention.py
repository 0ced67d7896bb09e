"""Attention of prompts to the paged KV cache and to their own rows, and the forwards around it, on one GPU.

    python bench/kernels/prefill_attention.py --output-json bench/results/h200/prefill_attention.json

Parts: attention, that of each layer by itself; forward, llama-3.1-8b's layers with it, random weights; cached, the
attention of one prompt's chunk to the cached tokens before it, with fa3 and with fa2, which divides them. Both ways
take turns, replay by replay of a CUDA graph over --layers layers, so that the power cap weighs on both alike; figures
are medians. Blocks of the cache are in random order, as after hours of service. It takes some 40 s, and minutes more
where FlashInfer has yet to compile its kernels.
"""

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

# Run as a script, only this file's own folder would be looked in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels.gpu_command import GpuCommand
from bench.kernels.sustained import MAX_ERROR, relative_error
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.errors import DeviceError
from bullet_graph.kernels.attention import LayerRows, MixedAttention
from bullet_graph.kernels.flashinfer_attention import (
    AttentionLane,
    PagedBatch,
    RaggedBatch,
    prefill_backend,
)
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.ops import RowInputs
from bullet_graph.kernels.shapes import prefill_workspace_bytes
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder, cos_sin_table, eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import dummy_weights
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.runtime.rows import Rows, lay_out
from bullet_graph.runtime.step import PrefillBatch

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
BLOCK_TOKENS = 16
CASES = ((4, 512), (4, 2048), (1, 8192), (8, 1024))
"""(prompts, tokens of each)"""
CACHED_CASES = (
    (64, 2048),
    (128, 1024),
    (128, 4096),
    (176, 4096),
    (256, 4096),
    (320, 4096),
    (384, 4096),
    (512, 4096),
)
"""(tokens, cached tokens before them)"""
MAX_FORWARD_ERROR = 5e-2
"""What attention rounds otherwise grows from layer to layer."""
WARM_UP_S = 3.0
_LEAST_TURNS = 3

Run = Callable[[], torch.Tensor]


def prompts_of(num_prompts: int, tokens: int, num_blocks: int, cached: int = 0) -> Rows:
    """Rows of prompts behind ``cached`` tokens each; blocks are scattered over the cache, the first of it left out."""
    counts = np.full(num_prompts, -(-(cached + tokens) // BLOCK_TOKENS), dtype=np.int32)
    rng = np.random.default_rng(num_prompts)
    return lay_out(
        PrefillBatch(
            slots=np.arange(num_prompts, dtype=np.int32),
            token_ids=rng.integers(0, 1000, num_prompts * tokens).astype(np.int32),
            q_indptr=np.arange(num_prompts + 1, dtype=np.int32) * np.int32(tokens),
            starts=np.full(num_prompts, cached, dtype=np.int32),
            kv_indptr=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            kv_indices=(1 + rng.permutation(num_blocks - 1)[: counts.sum()]).astype(np.int32),
            samples=np.ones(num_prompts, dtype=np.bool_),
        ),
        None,
        BLOCK_TOKENS,
    )


def attention_flops(config: ModelConfig, num_prompts: int, tokens: int, cached: int = 0) -> float:
    """Of one layer: two products of 2 · head_dim operations a (query, key) pair and head."""
    return 4.0 * config.q_size * num_prompts * attention_pairs(tokens, cached)


class Attentions:
    """The ways to attend; plans of one batch at a time."""

    def __init__(self, decoder: Decoder) -> None:
        if prefill_backend(DEVICE) != "fa3":
            raise DeviceError(
                "attention to a forward's own rows is compared where the engine uses it: on Hopper, compute "
                f"capability 9.0; this GPU has {'.'.join(map(str, torch.cuda.get_device_capability(DEVICE)))}"
            )
        scratch = torch.zeros(
            prefill_workspace_bytes(decoder.config),
            dtype=torch.uint8,
            device=DEVICE,
        )
        self._lanes = {
            way: AttentionLane(
                decoder.config,
                decoder.cache,
                dtype=DTYPE,
                backend="fa2" if way == "fa2" else "fa3",
                causal=True,
                float_workspace=scratch,
            )
            for way in ("fa3", "ragged", "fa2")
        }

    def plan(self, rows: Rows) -> dict[str, MixedAttention]:
        """Plan fresh prompts, paged and ragged."""
        ragged = self._lanes["ragged"].plan_ragged(
            RaggedBatch(torch.from_numpy(rows.q_indptr).to(DEVICE), torch.from_numpy(rows.q_indptr))
        )
        return {
            "paged": self._plan_paged("fa3", rows),
            "ragged": MixedAttention(None, ragged, None, 0, rows.num_prefill_rows),
        }

    def plan_cached(self, rows: Rows) -> dict[str, MixedAttention]:
        """Plan continued prompts, with fa3 and with fa2."""
        return {way: self._plan_paged(way, rows) for way in ("fa3", "fa2")}

    def _plan_paged(self, way: str, rows: Rows) -> MixedAttention:
        q_indptr, kv_indptr, kv_lens = (
            torch.from_numpy(array) for array in (rows.q_indptr, rows.kv_indptr, rows.kv_lens)
        )
        paged = self._lanes[way].plan(
            PagedBatch(
                q_indptr=q_indptr.to(DEVICE),
                kv_indptr=kv_indptr.to(DEVICE),
                kv_indices=torch.from_numpy(rows.kv_indices).to(DEVICE),
                last_block_tokens=((kv_lens - 1) % BLOCK_TOKENS + 1).to(DEVICE),
                host_q_indptr=q_indptr,
                host_kv_indptr=kv_indptr,
                host_kv_lens=kv_lens,
                num_rows=rows.num_prefill_rows,
            ),
            captured=False,
        )
        return MixedAttention(paged, None, None, rows.num_prefill_rows, rows.num_prefill_rows)


def row_inputs(decoder: Decoder, rows: Rows) -> RowInputs:
    """Positions and places in the cache, on the GPU."""
    positions, kv_slots = (torch.from_numpy(a).to(DEVICE) for a in (rows.positions, rows.kv_slots))
    return RowInputs(positions, kv_slots, decoder.cos_sin)


def attention_runs(decoder: Decoder, rows: Rows, attentions: Mapping[str, MixedAttention]) -> dict[str, Run]:
    """Attention of each layer, over queries, keys and values of its own."""
    config, inputs = decoder.config, row_inputs(decoder, rows)
    layers: list[LayerRows] = []
    for index, layer in enumerate(decoder.weights.layers):
        shape = (len(rows.positions), config.q_size + 2 * config.kv_size)
        qkv = torch.randn(shape, dtype=DTYPE, device=DEVICE)
        q = TritonOps().rope_and_cache(qkv, inputs, *decoder.cache.layer(index), layer.head_norms, config)
        layers.append(LayerRows.of(q, qkv, config))
    outs = [torch.empty_like(layer_rows.q) for layer_rows in layers]

    def run(attention: MixedAttention) -> torch.Tensor:
        for index, layer_rows in enumerate(layers):
            attention.run_into(index, layer_rows, outs[index])
        return outs[-1]

    return {way: partial(run, attention) for way, attention in attentions.items()}


def forward_runs(decoder: Decoder, rows: Rows, attentions: Mapping[str, MixedAttention]) -> dict[str, Run]:
    """All layers, as the engine runs them on the whole GPU."""
    inputs, functions = row_inputs(decoder, rows), eager_functions(TritonOps())
    hidden = decoder.embed(torch.from_numpy(rows.token_ids).to(DEVICE))

    def run(attention: MixedAttention) -> torch.Tensor:
        return decoder.run_layers(hidden, inputs.positions, inputs.kv_slots, attention, functions).x

    return {way: partial(run, attention) for way, attention in attentions.items()}


def interleaved(
    runs: Mapping[str, Run], seconds: float, max_error: float = MAX_ERROR
) -> tuple[dict[str, float], float]:
    """Replay graphs of the runs in turn.

    Returns:
        (median time of each in ms, relative error of the last against the first).

    Raises:
        DeviceError: their results differ by more than ``max_error``.
    """
    graphs, outs = {}, {}
    for way, run in runs.items():
        run()
        graphs[way] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[way]):
            outs[way] = run()
    results = {}
    for way, graph in graphs.items():
        outs[way].fill_(torch.nan)
        graph.replay()
        results[way] = outs[way].float()
    ways = tuple(runs)
    error = relative_error(results[ways[1]], results[ways[0]])
    if not error <= max_error:
        raise DeviceError(
            f"both ways must give the same results: at most {max_error} apart, relative; found {error:.3g}"
        )
    turns: list[list[tuple[str, torch.cuda.Event, torch.cuda.Event]]] = []
    end = time.perf_counter() + seconds
    while len(turns) < _LEAST_TURNS or time.perf_counter() < end:
        turn = []
        for way in ways if len(turns) % 2 else ways[::-1]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[way].replay()
            stop.record()
            turn.append((way, start, stop))
        turns.append(turn)
        # Always one turn ahead of the GPU, which idles at no time, and no more.
        if len(turns) > 2:
            turns[-3][-1][2].synchronize()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {way: [] for way in runs}
    for way, start, stop in itertools.chain.from_iterable(turns):
        times[way].append(start.elapsed_time(stop))
    return {way: float(np.median(ms)) for way, ms in times.items()}, error


def warm_up(decoder: Decoder, rows: Rows, attentions: Attentions) -> None:
    """Bring the GPU to the clock and heat of sustained work."""
    runs = forward_runs(decoder, rows, attentions.plan(rows))
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:
        for run in runs.values():
            run()
        torch.cuda.synchronize()


def figures(
    config: ModelConfig,
    part: str,
    case: tuple[int, int],
    times_ms: Mapping[str, float],
    error: float,
    cached: int = 0,
) -> dict[str, Any]:
    """A row of the results; rates are of attention alone, and so of no meaning for a forward."""
    row: dict[str, Any] = {"part": part, "prompts": case[0], "tokens": case[1], "relative_error": error}
    if cached:
        row["cached_tokens"] = cached
    for way, ms in times_ms.items():
        row[f"{way}_us_per_layer"] = round(1e3 * ms / config.num_layers, 2)
        if part != "forward":
            flops = attention_flops(config, *case, cached) * config.num_layers
            row[f"{way}_tflops"] = round(flops / ms / 1e9, 1)
    first, second = times_ms.values()
    row["speedup"] = round(first / second, 4)
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what was measured, a line each."""
    print(f"{'':10} {'prompts':>12} {'cached':>6}  {'µs a layer':24} {'speedup':>8}   TFLOP/s")
    for row in rows:
        ways = [name.removesuffix("_us_per_layer") for name in row if name.endswith("_us_per_layer")]
        times = ", ".join(f"{way} {row[f'{way}_us_per_layer']:.1f}" for way in ways)
        rates = ", ".join(str(row[f"{way}_tflops"]) for way in ways if f"{way}_tflops" in row)
        print(
            f"{row['part']:10} {row['prompts']:4} x {row['tokens']:5} {row.get('cached_tokens', 0):6}  {times:24} "
            f"{row['speedup']:8.3f}   {rates}"
        )


@click.command(cls=GpuCommand)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="A case and part."
)
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True, help="Of the model.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
@torch.inference_mode()
def main(seconds: float, layers: int, output_json: Path) -> None:
    """Measure every case, print a table and write the JSON."""
    check_result_file(output_json, overwrite=True)
    torch.manual_seed(0)
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], num_layers=layers)
    num_blocks = 1 + max(prompts * -(-tokens // BLOCK_TOKENS) for prompts, tokens in CASES)
    longest = max(tokens for _, tokens in CASES)
    decoder = Decoder(
        config,
        dummy_weights(config, dtype=DTYPE, device=DEVICE, seed=0),
        KVCache(config, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, dtype=DTYPE, device=DEVICE),
        cos_sin_table(config, longest, DEVICE),
    )
    attentions = Attentions(decoder)
    warm_up(decoder, prompts_of(*CASES[1], num_blocks), attentions)
    results: list[dict[str, Any]] = []
    try:
        for case in CASES:
            rows = prompts_of(*case, num_blocks)
            planned = attentions.plan(rows)
            for part, make, max_error in (
                ("attention", attention_runs, MAX_ERROR),
                ("forward", forward_runs, MAX_FORWARD_ERROR),
            ):
                times_ms, error = interleaved(make(decoder, rows, planned), seconds, max_error)
                results.append(figures(config, part, case, times_ms, error))
                print(json.dumps(results[-1]), flush=True)
        for tokens, cached in CACHED_CASES:
            rows = prompts_of(1, tokens, num_blocks, cached)
            runs = attention_runs(decoder, rows, attentions.plan_cached(rows))
            times_ms, error = interleaved(runs, seconds / 2)
            results.append(figures(config, "cached", (1, tokens), times_ms, error, cached))
            print(json.dumps(results[-1]), flush=True)
    finally:
        print_table(results)
        report = {"layers": layers, "rows": results}
        report["provenance"] = dataclasses.asdict(collect_provenance("cuda"))
        output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
