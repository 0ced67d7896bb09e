"""``bullet-graph bench startup``: how long an engine takes to start, each time in a new process."""

import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

from bullet_graph.cli.engine_run import describe_config
from bullet_graph.cli.options import COUNT, FILE, engine_options, result_options
from bullet_graph.cli.result_file import Output, check_plot_file, write_result_file
from bullet_graph.cli.tables import print_line, print_table, table_of
from bullet_graph.config import EngineConfig
from bullet_graph.errors import BulletGraphError
from bullet_graph.perf.energy import DeviceMonitor, open_probe
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.perf.start_report import PhaseName, StartPhase, StartReport
from bullet_graph.runtime.resolve import resolve


@dataclass(frozen=True, slots=True)
class StartKind:
    """A way to start: ``num_iters`` times, each with empty folders for compiled kernels, or those of the last start."""

    name: str
    config: EngineConfig
    num_iters: int
    empty_caches: bool = False


@dataclass(frozen=True, slots=True)
class StartRun:
    """One start, with phases in the order of their ends; seconds since its process was started.

    ``startup_s`` is when requests could be added. ``capture``, ``compiles`` and ``cache_use`` are of the engine's own
    reports; ``num_missing_graphs`` were left to be captured after the first token.
    """

    startup_s: float
    first_token_s: float
    phases: tuple[StartPhase, ...]
    capture: dict[str, Any] | None
    compiles: dict[str, int]
    cache_use: dict[str, Any]
    num_missing_graphs: int

    @property
    def seconds(self) -> dict[PhaseName, float]:
        """Seconds of each phase, in the order in which phases began."""
        return StartReport(0.0, None, self.phases).seconds


