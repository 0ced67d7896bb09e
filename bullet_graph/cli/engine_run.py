"""What every measuring command does around its engine: opening it, watching its device, describing it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from bullet_graph.config import EngineConfig
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.output import EngineStats
from bullet_graph.graphs.compile_counts import CompileCounts
from bullet_graph.perf.energy import DeviceMonitor, DeviceReport
from bullet_graph.perf.provenance import Provenance, collect_provenance
from bullet_graph.perf.start_report import StartReport
from bullet_graph.runtime.artifacts.use import CacheUse
from bullet_graph.runtime.memory import MemoryLedger, format_bytes
from bullet_graph.runtime.resolve import Runtime, load_tokenizer
from bullet_graph.workloads import Workload, load_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Under which conditions a benchmark ran; part of every result.

    Attributes:
        load_format: ``dummy`` or ``safetensors``, resolved.
        dtype: of weights, activations and KV cache, resolved.
        engine: the engine's other settings, ``max_model_len`` resolved.
        num_steps: forwards during the measurement.
        num_preemptions: sequences that lost their KV blocks and were recomputed during the measurement.
        kv_blocks_peak: most KV blocks in use at once.
        device: what the device did during the measurement.
        start: what the engine's start took, before.
        compiles: what it compiled; all zero where a cache had it.
        cache_use: what a cache of captures has brought to it.
    """

    model: str
    load_format: str
    dtype: str
    policy: str
    seed: int
    engine: dict[str, Any]
    num_steps: int
    num_preemptions: int
    kv_blocks_peak: int
    kv_blocks_total: int
    device: DeviceReport
    start: StartReport
    compiles: CompileCounts
    cache_use: CacheUse
    provenance: Provenance


def open_engine(config: EngineConfig, *, quiet: bool, trace_decisions: Path | None = None) -> Engine:
    """Build the engine; unless quiet, show its memory ledger first and progress bars where somebody watches.

    Args:
        config: its settings.
        quiet: show nothing.
        trace_decisions: write every decision to this file, in the place of one that is there.
    """
    if trace_decisions is not None:
        # Whether it may be replaced, the command has checked.
        trace_decisions.unlink(missing_ok=True)
    engine = Engine(
        **config.values(),
        trace_decisions=trace_decisions,
        on_ledger=None if quiet else _print_ledger,
        use_tqdm=not quiet and sys.stderr.isatty(),
    )
    if not quiet and engine.capture is not None:
        capture = engine.capture
        click.echo(
            f"partitions: {engine.partition_backend}\n"
            f"{capture.num_graphs:,} graphs: compiled in {capture.compile_seconds:.1f} s, captured in "
            f"{capture.capture_seconds:.1f} s, {format_bytes(capture.num_bytes)}",
            err=True,
        )
        phases = engine.start_report.seconds.items()
        click.echo("start: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases), err=True)
    return engine


def load_requests(runtime: Runtime, trace: str, num_prompts: int | None, *, seed: int) -> Workload:
    """The workload for a model; see :func:`bullet_graph.workloads.load_workload`.

    Args:
        runtime: of the model, whose tokenizer counts the tokens of a file with texts.
        trace: its name or file.
        num_prompts: the first so many requests, or None for all.
        seed: of a synthetic workload.
    """
    tokenizer = load_tokenizer(runtime)
    return load_workload(
        trace,
        num_requests=num_prompts,
        seed=seed,
        tokenize=None if tokenizer is None else tokenizer.encode,
    )


def watch_device(engine: Engine) -> DeviceMonitor:
    """A monitor of the engine's GPU, or of nothing on the CPU."""
    if engine.device_name != "cuda":
        return DeviceMonitor(None)
    return DeviceMonitor.for_gpu(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))


def resolved_load_format(config: EngineConfig, runtime: Runtime) -> str:
    """``dummy`` or ``safetensors``: where the weights come from."""
    return "dummy" if runtime.folder is None or config.load_format == "dummy" else "safetensors"


def describe_run(
    config: EngineConfig,
    runtime: Runtime,
    before: EngineStats,
    after: EngineStats,
    device: DeviceReport,
    engine: Engine,
) -> RunRecord:
    """Describe a measurement from the engine's start, and its statistics before and after."""
    return RunRecord(
        model=config.model,
        load_format=resolved_load_format(config, runtime),
        dtype=str(runtime.dtype).removeprefix("torch."),
        policy=str(config.policy),
        seed=config.seed,
        engine=engine_settings(config, runtime),
        num_steps=after.num_steps - before.num_steps,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        kv_blocks_peak=after.kv_blocks_peak,
        kv_blocks_total=after.kv_blocks_total,
        device=device,
        start=engine.start_report,
        compiles=engine.compiles,
        cache_use=engine.cache_use,
        provenance=collect_provenance(runtime.device.type),
    )


def engine_settings(config: EngineConfig, runtime: Runtime) -> dict[str, Any]:
    """An engine's settings for a result, those left out that it has fields of its own for."""
    own_fields = ("model", "load_format", "dtype", "device", "policy", "seed")
    settings = {name: value for name, value in config.values().items() if name not in own_fields}
    return settings | {"max_model_len": runtime.max_model_len, "slo": str(config.slo)}


def _print_ledger(ledger: MemoryLedger) -> None:
    table = Table("memory", title="Memory ledger", title_justify="left")
    table.add_column("size", justify="right")
    for label, num_bytes in ledger.rows():
        table.add_row(label, format_bytes(num_bytes))
    Console(stderr=True).print(table)
