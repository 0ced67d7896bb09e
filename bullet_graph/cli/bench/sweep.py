"""Runs of ``bullet-graph bench sweep``: one engine serves every cell's next rate in turn, until all are found."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullet_graph.cli.bench.online import serve_online, warm_up
from bullet_graph.cli.bench.online_policies import config_for
from bullet_graph.cli.bench.sweep_cells import SYSTEM, Cell, WorkloadSpec, make_cells
from bullet_graph.cli.bench.sweep_file import CellKey, Sweep, SweepCell, SweepFile
from bullet_graph.cli.engine_run import load_requests, open_engine, resolved_load_format
from bullet_graph.cli.serving.table import figure
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.engine import Engine
from bullet_graph.errors import WorkloadError
from bullet_graph.models.progress import progress_bar
from bullet_graph.perf.goodput_search import GoodputSearch
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.runtime.performance import find_performance
from bullet_graph.runtime.resolve import resolve
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals, Workload
from bullet_graph.workloads.arrivals import arrival_times


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """What to sweep over.

    Attributes:
        config: of the engine that serves all cells; its policy and targets are not used.
        workloads: at least one.
        slos: targets of the workloads that have none of their own.
        policies: the policies to compare.
        first_rate: where a search begins, in requests a second.
        attainment: share of requests that must meet all targets.
        tolerance: how exact a goodput is, relative.
        step: the first factor between two rates of a search.
        max_runs: most runs of one search.
        burstiness: of random arrivals.
        num_warmups: unmeasured requests before the first run of a cell.
    """

    config: EngineConfig
    workloads: tuple[WorkloadSpec, ...]
    slos: tuple[Slo, ...]
    policies: tuple[Policy, ...]
    first_rate: float
    attainment: float
    tolerance: float
    step: float
    max_runs: int
    burstiness: float
    num_warmups: int


class GoodputSweep:
    """A sweep of this engine, checked and ready to run, or to go on where its file ends.

    Args:
        spec: what to sweep over.
        path: of its file.
        overwrite: a file that is finished, or something else, may be replaced.

    Raises:
        BulletGraphError: settings, workloads, model, table or file are wrong; no weights are loaded yet.
    """

    def __init__(self, spec: SweepSpec, path: Path, *, overwrite: bool) -> None:
        self.spec = spec
        self.runtime = runtime = resolve(spec.config)

        def load(workload: WorkloadSpec) -> Workload:
            return load_requests(runtime, workload.name, workload.num_prompts, seed=spec.config.seed)

        self.cells: Sequence[Cell] = make_cells(
            spec.workloads, spec.slos, spec.policies, first_rate=spec.first_rate, load=load
        )
        for workload in {cell.key.workload: cell.workload for cell in self.cells}.values():
            _require_enough_fit(workload, runtime.max_model_len, spec.attainment)
            # Arrivals that cannot be drawn are told now rather than after the weights are loaded.
            arrival_times(
                len(workload.requests),
                request_rate=1.0,
                burstiness=spec.burstiness,
                seed=spec.config.seed,
            )
        searches = [self._new_search(cell) for cell in self.cells]
        slos = [cell.slo for cell in self.cells]
        # Under a target for TPOT, more policies need predictions.
        strictest = next((slo for slo in slos if slo.tpot_ms is not None), slos[0])
        self.config = config_for(spec.config, spec.policies, strictest)
        find_performance(self.config, runtime)
        provenance = dataclasses.asdict(collect_provenance(runtime.device.type))
        settings = self._settings() | {"device_name": provenance["device_name"]}
        self.file = SweepFile.open(path, settings=settings, provenance=provenance, overwrite=overwrite)
        self._searches = {cell.key: search for cell, search in zip(self.cells, searches, strict=True)}
        for key, search in self._searches.items():
            for run in self.file.runs(key):
                search.record(run["request_rate"], run["slo_attainment"])

    @property
    def num_runs(self) -> int:
        """Runs in the file."""
        return sum(len(cell.runs) for cell in self.file.sweep.cells)

    def run(self, *, quiet: bool) -> Sweep:
        """Serve until every search is over; each run is in the file as soon as it has ended.

        Args:
            quiet: show neither the memory ledger, nor progress, nor what each run brought (all on stderr).
        """
        if any(search.next_rate() is not None for search in self._searches.values()):
            with open_engine(self.config, quiet=quiet) as engine:
                for cell in self.cells:
                    # A policy that this engine cannot serve is told before the first run.
                    engine.set_policy(cell.policy, cell.slo)
                self._serve(engine, quiet=quiet)
        for key, search in self._searches.items():
            if not self.file.cell(key).finished:
                self.file.finish_cell(key, search.goodput)
        self.file.finish()
        return self.file.sweep

    def _serve(self, engine: Engine, *, quiet: bool) -> None:
        warm: set[CellKey] = set()
        # The cell with the fewest runs is next, so that all of them meet the same moods of a power-capped GPU.
        while (cell := self._next_cell()) is not None:
            search = self._searches[cell.key]
            rate = search.next_rate()
            assert rate is not None
            if cell.key not in warm:
                warm_up(
                    engine,
                    cell.workload,
                    self.spec.num_warmups,
                    policy=cell.policy,
                    slo=cell.slo,
                    seed=self.spec.config.seed,
                )
                warm.add(cell.key)
            fields = self._measure(engine, cell, rate, quiet=quiet)
            self.file.add_run(cell.key, fields)
            search.record(rate, fields["slo_attainment"])
            if search.next_rate() is None:
                self.file.finish_cell(cell.key, search.goodput)
            if not quiet:
                done = "" if search.next_rate() is not None else f"; goodput {_rate(search.goodput)}"
                met = 100 * fields["slo_attainment"]
                click.echo(f"{_label(cell)}: {met:.1f} % met at {rate:.4g}/s{done}", err=True)

    def _next_cell(self) -> Cell | None:
        under_way = [cell for cell in self.cells if self._searches[cell.key].next_rate() is not None]
        return min(under_way, key=lambda cell: len(self.file.runs(cell.key)), default=None)

    def _measure(self, engine: Engine, cell: Cell, rate: float, *, quiet: bool) -> dict[str, Any]:
        arrivals = Arrivals(request_rate=rate, burstiness=self.spec.burstiness, seed=self.spec.config.seed)
        show = not quiet and sys.stderr.isatty()
        label = f"run {self.num_runs + 1}, {_label(cell)}, {rate:.4g}/s"
        with progress_bar(show, total=cell.key.num_prompts, unit="req", desc=label, leave=False) as advance:
            run = serve_online(
                engine,
                cell.workload,
                arrivals,
                policy=cell.policy,
                slo=cell.slo,
                on_done=lambda _: advance(1),
            )
        return run.fields()

    def _new_search(self, cell: Cell) -> GoodputSearch:
        return GoodputSearch(
            first_rate=cell.first_rate,
            attainment=self.spec.attainment,
            tolerance=self.spec.tolerance,
            max_runs=self.spec.max_runs,
            step=self.spec.step,
        )

    def _settings(self) -> dict[str, Any]:
        """All that decides the runs: a sweep goes on under the same settings only."""
        spec, config, runtime = self.spec, self.config, self.runtime
        engine = {
            name: value
            for name, value in config.values().items()
            if name not in ("model", "policy", "slo", "seed", "device", "dtype", "load_format")
        }
        return {
            "model": config.model,
            "load_format": resolved_load_format(config, runtime),
            "dtype": str(runtime.dtype).removeprefix("torch."),
            "engine": engine | {"max_model_len": runtime.max_model_len, "policy": str(config.policy)},
            "seed": config.seed,
            "workloads": list(dict.fromkeys(str(cell) for cell in self.cells)),
            "policies": list(dict.fromkeys(str(cell.policy) for cell in self.cells)),
            "attainment": spec.attainment,
            "tolerance": spec.tolerance,
            "step": spec.step,
            "max_runs": spec.max_runs,
            # JSON has no infinity.
            "burstiness": spec.burstiness if math.isfinite(spec.burstiness) else "inf",
            "num_warmups": spec.num_warmups,
        }


def print_sweep(sweep: Sweep) -> None:
    """Show each cell's goodput, and its run there, on stdout: a table for each workload and targets."""
    console = Console()
    console.print(
        f"highest rate at which {100 * sweep.settings['attainment']:g} % of the requests meet all targets",
        markup=False,
        soft_wrap=True,
    )
    tables: dict[str, Table] = {}
    for cell in sweep.cells:
        title = f"{cell.key.workload}, {cell.key.num_prompts:,} requests, {cell.key.slo}"
        if title not in tables:
            tables[title] = Table("policy", title=Text(title), title_justify="left")
            for column in ("requests/s", "TTFT, p50 / p90, ms", "TPOT, p50 / p90, ms", "J/token", "runs"):
                tables[title].add_column(column, justify="right")
        best = cell.best or {}
        latencies = [
            f"{figure(best.get(f'median_{name}_ms'))} / {figure(best.get(f'p90_{name}_ms'))}" if best else "–"
            for name in ("ttft", "tpot")
        ]
        tables[title].add_row(
            Text(cell.key.system.removeprefix(f"{SYSTEM} ")),
            _goodput(cell, sweep.settings["tolerance"]),
            *latencies,
            figure(best.get("joules_per_token"), 3),
            str(len(cell.runs)),
        )
    for table in tables.values():
        console.print(table)


