"""The runs of a comparison: all systems in rounds, each run kept as soon as it has ended."""

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from bench.peers.host import HostClock
from bench.peers.systems import Candidate, Setup, System, log
from bullet_graph.cli.bench.replay import Client, Served, collect_garbage, measure, warm_up
from bullet_graph.cli.bench.sweep_runner import Cell, Sweep, SweepRunner, Task, WorkloadSpec, at_rate, make_cells
from bullet_graph.engine.replay import TimedRequest, replay_async
from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.perf.energy import DeviceMonitor, NvmlProbe
from bullet_graph.perf.goodput_search import FASTEST_RATE, SHARES, GoodputSearch, RateRun, bracket
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Arrivals, Workload, load_workload

_MOST_RUNS = 1000
_MOST_REASONS_KEPT = 3


# ---- what to run ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedRates(GoodputSearch):
    """Given rates, in requests per second, one after the other, and all of them again ``repeats`` times."""

    rates: Sequence[float]
    repeats: int

    def next_rate(self, runs: Sequence[RateRun]) -> float | None:
        """The next rate after these runs; None: all are done."""
        left = list(self.rates) * self.repeats
        for run in runs:
            if run.rate in left:
                left.remove(run.rate)
        return left[0] if left else None


def make_peer_cells(
    specs: Sequence[WorkloadSpec], candidates: Sequence[Candidate], options: Mapping[str, Any]
) -> list[Cell[Candidate]]:
    """The workloads on each candidate, at the rates that the command's options ask for.

    Raises ConfigError where options contradict each other, a search has no targets, or two workloads have one name;
    WorkloadError where there is no such workload, or it has too few requests for a rate.
    """
    rates, at_once = options["rates"], options["all_at_once"]
    if at_once and (rates is not None or options["burstiness"] != 1):
        raise ConfigError("--all-at-once has neither rates nor gaps: leave out --rates and --burstiness")
    if options["best_peer_only"] and (rates is not None or at_once):
        raise ConfigError("--best-peer-only is for searches: leave it out with --rates and --all-at-once")
    if at_once:
        rates = (FASTEST_RATE,)
    search = GoodputSearch(**{name: options[name] for name in ("first_rate", "tolerance", "step", "max_runs")})
    if rates is not None:
        repeats, first_rate = options["repeats"], 1.0 if at_once else max(rates)
        search = FixedRates(first_rate=first_rate, max_runs=repeats * len(rates), rates=rates, repeats=repeats)

    def load(spec: WorkloadSpec) -> Workload:
        workload = load_workload(spec.name, num_requests=spec.num_prompts, seed=options["seed"])
        return dataclasses.replace(workload, longer=None) if at_once else workload

    return make_cells(
        specs,
        () if rates is None else (NO_TARGETS,),
        {candidate.label: candidate for candidate in candidates},
        search=search,
        load=load,
        smoke=options["smoke"] or at_once,
    )


def make_setup(cells: Sequence[Cell[Candidate]], options: Mapping[str, Any]) -> Setup:
    """The settings that all systems share; the longest request (of 20,000, if there is no end) fits.

    Raises WorkloadError where a request is longer than the limit asked for.
    """
    workloads = {cell.key.task: cell.workload for cell in cells}.values()
    requests = [request for workload in workloads for request in workload.first(20_000).requests]
    needed = max(request.prompt_tokens + request.output_tokens for request in requests)
    most = options["max_model_len"] or needed
    if most < needed:
        raise WorkloadError(
            f"the workloads' longest request has {needed} tokens, more than --max-model-len {most}: raise it"
        )
    names = {field.name for field in dataclasses.fields(Setup)}
    given = {name: value for name, value in options.items() if name in names}
    shares = any(cell.workload.shares_prefixes for cell in cells)
    return Setup(**given | {"max_model_len": most, "shares_prefixes": shares})


# ---- running it ----

OpenProbe = Callable[[], NvmlProbe | None]


def _peer_client(
    system: System, runner: asyncio.Runner, backend: str, model_id: str, vocab_size: int, probe: OpenProbe
) -> Client:
    """The client of a system, which watches the GPUs and the host during a replay."""

    def serve(requests: Sequence[TimedRequest], *, is_warmup: bool = False, **options: Any) -> Served:
        del is_warmup
        # One process holds several systems: the collector's pauses over all their objects would be long.
        collect_garbage()
        host = HostClock()
        with DeviceMonitor(probe()) as monitor:
            replayed = runner.run(replay_async(system.generate, requests, **options))
        used = host.use()
        own = {
            "device": dataclasses.asdict(monitor.report),
            "host": None if used is None else dataclasses.asdict(used),
            "system_settings": dict(system.settings),
            "system_counters": dict(system.counters()),
        }
        return replayed, monitor.report.energy_joules, own

    return Client(backend, model_id, vocab_size, serve)


