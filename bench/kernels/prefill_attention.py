"""Attention of prompts: operations per second, beside what a large matrix product reaches.

    python -m bench.kernels.prefill_attention --output-json bench/results/h200/prefill_attention.json

As the engine calls it: prompts from their first token on attend to the forward's own rows; chunks of a prompt whose
earlier chunks are in the KV cache attend to its blocks, which are in random order.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.kernels.harness import (
    DEVICE,
    DTYPE,
    GpuCommand,
    blocks_for,
    burst_us,
    output_option,
    paged_batch,
    product_ceiling_tflops,
    random_cache,
    random_tensor,
)
from bench.record import write_report
from bullet_graph.kernels.attention import LayerRows
from bullet_graph.kernels.flashinfer_attention import PrefillAttention, cached_modules
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.runtime.memory import prefill_workspace_bytes

FRESH = ((4, 512), (4, 2048), (1, 8192), (8, 1024))
"""(prompts, tokens of each)"""
CONTINUED = ((64, 2048), (128, 4096), (256, 4096), (512, 4096), (1024, 2048))
"""(tokens of a chunk, cached tokens before it)"""


def attention_flops(config: ModelConfig, num_prompts: int, tokens: int, cached: int = 0) -> float:
    """Operations of one layer: two products of 2 · head_dim operations per (query, key) pair and head."""
    return 4.0 * config.q_size * num_prompts * attention_pairs(tokens, cached)


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="llama-3.1-8b", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True)
@output_option
def main(model: str, layers: int, output_json: Path) -> None:
    """Measure every case and print its rate beside that of a large product."""
    config = dataclasses.replace(PRESETS[model], num_layers=layers)
    ceiling = product_ceiling_tflops()
    num_blocks = max(blocks_for(np.array([tokens + cached], dtype=np.int32)) for tokens, cached in CONTINUED)
    lane = PrefillAttention(
        config,
        random_cache(config, num_blocks),
        modules=cached_modules(Gpu.of(DEVICE), DTYPE, config),
        float_workspace=torch.zeros(prefill_workspace_bytes(config), dtype=torch.uint8, device=DEVICE),
    )
    cases: list[dict[str, Any]] = []

    def measure(num_prompts: int, tokens: int, cached: int, run_layer: Callable[[int], None]) -> None:
        def run() -> None:
            for layer in range(layers):
                run_layer(layer)

        us = burst_us(run) / layers
        tflops = attention_flops(config, num_prompts, tokens, cached) / us / 1e6
        click.echo(
            f"{num_prompts} x {tokens:5} tokens after {cached:5}: {us:8.1f} us a layer, {tflops:6.1f} TFLOP/s, "
            f"{100 * tflops / ceiling:.0f} % of a product's {ceiling:.0f}"
        )
        cases.append(
            {
                "prompts": num_prompts,
                "tokens": tokens,
                "cached_tokens": cached,
                "us_per_layer": round(us, 2),
                "tflops": round(tflops, 1),
            }
        )

    for num_prompts, tokens in FRESH:
        indptr = torch.arange(num_prompts + 1, dtype=torch.int32) * tokens
        ragged = lane.plan_ragged(indptr.to(DEVICE), indptr)
        q = random_tensor(num_prompts * tokens, config.num_heads, config.head_dim)
        rows = LayerRows.of(q, random_tensor(len(q), config.q_size + 2 * config.kv_size))
        out = torch.empty_like(q)
        measure(num_prompts, tokens, 0, lambda _, p=ragged, r=rows, o=out: p.run_into(0, r, o))  # type: ignore[misc]
    for tokens, cached in CONTINUED:
        paged = lane.plan(paged_batch(np.array([tokens + cached], dtype=np.int32), num_blocks, rows_each=tokens))
        q = random_tensor(tokens, config.num_heads, config.head_dim)
        rows, out = LayerRows(q, q, q), torch.empty_like(q)
        measure(1, tokens, cached, lambda layer, p=paged, r=rows, o=out: p.run_into(layer, r, o))  # type: ignore[misc]
    write_report(output_json, {"model": model, "layers": layers, "product_tflops": ceiling, "cases": cases})


if __name__ == "__main__":
    main()
