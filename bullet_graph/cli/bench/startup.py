"""How long engines take to start, each in a fresh process, with empty caches of kernels and with filled ones."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bullet_graph import errors
from bullet_graph.cli.engine_run import engine_settings, resolved_load_format
from bullet_graph.config import EngineConfig
from bullet_graph.errors import BulletGraphError
from bullet_graph.perf.provenance import Provenance, collect_provenance
from bullet_graph.perf.start_report import PhaseName
from bullet_graph.runtime.resolve import resolve

_CHILD = "bullet_graph.cli.bench.startup_child"
_SHOWN_STDERR_CHARS = 2000

_PROCESS = "process"
"""The phase before the imports: Python itself."""


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """A way to start.

    Attributes:
        name: of the fields in the result.
        num_iters: starts.
        empty_caches: each start has empty folders for compiled kernels; else those that the last one filled.
        settings: of the engine, in the place of those that all policies have.
    """

    name: str
    num_iters: int
    empty_caches: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimedPhase:
    """A stretch of a start; seconds since the process was started."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StartRun:
    """One start.

    Attributes:
        startup_s: from the start of the process until requests could be added.
        first_token_s: until the first token of a short request.
        phases: in the order of their ends; they may overlap.
        capture: see :class:`~bullet_graph.graphs.report.CaptureReport`; None where nothing is captured.
        compiles: what was compiled; see :class:`~bullet_graph.graphs.compile_counts.CompileCounts`.
        cache_use: what a capture cache gave; see :class:`~bullet_graph.runtime.artifacts.use.CacheUse`.
        num_missing_graphs: left to be captured when the token was out.
    """

    startup_s: float
    first_token_s: float
    phases: tuple[TimedPhase, ...]
    capture: dict[str, Any] | None
    compiles: dict[str, int]
    cache_use: dict[str, Any]
    num_missing_graphs: int

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, in the order in which phases began."""
        totals: dict[str, float] = {}
        for phase in sorted(self.phases, key=lambda phase: phase.start_s):
            totals[phase.name] = totals.get(phase.name, 0.0) + phase.end_s - phase.start_s
        return totals


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupResult:
    """What starts took.

    Attributes:
        runs: of each policy, by its name.
        load_format: ``dummy`` or ``safetensors``, resolved.
        engine: the engine's settings.
    """

    runs: Mapping[str, tuple[StartRun, ...]]
    model: str
    load_format: str
    dtype: str
    policy: str
    engine: dict[str, Any]
    provenance: Provenance

    def average(self, policy: str, what: str) -> float:
        """Mean ``startup_s`` or ``first_token_s`` of a policy."""
        return float(np.mean([getattr(run, what) for run in self.runs[policy]]))

    def phase_seconds(self, policy: str) -> dict[str, float]:
        """Mean seconds of each phase of a policy."""
        runs = [run.seconds for run in self.runs[policy]]
        return {name: float(np.mean([run.get(name, 0.0) for run in runs])) for name in runs[0]}

    @property
    def phase_names(self) -> list[str]:
        """Phases that any start had, in the order of a start."""
        there = {name for runs in self.runs.values() for run in runs for name in run.seconds}
        return [name for name in (_PROCESS, *get_args(PhaseName)) if name in there]

    def fields(self) -> dict[str, Any]:
        """The figures for a JSON file."""
        figures: dict[str, Any] = {}
        for policy, runs in self.runs.items():
            figures |= {
                f"avg_{policy}_startup_time": self.average(policy, "startup_s"),
                f"avg_{policy}_first_token_time": self.average(policy, "first_token_s"),
                f"num_iters_{policy}": len(runs),
                f"{policy}_startup_times": [run.startup_s for run in runs],
                f"{policy}_phases": self.phase_seconds(policy),
                f"{policy}_runs": [dataclasses.asdict(run) for run in runs],
            }
        own = {name: getattr(self, name) for name in ("model", "load_format", "dtype", "policy", "engine")}
        return figures | own | {"provenance": dataclasses.asdict(self.provenance)}


def run_startup(config: EngineConfig, policies: Sequence[StartPolicy], *, quiet: bool) -> StartupResult:
    """Start engines, one after another.

    The folders for compiled kernels are private ones: those of the user are neither read nor written.

    Args:
        config: the engine's settings.
        policies: the first has empty caches.
        quiet: do not tell of each start.

    Raises:
        BulletGraphError: from the settings, the model or the device.
    """
    runtime = resolve(config)  # raises for what can be known before a process is started
    runs: dict[str, tuple[StartRun, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="bullet-graph-startup-") as folder:
        caches = Path(folder)
        for policy in policies:
            of_policy: list[StartRun] = []
            for number in range(policy.num_iters):
                if policy.empty_caches:
                    caches = Path(tempfile.mkdtemp(dir=folder))
                of_policy.append(_start(dataclasses.replace(config, **policy.settings), caches))
                if not quiet:
                    run = of_policy[-1]
                    click.echo(
                        f"{policy.name} start {number + 1} of {policy.num_iters}: ready after {run.startup_s:.2f} s, "
                        f"first token after {run.first_token_s:.2f} s",
                        err=True,
                    )
            runs[policy.name] = tuple(of_policy)
    return StartupResult(
        runs=runs,
        model=config.model,
        load_format=resolved_load_format(config, runtime),
        dtype=str(runtime.dtype).removeprefix("torch."),
        policy=str(config.policy),
        engine=engine_settings(config, runtime),
        provenance=collect_provenance(runtime.device.type),
    )


def cache_variables(folder: Path) -> dict[str, str]:
    """Where a process is to keep what it compiles, by the libraries' own variables: all of it below ``folder``."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }


def _start(config: EngineConfig, caches: Path) -> StartRun:
    """Start an engine in a process of its own."""
    result = caches / "start.json"
    result.unlink(missing_ok=True)
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", _CHILD, str(result)],
        input=pickle.dumps(config),
        env=os.environ | cache_variables(caches),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if "error" in found:
        raise getattr(errors, found["error"])(found["message"])
    if done.returncode != 0 or not found:
        raise BulletGraphError(
            f"an engine that was to start in a process of its own ended with exit code {done.returncode}: "
            f"{done.stderr.decode(errors='replace').strip()[-_SHOWN_STDERR_CHARS:]}"
        )
    return read_run(found, started_s)


def read_run(found: Mapping[str, Any], started_s: float) -> StartRun:
    """One start, as its process tells it.

    Args:
        started_s: when the process was started, on the clock of ``time.perf_counter``, which both share.
    """
    offset_s = found["began_s"] - started_s
    phases = [
        TimedPhase(phase["name"], offset_s + phase["start_s"], offset_s + phase["end_s"])
        for phase in found["phases"]
    ]
    first = min(phases, key=lambda phase: phase.start_s)
    last = max(phases, key=lambda phase: phase.end_s)
    return StartRun(
        startup_s=offset_s + found["ready_s"],
        first_token_s=last.end_s,
        phases=(TimedPhase(_PROCESS, 0.0, first.start_s), *phases),
        capture=found["capture"],
        compiles=found["compiles"],
        cache_use=found["cache_use"],
        num_missing_graphs=found["num_missing_graphs"],
    )


def print_startup(result: StartupResult) -> None:
    """Show a table on stdout: a row for each phase, a column for each policy."""
    policies = list(result.runs)
    table = Table(
        "phase, s",
        title=f"Starts: {result.model}, {result.dtype}, on {result.provenance.device_name}",
        title_justify="left",
    )
    for policy in policies:
        table.add_column(f"{policy} ({len(result.runs[policy])})", justify="right")
    seconds = {policy: result.phase_seconds(policy) for policy in policies}
    for name in result.phase_names:
        table.add_row(name, *(f"{seconds[policy].get(name, 0.0):,.2f}" for policy in policies))
    table.add_section()
    for label, what in (("ready", "startup_s"), ("first token out", "first_token_s")):
        table.add_row(label, *(f"{result.average(policy, what):,.2f}" for policy in policies))
    Console().print(table)
    Console().print("Means of all starts; phases may overlap.")