@dataclasses.dataclass
class Comparison:
    """Everything to run, or what is left of it where the file has some already.

    Attributes:
        groups: candidates that are up at the same time and take turns; the groups follow one another.
        cells: in the order of a round.
        open_system: starts what a group needs, from all the group's candidates that share it.
        sweep: keeps the runs.
        runner: of the event loop of all systems.
        arrivals: how requests arrive, but for the rate. Their seed also draws the prompts.
        num_warmups: unmeasured requests before a system's first run of a workload.
        probe: opens the GPUs to watch; None watches nothing.
        smoke: runs may be too short to be sustained.
        best_peer_only: give up a peer's setting once others of that peer have served each share at rates that were too
            fast for it, since only the best of them counts.
        before_group: called with each group before it is started.
    """

    groups: Sequence[Sequence[Candidate]]
    cells: Sequence[Cell[Candidate]]
    open_system: Callable[[Sequence[Candidate]], Coroutine[Any, Any, System]]
    sweep: Sweep
    runner: asyncio.Runner
    _: dataclasses.KW_ONLY
    model: str
    vocab_size: int
    arrivals: Arrivals
    num_warmups: int
    probe: OpenProbe
    smoke: bool = False
    best_peer_only: bool = False
    before_group: Callable[[Sequence[Candidate]], None] = lambda _: None
    _systems: dict[object, System] = dataclasses.field(default_factory=dict, init=False)

    def run(self) -> None:
        """Serve until all rates are done.

        Raises EngineDeadError if a system fails as a whole, WorkloadError if one can serve none of a run's requests.
        """
        runner = SweepRunner(self.sweep, is_given_up=self._is_beaten)
        for group in self.groups:
            cells = [cell for cell in self.cells if cell.system in group]
            if runner.has_work(cells):
                self.before_group(group)
                with ExitStack() as stack:
                    self._start(group, stack)
                    runner.run(cells, warm_up=self._warm_up, measure=self._measure)
        self.sweep.finish()

    def _start(self, group: Sequence[Candidate], stack: ExitStack) -> None:
        self._systems = {}
        # Ours first: it counts all memory in use as its own, and the peers count only theirs.
        for candidate in sorted(group, key=lambda c: c.kind != "own"):
            if candidate.resident not in self._systems:
                sharing = [c for c in group if c.resident == candidate.resident]
                log(f"starting {' + '.join(c.label for c in sharing)}")
                system = self.runner.run(self.open_system(sharing))
                self._systems[candidate.resident] = system
                stack.callback(lambda system: self.runner.run(system.close()), system)

    def _tasks(self) -> list[Task]:
        return list(dict.fromkeys(cell.key.task for cell in self.cells))

    def _client(self, cell: Cell[Candidate]) -> Client:
        """A client of the cell's system, under the cell's setting and targets."""
        system = self._systems[cell.system.resident]
        self.runner.run(system.configure(cell.system.setting, cell.slo))
        # A server by its URL may be on another machine.
        probe = (lambda: None) if cell.system.kind == "openai" else self.probe
        return _peer_client(system, self.runner, cell.system.label, self.model, self.vocab_size, probe)

    def _warm_up(self, cell: Cell[Candidate]) -> None:
        # Other prompts than in any run.
        tasks = self._tasks()
        seed = self.arrivals.seed + _MOST_RUNS * (len(tasks) + tasks.index(cell.key.task))
        warm_up(self._client(cell), cell.workload, self.num_warmups, slo=cell.slo, seed=seed)

    def _measure(self, cell: Cell[Candidate], rate: float, label: str | None) -> dict[str, Any]:
        # Other prompts in each run, the same for every system: a server may have a prefix cache.
        run = len(self.sweep.cell(cell.key).runs)
        prompt_seed = self.arrivals.seed + _MOST_RUNS * self._tasks().index(cell.key.task) + run
        workload, arrivals = at_rate(cell.workload, self.arrivals, rate, smoke=self.smoke)
        measured = measure(self._client(cell), workload, arrivals, slo=cell.slo, prompt_seed=prompt_seed, label=label)
        result = measured.result
        attainment = result.slo_attainment
        return measured.fields() | {
            "request_rate": rate,
            "all_at_once": arrivals.request_rate == math.inf,
            # Without targets, every request that is served meets them.
            "slo_attainment": result.completed / result.num_prompts if attainment is None else attainment,
            "prompt_seed": prompt_seed,
            "failures": dict(Counter(filter(None, result.errors)).most_common(_MOST_REASONS_KEPT)),
        }

    def _is_beaten(self, cell: Cell[Candidate]) -> bool:
        if not self.best_peer_only or cell.system.kind == "own":
            return False
        here = self.sweep.cell(cell.key).rate_runs
        others = [
            self.sweep.cell(other.key).rate_runs
            for other in self.cells
            if other.key.task == cell.key.task and other.system.peer == cell.system.peer and other.system != cell.system
        ]

        def is_beaten(share: float) -> bool:
            too_fast = bracket(here, share)[1]
            good = [run for runs in others if (run := bracket(runs, share)[0]) is not None]
            return too_fast is not None and any(run.rate >= too_fast.rate for run in good)

        return all(map(is_beaten, SHARES))
