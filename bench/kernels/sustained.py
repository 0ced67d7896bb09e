"""What the forwards of a whole workload take by themselves, sustained under the power cap: a measured limit.

    python -m bench.kernels.sustained --output-json bench/results/h200/sustained.json

The engine's own forwards follow one another without a scheduler. Each has as many prompt rows, decode rows, keys and
values as the workload has on average. The limit is the time of a forward times the number of forwards. One continued
chunk stands for all prompt rows of a forward, so the limit holds within some percent.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.kernels.harness import (
    DENSE_PRESETS,
    GpuCommand,
    device_text,
    open_bench,
    output_option,
    parse_counts,
    product_ceiling_tflops,
    watch_gpu,
)
from bench.record import write_report
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.roofline import layer_matrices
from bullet_graph.perf.table import ProfilePoint
from bullet_graph.workloads import WorkloadRequest, load_workload

WORKLOADS = (("azure:conv", 600), ("azure:code", 400))


@dataclass(frozen=True, slots=True)
class AverageForward:
    """The forward that stands for all forwards of a workload.

    Attributes:
        rows: prompt rows and decode rows.
        decode_rows: of them.
        context: tokens that a decode row attends to.
        cached: tokens before the prompt rows, so that these attend to as many keys as prompts do on average.
        repeats: forwards of the whole workload.
    """

    rows: int
    decode_rows: int
    context: int
    cached: int
    repeats: float

    @property
    def prompt_rows(self) -> int:
        """Rows of the one prompt chunk."""
        return self.rows - self.decode_rows

    @property
    def point(self) -> ProfilePoint:
        """As the workbench measures it."""
        return ProfilePoint(
            "mixed",
            batch_size=self.decode_rows,
            context_tokens=self.context,
            tokens=self.prompt_rows,
            cached_tokens=self.cached,
        )

    def flops(self, config: ModelConfig) -> float:
        """Operations of the layers' products, the output head and attention."""
        products = 2.0 * self.rows * sum(map(math.prod, layer_matrices(config)))
        pairs = self.decode_rows * self.context + attention_pairs(self.prompt_rows, self.cached)
        head = 2.0 * (self.decode_rows + 1) * config.hidden_size * config.vocab_size
        return config.num_layers * (products + 4.0 * config.q_size * pairs) + head


def average_forward(requests: Sequence[WorkloadRequest], rows: int) -> AverageForward:
    """Spread the tokens of a workload evenly over forwards of ``rows`` rows.

    The first token of an output comes from the prompt's forward; each other token is a decode row.
    """
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    decode_tokens = sum(request.output_tokens - 1 for request in requests)
    repeats = (prompt_tokens + decode_tokens) / rows
    decode_rows = int(decode_tokens / repeats)
    # Output token k + 1 attends to the prompt and k tokens, its own included.
    kv_tokens = sum((r.output_tokens - 1) * (r.prompt_tokens + r.output_tokens / 2) for r in requests)
    depth = sum(attention_pairs(request.prompt_tokens) for request in requests) / prompt_tokens
    return AverageForward(
        rows=rows,
        decode_rows=decode_rows,
        context=max(1, int(kv_tokens / max(decode_tokens, 1))),
        cached=max(0, int(depth - (rows - decode_rows + 1) / 2)),
        repeats=repeats,
    )


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(DENSE_PRESETS), default="llama-3.1-8b")
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto")
@click.option("--rows", default="512,1024,2048", callback=parse_counts, help="Per forward.")
@click.option("--seconds", type=click.FloatRange(min=0.05), default=2.4, help="Per figure.")
@output_option
def main(model: str, kv_cache_dtype: str, rows: tuple[int, ...], seconds: float, output_json: Path) -> None:
    config = PRESETS[model]
    forwards = [
        (f"{name}={count}", average_forward(load_workload(name, num_requests=count).requests, number))
        for name, count in WORKLOADS
        for number in rows
    ]
    ceiling = product_ceiling_tflops()
    cases: list[dict[str, Any]] = []
    with open_bench(model, [forward.point for _, forward in forwards], kv_cache_dtype=kv_cache_dtype) as (bench, _):
        for workload, forward in forwards:
            bench.measure(forward.point, seconds / 2)  # to the power cap
            with watch_gpu() as monitor:
                (ms,) = bench.measure(forward.point, seconds)
            total_s = ms * forward.repeats / 1e3
            tflops = forward.flops(config) / ms / 1e9
            click.echo(
                f"{workload:16} {forward.repeats:6.0f} forwards of {forward.rows:5} rows: {ms:7.3f} ms each, "
                f"{total_s:6.2f} s in all, {tflops:.0f} TFLOP/s ({ceiling:.0f} in a bf16 product), "
                f"{device_text(monitor.report)}"
            )
            measured = {"step_ms": round(ms, 4), "seconds": round(total_s, 4), "tflops": round(tflops, 1)}
            cases.append({"workload": workload, **asdict(forward), **measured, "device": asdict(monitor.report)})
    settings = {"model": model, "kv_cache_dtype": kv_cache_dtype, "product_tflops": ceiling}
    write_report(output_json, settings | {"cases": cases})


if __name__ == "__main__":
    main()
