"""Decode and prefill by SM count, alone and side by side, with the engine's own lanes.

    python -m bench.kernels.partitions --output-json FILE --plot bench/results/h200/sm_scaling.svg

A decode step has ``--batch-size`` rows at ``--context`` tokens; a prefill forward is one prompt of ``--prompt``
tokens. The ceiling is 1: each phase alone on the whole GPU, in turn. Side by side pays where the shares add up to more.
``--plot`` draws the result.
"""

import json
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

from bench.kernels.harness import DEVICE, GpuCommand, device_text, open_bench, parse_counts, watch_gpu
from bench.record import write_report
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.table import ProfilePoint

DECODE, PREFILL, SHARED = "#1f6f8b", "#d1603d", "#555555"


def draw(report: dict[str, Any], target: Path) -> None:
    """Draw a result as SVG or PNG."""
    points = report["points"]
    alone_decode = sorted((p for p in points if p["prefill_sms"] is None), key=lambda p: p["decode_sms"])
    alone_prefill = sorted((p for p in points if p["decode_sms"] is None), key=lambda p: p["prefill_sms"])
    both = [p for p in points if p["decode_sms"] and p["prefill_sms"] and p["prefill_tokens_per_s"]]
    step_ms = alone_decode[-1]["decode_step_ms"]
    rate = alone_prefill[-1]["prefill_tokens_per_s"]

    def columns(of: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
        return [p[x] for p in of], [p[y] for p in of]

    # The same picture from the same figures: no date, no random ids.
    mpl.rcParams["svg.hashsalt"] = "bullet_graph"
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    x, y = "decode_sms", "decode_step_ms"
    left.plot(*columns(alone_decode, x, y), "o-", color=DECODE, label="alone")
    left.plot(*columns(both, x, y), "s--", color=DECODE, label="beside prefill")
    left.set(xlabel="SMs of the decode lane", ylabel="decode step, ms", ylim=(0, None))
    left.set_title(f"decode, batch {report['batch_size']}, context {report['context']:,}")
    x, y = "prefill_sms", "prefill_tokens_per_s"
    middle.plot(*columns(alone_prefill, x, y), "o-", color=PREFILL, label="alone")
    middle.plot(*columns(both, x, y), "s--", color=PREFILL, label="beside decode")
    middle.set(xlabel="SMs of the prefill lane", ylabel="prefill, tokens/s", ylim=(0, None))
    middle.set_title(f"prefill, {report['prompt']:,}-token prompts")
    shares = [step_ms / p["decode_step_ms"] + p["prefill_tokens_per_s"] / rate for p in both]
    right.axhline(1, color=SHARED, linewidth=0.8, linestyle=":")
    right.plot([p["decode_sms"] for p in both], shares, "s--", color=SHARED, label="sum of both shares")
    right.set(xlabel="SMs of the decode lane", ylabel="share of the whole GPU, each phase alone")
    right.set_title("side by side against taking turns (1)")
    for axes in (left, middle, right):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
    device, backend = report["provenance"]["device_name"], report["backend"].split(":")[0]
    figure.suptitle(f"{report['model']} on {device}, {backend}, sustained")
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="llama-3.1-8b")
@click.option("--backend", default="auto", help="Partition backend.")
@click.option("--decode-sms", default="16,24,32,48,64,80,96,112", callback=parse_counts)
@click.option("--batch-size", type=click.IntRange(min=1), default=64)
@click.option("--context", type=click.IntRange(min=1), default=1000, help="Tokens per row.")
@click.option("--prompt", type=click.IntRange(min=1), default=2048, help="Tokens.")
@click.option("--seconds", type=click.FloatRange(min=0.05), default=2.0, help="Per point.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the result too, as SVG or PNG.")
def main(
    model: str,
    backend: str,
    decode_sms: tuple[int, ...],
    batch_size: int,
    context: int,
    prompt: int,
    seconds: float,
    output_json: Path,
    plot: Path | None,
) -> None:
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    decode = {"batch_size": batch_size, "context_tokens": context}
    wanted = [ProfilePoint("decode", **decode), ProfilePoint("prefill", tokens=prompt)]
    for sms in decode_sms:
        wanted += [
            ProfilePoint("decode", sms, **decode),
            ProfilePoint("prefill", num_sms - sms, tokens=prompt),
            ProfilePoint("split", sms, tokens=prompt, **decode),
        ]
    points: list[dict[str, Any]] = []
    with open_bench(model, wanted, decode_sms=decode_sms, backend=backend) as (bench, why):
        for point in wanted:
            with watch_gpu() as monitor:
                times_ms = bench.measure(point, seconds)
            step_ms = times_ms[0] if point.kind != "prefill" else None
            rate = 1e3 * prompt / times_ms[-1] if point.kind != "decode" else None
            prefill_sms = num_sms - (point.sms or 0) if point.kind == "split" else point.sms or num_sms
            points.append(
                {
                    "decode_sms": None if point.kind == "prefill" else point.sms or num_sms,
                    "prefill_sms": None if point.kind == "decode" else prefill_sms,
                    "decode_step_ms": step_ms,
                    "prefill_tokens_per_s": rate,
                    "watts": monitor.report.power_w and monitor.report.power_w.mean,
                }
            )
            shares = None
            if point.kind == "split":
                shares = points[0]["decode_step_ms"] / step_ms + rate / points[1]["prefill_tokens_per_s"]
            figures = (
                (point.kind, f"on {point.sms or num_sms} SMs"),
                (step_ms and f"{step_ms:.2f} ms a step", rate and f"{rate:,.0f} tokens/s"),
                (shares and f"shares add up to {shares:.2f}", device_text(monitor.report)),
            )
            click.echo(" ".join(str(text) for pair in figures for text in pair if text))
    settings = {"model": model, "backend": why, "batch_size": batch_size, "context": context}
    write_report(output_json, settings | {"prompt": prompt, "seconds": seconds, "points": points})
    if plot is not None:
        draw(json.loads(output_json.read_text(encoding="utf-8")), plot)


if __name__ == "__main__":
    main()
