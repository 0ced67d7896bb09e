"""Where splitting pays: prompt tokens per second under `split` over `mixed`, from the tables of measured times.

Sequences decode beside prompts without end. Both policies must make a decode step within the TPOT target: `mixed` by
the size of its chunk, `split` by the number of its SMs.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bullet_graph.models.presets import resolve_model
from bullet_graph.models.quantization import in_formats
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.perf.table import PerfTable, gpu_nickname, list_tables, read_table
from bullet_graph.planner.tuning import TUNING
from bullet_graph.runtime.performance import table_model

PLOT = "splitting.svg"
SECTION = """
## Where splitting pays

By the measured tables: sequences decode beside prompts without end, and both policies hold the TPOT target. Above 1,
`split` computes more prompt tokens; 0: it cannot hold the target; 2.5: also more, or `mixed` cannot hold it.

![Prompt tokens per second under split over mixed, by TPOT target]({path})"""
"""Of the report."""
LOADS = ((500, 8), (500, 128), (2000, 32), (8000, 8), (8000, 32))
"""Tokens in the KV cache of each sequence, and sequences that decode; a prompt has as many tokens."""
TARGETS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
"""TPOT targets, as multiples of a decode step alone."""
_MAX_ROWS, _ROW_STEP, _HIGHEST = 8192, 64, 2.5


def mixed_rate(model: PerformanceModel, context: int, batch: int, target_ms: float) -> float:
    """The most prompt tokens per ms in forwards with the decode rows that end within the target; 0: none does."""
    sizes = range(_ROW_STEP, _MAX_ROWS - batch + 1, _ROW_STEP)
    times = ((rows, model.mixed(rows, rows * context / 2, batch, batch * context).ms) for rows in sizes)
    return max((rows / ms for rows, ms in times if ms <= target_ms), default=0.0)


def split_rate(model: PerformanceModel, context: int, batch: int, target_ms: float) -> float:
    """The most prompt tokens per ms beside decode steps on SMs of their own, within the target; 0: none is."""
    best = 0.0
    for sms in model.decode_sms:
        others = model.num_sms - sms
        rows = model.wave_chunk_tokens(TUNING.lane_chunk_tokens * others // model.num_sms, others)
        both = model.split(sms, batch, batch * context, rows, rows * context / 2)
        if both.decode_ms <= target_ms:
            best = max(best, rows / both.prefill_ms)
    return best


def ratios(model: PerformanceModel, context: int, batch: int) -> list[tuple[float, float]]:
    """(target over a decode step alone, rate of `split` over that of `mixed`), where one of them holds the target."""
    step_ms = model.decode(batch, batch * context).ms
    found = []
    for target in TARGETS:
        mixed, split = (rate(model, context, batch, target * step_ms) for rate in (mixed_rate, split_rate))
        if mixed or split:
            found.append((target, split / mixed if mixed else float("inf")))
    return found


def draw_splitting() -> Figure:
    """A panel for each table that comes with the package; rates beyond the axis are at its end."""
    tables = [read_table(path) for path in list_tables()]
    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(2, -(-len(tables) // 2), sharex=True, sharey=True).flat
    for panel, table in zip(panels, tables, strict=False):
        _draw(panel, table, LOADS)
    figure.axes[0].legend(title="sequences × context", fontsize=8, title_fontsize=8)
    figure.supxlabel("TPOT target ÷ decode step alone")
    figure.supylabel("prompt tokens/s: split ÷ mixed")
    return figure


def _draw(panel: Axes, table: PerfTable, loads: Sequence[tuple[int, int]]) -> None:
    kv = "fp8" if table.key.shape.get("fp8_kv") else "auto"
    shape = in_formats(resolve_model(table.key.model).config, quantization=None, kv_cache_dtype=kv)
    model = table_model(table, max(batch for _, batch in loads), shape)
    for context, batch in loads:
        points = ratios(model, context, batch)
        shown = [min(ratio, _HIGHEST) for _, ratio in points]
        panel.plot([target for target, _ in points], shown, "o-", markersize=3, label=f"{batch} × {context:,}")
    panel.axhline(1.0, color="#999999", linewidth=1)
    panel.set_title(f"{table.key.model}{', FP8 KV' if kv == 'fp8' else ''}, {gpu_nickname(table.key.gpu).upper()}")
    panel.set_ylim(0, _HIGHEST)
