"""Where splitting pays: prompt tokens per second under `split` over `mixed`, from the tables of measured times.

Sequences decode beside prompts without end. Both policies must make a decode step within the TPOT target: `mixed` by
the size of its chunk, `split` by the number of its SMs.
"""

from bisect import bisect_right

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bullet_graph.models.presets import resolve_model
from bullet_graph.models.quantization import in_formats
from bullet_graph.models.sharding import shard
from bullet_graph.perf.performance import PerformanceModel, Prediction
from bullet_graph.perf.table import PerfTable, gpu_nickname, list_tables, read_table
from bullet_graph.planner.tuning import TUNING
from bullet_graph.runtime.performance import table_model

PLOT = "splitting.svg"
SECTION = """
## Where splitting pays

Sequences decode beside endless prompts; both policies hold the TPOT target. Above 1, `split` computes more prompt
tokens. 0: it cannot hold the target; 2.5: also more, or `mixed` cannot. Hollow: one side is beyond the measured table.
Bursts and the host's time do not count.

![Prompt tokens/s under split over mixed, by TPOT]({path})"""
"""Of the report."""
LOADS = ((500, 8), (500, 128), (2000, 32), (8000, 8), (8000, 32))
"""Tokens in the KV cache of each sequence, and sequences that decode; a prompt has as many tokens."""
TARGETS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
"""TPOT targets, as multiples of a decode step alone."""
_MAX_ROWS, _HIGHEST = 8192, 2.5


def mixed_rate(model: PerformanceModel, context: int, batch: int, target_ms: float) -> tuple[float, bool]:
    """Prompt tokens per ms in the largest forward with the decode rows within the target (0: none is); if measured."""

    def forward(rows: int) -> Prediction:
        return model.mixed(rows, rows * context / 2, batch, batch * context)

    sizes = range(TUNING.row_step, _MAX_ROWS - batch + 1, TUNING.row_step)
    rows = TUNING.row_step * bisect_right(sizes, target_ms, key=lambda rows: forward(rows).ms)
    return (rows / forward(rows).ms, forward(rows).measured) if rows else (0.0, True)


def split_rate(model: PerformanceModel, context: int, batch: int, target_ms: float) -> tuple[float, bool]:
    """The most prompt tokens per ms beside decode steps on SMs of their own within the target (0: none is)."""
    found = [(0.0, True)]
    for sms in model.decode_sms:
        others = model.num_sms - sms
        rows = model.wave_chunk_tokens(TUNING.lane_chunk_tokens * others // model.num_sms, others)
        both = model.split(sms, batch, batch * context, rows, rows * context / 2)
        found += [(rows / both.prefill_ms, both.measured)] if both.decode_ms <= target_ms else []
    return max(found)


def ratios(model: PerformanceModel, context: int, batch: int) -> list[tuple[float, float, bool]]:
    """(target over a decode step alone, `split` over `mixed`, both measured), where one of them holds the target."""
    step_ms, found = model.decode(batch, batch * context).ms, list[tuple[float, float, bool]]()
    for target in TARGETS:
        mixed, split = (rate(model, context, batch, target * step_ms) for rate in (mixed_rate, split_rate))
        if mixed[0] or split[0]:
            found.append((target, split[0] / mixed[0] if mixed[0] else float("inf"), mixed[1] and split[1]))
    return found


def draw_splitting() -> Figure:
    """A panel for each table that comes with the package."""
    tables, figure = [read_table(path) for path in list_tables()], Figure(figsize=(13, 7), layout="constrained")
    for panel, table in zip(
        figure.subplots(2, -(-len(tables) // 2), sharex=True, sharey=True).flat, tables, strict=False
    ):
        _draw(panel, table)
    figure.axes[0].legend(title="sequences × context", fontsize=8, title_fontsize=8)
    figure.supxlabel("TPOT target ÷ decode step alone")
    figure.supylabel("prompt tokens/s: split ÷ mixed")
    return figure


def _draw(panel: Axes, table: PerfTable) -> None:
    kv, ranks = "fp8" if table.key.shape.get("fp8_kv") else "auto", table.key.shape.get("num_ranks", 1)
    shape = in_formats(resolve_model(table.key.model).config, quantization=None, kv_cache_dtype=kv)
    model = table_model(table, max(batch for _, batch in LOADS), shard(shape, ranks, 0))
    for context, batch in LOADS:
        points = [(target, min(ratio, _HIGHEST), known) for target, ratio, known in ratios(model, context, batch)]
        (line,) = panel.plot(*zip(*((x, y) for x, y, _ in points), strict=True), label=f"{batch} × {context:,}")
        for x, y, is_measured in points:
            panel.plot(x, y, "o", markersize=4, color=line.get_color(), fillstyle="full" if is_measured else "none")
    panel.axhline(1.0, color="#999999", linewidth=1)
    gpus = f"{ranks} × " * (ranks > 1) + gpu_nickname(table.key.gpu).upper()
    panel.set_title(f"{table.key.model}{', FP8 KV' * (kv == 'fp8')}, {gpus}")
    panel.set_ylim(0, _HIGHEST)
