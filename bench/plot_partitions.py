"""Plot decode and prefill by SM count, alone and side by side, from what `bench/partitions.py` wrote.

python bench/plot_partitions.py bench/results/h200/sm_scaling_smctrl.json bench/results/h200/sm_scaling.svg
"""

import json
from pathlib import Path

import click
import matplotlib
from matplotlib import pyplot as plt

DECODE, PREFILL, SHARED = "#1f6f8b", "#d1603d", "#555555"


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
def main(source: Path, target: Path) -> None:
    """Draw SOURCE (JSON) as TARGET (SVG or PNG)."""
    report = json.loads(source.read_text(encoding="utf-8"))
    points = report["points"]
    alone_decode = [p for p in points if p["prefill_sms"] is None]
    alone_prefill = [p for p in points if p["decode_sms"] is None]
    both = [p for p in points if p["decode_sms"] and p["prefill_sms"] and p["prefill_tokens_per_s"]]
    num_sms = max(p["decode_sms"] for p in alone_decode)
    step_ms = next(p["decode_step_ms"] for p in alone_decode if p["decode_sms"] == num_sms)
    rate = next(p["prefill_tokens_per_s"] for p in alone_prefill if p["prefill_sms"] == num_sms)

    # The same picture from the same figures: no date, no random ids.
    matplotlib.rcParams["svg.hashsalt"] = "bullet_graph"
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    alone_decode.sort(key=lambda p: p["decode_sms"])
    left.plot(*columns(alone_decode, "decode_sms", "decode_step_ms"), "o-", color=DECODE, label="alone")
    left.plot(*columns(both, "decode_sms", "decode_step_ms"), "s--", color=DECODE, label="beside prefill")
    left.set(xlabel="SMs of the decode lane", ylabel="decode step, ms", ylim=(0, None))
    left.set_title(f"decode, batch {report['batch_size']}, context {report['context']:,}")
    alone_prefill.sort(key=lambda p: p["prefill_sms"])
    middle.plot(
        *columns(alone_prefill, "prefill_sms", "prefill_tokens_per_s"), "o-", color=PREFILL, label="alone"
    )
    middle.plot(
        *columns(both, "prefill_sms", "prefill_tokens_per_s"), "s--", color=PREFILL, label="beside decode"
    )
    middle.set(xlabel="SMs of the prefill lane", ylabel="prefill, tokens/s", ylim=(0, None))
    middle.set_title(f"prefill, {report['prompt']:,}-token prompts")
    sizes = [p["decode_sms"] for p in both]
    shares = [step_ms / p["decode_step_ms"] + p["prefill_tokens_per_s"] / rate for p in both]
    right.axhline(1, color=SHARED, linewidth=0.8, linestyle=":")
    right.plot(sizes, shares, "s--", color=SHARED, label="decode share + prefill share")
    right.set(xlabel="SMs of the decode lane", ylabel="of the whole GPU, each phase alone")
    right.set_title("side by side against taking turns (1)")
    for axes in (left, middle, right):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
    device = report["provenance"]["device_name"]
    figure.suptitle(f"{report['model']} on {device}, {report['backend'].split(':')[0]}, sustained")
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def columns(points: list[dict[str, float]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Two columns of the points."""
    return [p[x] for p in points], [p[y] for p in points]


if __name__ == "__main__":
    main()
