"""What chunks of one wave gain over fixed ones, from the prefill points of a performance table.

    python bench/wave_gain.py capture/h200_llama-3.1-8b_bfloat16.json --output-json bench/results/h200/wave_gain.json

A wave on so many SMs is 16 rows an SM (128 × 256 tiles, one a SM, for matrices of the 8B shapes). `bench/waves.py`
scans chunk sizes more finely.
"""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bullet_graph.perf.table import PrefillPoint
from bullet_graph.perf.table_file import read_table

FIXED = (512, 1024, 2048)
ROWS_PER_SM = 16


def rates(points: list[PrefillPoint]) -> dict[int, float]:
    """Prompt tokens a second by chunk size."""
    return {p.tokens: p.tokens / p.ms * 1e3 for p in points if p.cached_tokens == 0}


@click.command()
@click.argument("table_json", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(table_json: Path, output_json: Path) -> None:
    """Compare and write the rates as JSON."""
    table = read_table(table_json)
    rows = []
    shown = Table("SMs", "wave", "tokens/s", *(f"against {size}" for size in FIXED))
    for sms in sorted({p.sms for p in table.points.prefill if p.sms is not None}):
        found = rates([p for p in table.points.prefill if p.sms == sms])
        wave = ROWS_PER_SM * sms
        if wave not in found:
            continue
        gains = {size: found[wave] / found[size] - 1 for size in FIXED if size in found and size != wave}
        rows.append({"sms": sms, "wave_tokens": wave, "tokens_per_s": found, "gain_over": gains})
        cells = (f"{100 * gains[size]:+.1f} %" if size in gains else "" for size in FIXED)
        shown.add_row(str(sms), str(wave), f"{found[wave]:,.0f}", *cells)
    Console().print(shown)
    output_json.write_text(
        json.dumps({"table": table_json.name, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