@click.command()
@engine_options(max_num_seqs=256, without=("trace_decisions",))
@click.option(
    "--num-iters-cold",
    type=COUNT,
    default=1,
    help="Starts with empty caches of compiled kernels; the last of them fills those of the warm ones.",
)
@click.option(
    "--num-iters-warm",
    type=COUNT,
    default=3,
    help="Starts with filled caches; and, with --capture-cache, as many of each kind from that and with empty ones.",
)
@click.option("--plot", type=FILE, help="Draw the phases over time: a file ending in .svg or .png.")
@result_options
def startup(config: EngineConfig, num_iters_cold: int, num_iters_warm: int, plot: Path | None, output: Output) -> None:
    """Time an engine's start, from a new process to its first token, phase by phase.

    Each start is a process of its own, so that imports count. A cold one has empty folders for what Inductor, Triton
    and FlashInfer compile; a warm one has those that a cold one filled. They are private ones: yours are neither read
    nor written. With --capture-cache, both do without it, and a third kind starts from it, with empty folders. On a GPU
    a fourth does so with --ready hot. Files of weights may be in the operating system's cache in all of them.

    \b
    Examples:
      bullet-graph bench startup --model tiny --num-iters-cold 1 --num-iters-warm 3
      bullet-graph bench startup --model llama-3.1-8b --policy auto --ready hot \\
          --capture-plan llama-3.1-8b_bfloat16_conv --plot start.svg --output-json start.json
      bullet-graph bench startup --model llama-3.1-8b --capture-cache auto --output-json start.json
    """
    check_plot_file(plot, overwrite=output.overwrite)
    runtime = resolve(config)  # errors show before a process is started
    without = dataclasses.replace(config, capture_cache=None, self_check="sample")
    kinds = [StartKind("cold", without, num_iters_cold, empty_caches=True), StartKind("warm", without, num_iters_warm)]
    if config.capture_cache is not None:
        kinds.append(StartKind("cached", config, num_iters_warm, empty_caches=True))
        if config.ready == "all" and runtime.device.type == "cuda":
            hot = dataclasses.replace(config, ready="hot")
            kinds.append(StartKind("cached_hot", hot, num_iters_warm, empty_caches=True))
    provenance = dataclasses.asdict(collect_provenance(runtime.device))
    with DeviceMonitor(open_probe(runtime.device, config.tensor_parallel_size)) as monitor:
        runs = run_starts(kinds, quiet=output.as_json)
    fields: dict[str, Any] = {}
    for kind, of_kind in runs.items():
        fields |= _kind_fields(kind, of_kind)
    fields |= describe_config(config, runtime)
    fields |= {"energy_joules": monitor.report.energy_joules, "provenance": provenance}
    title = f"{config.model}, {fields['dtype']}, on {provenance['device_name']}"
    output.emit(fields, lambda: _print(title, runs, fields))
    if plot is not None:
        # matplotlib is an extra.
        from bullet_graph.cli.plots import draw_starts  # noqa: PLC0415

        median = {
            kind: sorted(of_kind, key=lambda run: run.startup_s)[(len(of_kind) - 1) // 2]
            for kind, of_kind in runs.items()
        }
        write_result_file(plot, draw_starts(plot.suffix[1:].lower(), median, phase_names(runs), title=title))


def run_starts(kinds: Sequence[StartKind], *, quiet: bool) -> dict[str, tuple[StartRun, ...]]:
    """Start engines one after another; returns the starts of each kind, by its name. The first kind has empty caches.

    Raises BulletGraphError from the settings, the model or the device.
    """
    runs: dict[str, tuple[StartRun, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="bullet-graph-startup-") as folder:
        caches = Path(folder)
        for kind in kinds:
            for number in range(kind.num_iters):
                if kind.empty_caches:
                    caches = Path(tempfile.mkdtemp(dir=folder))
                run = _start(kind.config, caches)
                runs[kind.name] = (*runs.get(kind.name, ()), run)
                if not quiet:
                    click.echo(
                        f"{kind.name} start {number + 1} of {kind.num_iters}: ready after {run.startup_s:.2f} s, "
                        f"first token after {run.first_token_s:.2f} s",
                        err=True,
                    )
    return runs


def _start(config: EngineConfig, caches: Path) -> StartRun:
    result = caches / "start.pickle"
    # The libraries' own variables: everything that is compiled stays below the folder.
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
    }
    result.unlink(missing_ok=True)
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bullet_graph.cli.bench.startup_child", str(result)],
        input=pickle.dumps(config),
        env=os.environ | folders,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    found = pickle.loads(result.read_bytes()) if result.exists() else None
    if isinstance(found, BulletGraphError):
        raise found
    if done.returncode != 0 or found is None:
        raise BulletGraphError(
            f"an engine that was to start in a process of its own ended with exit code {done.returncode}: "
            f"{done.stderr.decode(errors='replace').strip()[-2000:]}"
        )
    report, fields = found
    return read_run(report, fields, started_s)


def read_run(report: StartReport, fields: Mapping[str, Any], started_s: float) -> StartRun:
    """One start, from the report of its process and the time it was started, on a clock that both share."""
    offset_s = report.began_s - started_s
    phases = [StartPhase(p.name, offset_s + p.start_s, offset_s + p.end_s) for p in report.phases]
    process = StartPhase("process", 0.0, min(phase.start_s for phase in phases))
    assert report.ready_s is not None
    return StartRun(
        startup_s=offset_s + report.ready_s,
        first_token_s=max(phase.end_s for phase in phases),
        phases=(process, *phases),
        **fields,
    )


def phase_names(runs: Mapping[str, Sequence[StartRun]]) -> list[PhaseName]:
    """Phases that any start had, in the order of a start."""
    there = {phase.name for of_kind in runs.values() for run in of_kind for phase in run.phases}
    return [name for name in get_args(PhaseName) if name in there]


def _kind_fields(kind: str, runs: Sequence[StartRun]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    return {
        f"avg_{kind}_startup_time": float(np.mean([run.startup_s for run in runs])),
        f"avg_{kind}_first_token_time": float(np.mean([run.first_token_s for run in runs])),
        f"num_iters_{kind}": len(runs),
        f"{kind}_startup_times": [run.startup_s for run in runs],
        f"{kind}_phases": {name: float(np.mean([run.get(name, 0.0) for run in seconds])) for name in seconds[0]},
        f"{kind}_runs": [dataclasses.asdict(run) for run in runs],
    }


def _print(title: str, runs: Mapping[str, Sequence[StartRun]], fields: Mapping[str, Any]) -> None:
    kinds = (f"{kind} ({len(of_kind)})" for kind, of_kind in runs.items())
    table = table_of("phase, s", *kinds, title=f"Starts: {title}")
    for name in phase_names(runs):
        table.add_row(name, *(f"{fields[f'{kind}_phases'].get(name, 0.0):,.2f}" for kind in runs))
    table.add_section()
    for label, what in (("ready", "startup"), ("first token out", "first_token")):
        table.add_row(label, *(f"{fields[f'avg_{kind}_{what}_time']:,.2f}" for kind in runs))
    print_table(table)
    print_line("Means of all starts; phases may overlap.")