def _goodput(cell: SweepCell, tolerance: float) -> str:
    """The goodput as text; ``≥`` where the search ended before it had closed in, ``<`` where no rate was low enough."""
    rates = [run["request_rate"] for run in cell.runs]
    if cell.goodput is None:
        return f"< {min(rates):.3g}"
    higher = min((rate for rate in rates if rate > cell.goodput), default=math.inf)
    return f"{'' if higher <= cell.goodput * (1 + tolerance) else '≥ '}{cell.goodput:.2f}"


def _require_enough_fit(workload: Workload, max_model_len: int, attainment: float) -> None:
    """Refuse a search that can find nothing: too many requests would be refused at any rate."""
    total = len(workload.requests)
    num_fit = sum(r.prompt_tokens + r.output_tokens <= max_model_len for r in workload.requests)
    if num_fit < attainment * total:
        raise WorkloadError(
            f"{total - num_fit} of the {total} requests of {workload.name} are longer than max_model_len="
            f"{max_model_len} and would fail at any rate, so {100 * attainment:g} % cannot meet their targets: take a "
            "model or --max-model-len with room for them, a lower --attainment, or another workload"
        )


def _label(cell: Cell) -> str:
    return f"{cell.key.workload}, {cell.slo}, {cell.policy}"


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:.4g}/s"
