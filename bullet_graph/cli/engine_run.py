"""What every measuring command does around its engine: build it, watch its device, describe the run."""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from bullet_graph.cli import EXIT_ERROR
from bullet_graph.cli.tables import table_of
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.engine import Engine
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.energy import DeviceMonitor, open_probe
from bullet_graph.perf.provenance import collect_provenance, without_folder
from bullet_graph.runtime.memory import MemoryLedger, format_bytes
from bullet_graph.runtime.resolve import Runtime, load_tokenizer
from bullet_graph.slo import Slo
from bullet_graph.workloads import Workload, load_workload

_OWN_FIELDS = ("model", "load_format", "dtype", "device", "policy", "seed")
"""Settings that results have fields of their own for."""


def open_engine(config: EngineConfig, *, quiet: bool, trace_decisions: Path | None = None) -> Engine:
    """Build an engine; unless ``quiet``, show its memory ledger, its CUDA graphs and progress bars on stderr.

    An existing file ``trace_decisions`` is replaced.
    """
    if not quiet:
        tell_random_weights(config)
    if trace_decisions is not None:
        # The command has checked that it may be replaced.
        trace_decisions.unlink(missing_ok=True)
    engine = Engine(
        **config.values(),
        trace_decisions=trace_decisions,
        on_ledger=None if quiet else _print_ledger,
        use_tqdm=not quiet and sys.stderr.isatty(),
    )
    if not quiet and config.prefix_caching and not engine.caches_prefixes:
        click.echo("prefix caching: off, as every layer of the model has a sliding window", err=True)
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


def leave_stuck_engine() -> NoReturn:
    """End the process although the engine's thread has not: an ordinary exit would wait for the device as well."""
    click.echo("error: the engine's thread is stuck in the device, and is left behind", err=True)
    os._exit(EXIT_ERROR)


def has_random_weights(config: EngineConfig) -> bool:
    """Whether the weights are random numbers: those of a preset, or with ``load_format`` dummy."""
    return config.load_format == "dummy" or (config.model in PRESETS and not Path(config.model).is_dir())


def tell_random_weights(config: EngineConfig) -> None:
    """Say on stderr if the weights are random."""
    if has_random_weights(config):
        click.echo(f"{config.model}: the weights are random, so its text means nothing", err=True)


def config_for(config: EngineConfig, policies: Sequence[Policy], slo: Slo) -> EngineConfig:
    """Settings of one engine that can serve under each policy in turn, and begins with these targets.

    The engine prepares the sizes that ``split:NUM_SMS`` names, unless another policy chooses the size: then it prepares
    those of ``config.decode_sms``, or of the performance table.
    """
    sizes = config.decode_sms
    chooses_size = any(policy.name in ("auto", "split") and policy.decode_sms is None for policy in policies)
    if not chooses_size:
        named = (policy.decode_sms for policy in policies)
        sizes += tuple(size for size in named if size is not None and size not in sizes)
    if len(policies) > 1 and any(policy.uses_prefill_lane for policy in policies):
        # An engine for auto or split can serve as any other; only that for split is refused early without a table.
        policy = Policy("split" if any(policy.name == "split" for policy in policies) else "auto")
    else:
        # The largest forward counts; and mixed may need a table where serial never does.
        policy = max(policies, key=lambda policy: (policy.chunk_tokens or math.inf, policy.name == "mixed"))
    return dataclasses.replace(config, policy=policy, slo=slo, decode_sms=sizes)


def load_requests(runtime: Runtime, trace: str, num_prompts: int | None, *, seed: int) -> Workload:
    """Load a workload; the model's tokenizer counts the tokens of texts."""
    tokenizer = load_tokenizer(runtime)
    tokenize = None if tokenizer is None else tokenizer.encode
    return load_workload(trace, num_requests=num_prompts, seed=seed, tokenize=tokenize)


def watch_device(engine: Engine) -> DeviceMonitor:
    """A monitor of the engine's GPUs, or of nothing on the CPU."""
    return DeviceMonitor(open_probe(engine.device, engine.config.tensor_parallel_size))


def describe_config(config: EngineConfig, runtime: Runtime) -> dict[str, Any]:
    """Fields of every result: the settings, those that the model and the device decide resolved."""
    settings = {
        name: without_folder(value) if isinstance(value, str) else value
        for name, value in config.values().items()
        if name not in _OWN_FIELDS
    }
    resolved = {"max_model_len": runtime.max_model_len, "slo": str(config.slo)}
    if runtime.hub_id is not None and runtime.folder is not None:
        resolved["revision"] = runtime.folder.name
    return {
        "model": without_folder(config.model),
        "load_format": "dummy" if has_random_weights(config) else "safetensors",
        "dtype": runtime.dtype_name,
        "policy": str(config.policy),
        "seed": config.seed,
        "engine": settings | resolved,
    }


def describe_run(config: EngineConfig, runtime: Runtime, engine: Engine) -> dict[str, Any]:
    """Fields of every result of one engine: its settings, its start, and where it ran."""
    return describe_config(config, runtime) | {
        "start": dataclasses.asdict(engine.start_report),
        "compiles": dataclasses.asdict(engine.compiles),
        "cache_use": dataclasses.asdict(engine.cache_use),
        "provenance": dataclasses.asdict(collect_provenance(runtime.device)),
    }


def _print_ledger(ledger: MemoryLedger) -> None:
    table = table_of("memory", "size", title="Memory ledger")
    for label, num_bytes in ledger.rows():
        table.add_row(label, format_bytes(num_bytes))
    Console(stderr=True).print(table)
