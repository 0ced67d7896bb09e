"""Tables for people; JSON is :mod:`bullet_graph.cli.result_file`'s."""

from rich.console import Console
from rich.table import Table

from bullet_graph.cli.bench.latency import LatencyResult
from bullet_graph.cli.bench.throughput import ThroughputResult
from bullet_graph.cli.engine_run import RunRecord
from bullet_graph.perf.energy import DeviceReport, SampleRange
from bullet_graph.perf.metrics import PercentileSummary

_MOST_REASONS_SHOWN = 3


def print_throughput(result: ThroughputResult) -> None:
    """Show a throughput result on stdout."""
    figures = _figures(f"Throughput: {result.run.model}, {result.trace}, policy {result.run.policy}")
    figures.add_row("elapsed", f"{result.elapsed_time:,.2f} s")
    figures.add_row("requests", f"{result.num_requests:,} done, {result.num_failed:,} failed")
    figures.add_row("tokens in / out", f"{result.total_input_tokens:,} / {result.total_output_tokens:,}")
    figures.add_row("requests a second", f"{result.requests_per_second:,.2f}")
    figures.add_row("tokens a second", f"{result.tokens_per_second:,.1f}")
    figures.add_row("output tokens a second", f"{result.output_tokens_per_second:,.1f}")
    _add_run(figures, result.run)
    if result.joules_per_output_token is not None:
        figures.add_row("energy", f"{result.energy_joules:,.0f} J")
        figures.add_row("energy an output token", f"{result.joules_per_output_token:,.3f} J")
    console = Console()
    console.print(figures)
    console.print(
        _percentiles(
            {"TTFT": result.ttft_ms, "TPOT": result.tpot_ms, "ITL": result.itl_ms, "e2e": result.e2e_ms}
        )
    )
    for failure in result.failures[:_MOST_REASONS_SHOWN]:
        console.print(f"request {failure.index} failed: {failure.reason}", style="red", markup=False)
    if result.num_failed > _MOST_REASONS_SHOWN:
        console.print(f"… and {result.num_failed - _MOST_REASONS_SHOWN} more (all are in the JSON)")


def print_latency(result: LatencyResult) -> None:
    """Show a latency result on stdout, times and achieved bandwidth side by side."""
    figures = _figures(
        f"Latency: {result.run.model}, batch {result.batch_size}, {result.input_len} tokens in, "
        f"{result.output_len} out"
    )
    figures.add_row("batch latency, mean", f"{result.avg_latency * 1e3:,.2f} ms")
    for percentile, seconds in result.percentiles.items():
        figures.add_row(f"batch latency, p{percentile}", f"{seconds * 1e3:,.2f} ms")
    if result.decode_step_ms is not None and result.achieved_gb_per_s is not None:
        figures.add_row(
            "decode step, median",
            f"{result.decode_step_ms.p50:,.3f} ms · {result.achieved_gb_per_s:,.1f} GB/s",
        )
        figures.add_row(
            "of the measured copy",
            f"{result.share_of_copy_percent:.1f} % of {result.copy_gb_per_s:,.1f} GB/s",
        )
    _add_run(figures, result.run)
    console = Console()
    console.print(figures)
    console.print(_percentiles({"prefill": result.prefill_ms, "decode step": result.decode_step_ms}))
    if result.run.num_preemptions:
        console.print(
            "The KV cache was too small for the batch: times include recomputation.", style="bold red"
        )


def _figures(title: str) -> Table:
    table = Table("figure", title=title, title_justify="left", show_header=False)
    table.add_column("value", justify="right")
    return table


def _add_run(table: Table, run: RunRecord) -> None:
    table.add_row("device, dtype", f"{run.provenance.device_name}, {run.dtype}")
    table.add_row("steps, preemptions", f"{run.num_steps:,}, {run.num_preemptions:,}")
    table.add_row("KV blocks, peak of all", f"{run.kv_blocks_peak:,} of {run.kv_blocks_total:,}")
    _add_device(table, run.device)


def _add_device(table: Table, device: DeviceReport) -> None:
    """Rows for what the device told; none on a device that told nothing."""
    for label, unit, values in (
        ("SM clock", "MHz", device.sm_clock_mhz),
        ("power", "W", device.power_w),
        ("temperature", "°C", device.temperature_c),
    ):
        if values is not None:
            table.add_row(f"{label}, min / mean / max", f"{_range(values)} {unit}")


def _range(values: SampleRange) -> str:
    return f"{values.min:,.0f} / {values.mean:,.0f} / {values.max:,.0f}"


def _percentiles(summaries: dict[str, PercentileSummary | None]) -> Table:
    table = Table("ms")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for label, summary in summaries.items():
        if summary is not None:
            values = (summary.mean, summary.p50, summary.p90, summary.p99)
            table.add_row(label, *(f"{value:,.2f}" for value in values))
    return table
