"""A goodput sweep: its cells, the file that keeps each run, and the runner that serves the cells in rounds."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import click
from pydantic import AfterValidator, BaseModel, PrivateAttr, ValidationError

from bullet_graph.cli.result_file import check_result_file, command_line, to_json, write_result_file
from bullet_graph.errors import ConfigError, WorkloadError, first_problem
from bullet_graph.perf import goodput_search as goodputs
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Arrivals, Workload

_FORM = re.compile(r"(?P<name>[^=@][^@]*?)(=(?P<count>[^=~@]*))?(~(?P<rate>[^=~@]*))?(@(?P<slo>[^@]*))?")
_FORM_SHOWN = "NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS], such as synthetic:conv or 'synthetic:code~10@ttft:500 tpot:8'"

S = TypeVar("S")  # what serves a cell: a policy of this engine, or a system of a comparison


# ---- the file ----


class Task(NamedTuple):
    """A workload, its number of requests (None: as many as a rate needs), and targets as ``str(Slo)`` writes them."""

    workload: str
    num_prompts: int | None
    slo: str

    def __str__(self) -> str:
        count = () if self.num_prompts is None else (f"{self.num_prompts:,} requests",)
        return ", ".join((self.workload, *count, self.slo))


class CellKey(NamedTuple):
    """The name of one search; ``system`` has its setting: ``bullet_graph auto``, ``vllm 0.24.0 chunk 512``."""

    system: str
    task: Task


def _require_figures(run: dict[str, Any]) -> dict[str, Any]:
    for name in ("request_rate", "slo_attainment"):
        if not isinstance(run.get(name), (int, float)):
            raise ValueError(f"{name} of a run must be a number, got {run.get(name)!r}")
    return run


class SweepCell(BaseModel, frozen=True):
    """The progress of one search, with what :func:`~bullet_graph.perf.goodput_search.goodput_fields` says of its runs.

    ``runs`` have the fields of :class:`~bullet_graph.perf.metrics.ReplayResult`, and what the system adds.
    """

    system: str
    workload: str
    num_prompts: int | None
    slo: str
    goodput_90: float | None = None
    goodput_90_below: float | None = None
    goodput_99: float | None = None
    goodput_99_below: float | None = None
    sustained: bool = False
    runs: tuple[Annotated[dict[str, Any], AfterValidator(_require_figures)], ...] = ()

    @property
    def key(self) -> CellKey:
        return CellKey(self.system, Task(self.workload, self.num_prompts, self.slo))

    @property
    def rate_runs(self) -> list[goodputs.RateRun]:
        """The runs, as searches take them."""
        return [goodputs.RateRun.of(run) for run in self.runs]


class Sweep(BaseModel):
    """A sweep and its file, which appears with the first run and has each run as soon as it has ended.

    Attributes:
        settings: everything that decides the runs; among them the ``tolerance`` of goodputs.
        provenance: of the machine and the code that began the sweep; ``continued`` has those of later starts on others.
        cells: in the order of their first runs.
    """

    format: Literal[2] = 2
    kind: Literal["goodput sweep"] = "goodput sweep"
    finished: bool = False
    argv: list[str] = []
    settings: dict[str, Any]
    provenance: dict[str, Any]
    continued: list[dict[str, Any]] = []
    cells: list[SweepCell] = []
    _path: Path = PrivateAttr()

    @classmethod
    def open(
        cls, path: Path, *, settings: Mapping[str, Any], provenance: Mapping[str, Any], overwrite: bool
    ) -> "Sweep":
        """Begin a sweep, or resume the one in the file if it has these settings and is not finished.

        Settings and provenance, that of this machine and code, are in values that JSON has. The provenance's
        ``date_utc`` may differ when a sweep resumes. ``overwrite`` replaces a file that cannot be resumed.

        Raises ConfigError where the file cannot be written; or, without ``overwrite``, it is finished, of another
        sweep, or not a sweep's file.
        """
        check_result_file(path, overwrite=True)
        here = _as_json(provenance)
        sweep = cls(argv=command_line(), settings=_as_json(settings), provenance=here)
        if path.exists():
            try:
                found = cls.read(path)
                _require_same(path, found, sweep.settings)
                sweep = found
            except ConfigError as error:
                if not overwrite:
                    raise ConfigError(f"{error}; add --overwrite or give another name") from None
        undated = [known | {"date_utc": None} for known in (here, sweep.provenance, *sweep.continued)]
        if undated[0] not in undated[1:]:
            sweep.continued.append(here)
        sweep._path = path
        return sweep

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """Read a sweep's file, finished or not; ConfigError where it cannot be read, or is no such file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"{path} is no sweep's file of format 2, or it is damaged: {problem}") from None

    def fields(self) -> dict[str, Any]:
        """The sweep as in its file's JSON."""
        return self.model_dump(mode="json")

    @property
    def num_runs(self) -> int:
        """Runs in the file."""
        return sum(len(cell.runs) for cell in self.cells)

    def cell(self, key: CellKey) -> SweepCell:
        """The progress of a search."""
        new = SweepCell(system=key.system, **key.task._asdict())
        return next((cell for cell in self.cells if cell.key == key), new)

    def add_run(self, key: CellKey, fields: Mapping[str, Any]) -> None:
        """Append a run, in values that JSON has; ``request_rate`` and ``slo_attainment`` are numbers."""
        runs = (*self.cell(key).runs, _as_json(fields))
        cells = {cell.key: cell for cell in self.cells}
        new = self.cell(key).model_copy(update={"runs": runs, **goodputs.goodput_fields(runs)})
        self.cells = list((cells | {key: new}).values())
        self._write()

    def finish(self) -> None:
        """Mark the sweep as finished: it will not be resumed."""
        self.finished = True
        self._write()

    def _write(self) -> None:
        write_result_file(self._path, to_json(self.fields()))


def _require_same(path: Path, found: Sweep, settings: Mapping[str, Any]) -> None:
    there = found.settings
    differing = [name for name in {**there, **settings} if there.get(name) != settings.get(name)]
    if differing:
        shown = (f"{name} is {there.get(name)!r} there and {settings.get(name)!r} here" for name in differing)
        raise ConfigError(f"{path} holds a sweep with other settings: {', '.join(shown)}")
    if found.finished:
        raise ConfigError(f"{path} holds this sweep, and it is finished")


def _as_json(fields: Mapping[str, Any]) -> Any:
    """The same values as a file returns them: a tuple becomes a list."""
    return json.loads(json.dumps(fields, allow_nan=False))


# ---- the cells ----


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload as the command line names it: its first ``num_prompts`` requests (None: all).

    The sweep's own first rate, in requests per second, and targets are in the place of those that are None.
    """

    name: str
    num_prompts: int | None = None
    first_rate: float | None = None
    slo: Slo | None = None

    @classmethod
    def parse(cls, text: str) -> "WorkloadSpec":
        """Read ``NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS]``; ConfigError for another form."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"--workload {text!r}: write {_FORM_SHOWN}")
        name, count, rate, slo = match["name"], match["count"], match["rate"], match["slo"]
        if count is not None and not (count.isdecimal() and int(count) >= 1):
            raise ConfigError(f"--workload {text!r}: {count!r} is no number of prompts: write {_FORM_SHOWN}")
        if rate is not None and not (re.fullmatch(r"\d+(\.\d+)?", rate) and float(rate) > 0):
            raise ConfigError(f"--workload {text!r}: {rate!r} is no rate above 0: write {_FORM_SHOWN}")
        return cls(
            name,
            None if count is None else int(count),
            None if rate is None else float(rate),
            None if slo is None else targets_of(slo),
        )


def targets_of(text: str) -> Slo:
    """Read targets such as ``ttft:500 tpot:15``; ConfigError for another form, or none."""
    slo = Slo.parse(text.replace(",", " ").split())
    if slo == NO_TARGETS:
        raise ConfigError("a goodput needs targets, got none: write them as 'ttft:500 tpot:15' (milliseconds)")
    return slo


def at_rate(workload: Workload, arrivals: Arrivals, rate: float, *, smoke: bool) -> tuple[Workload, Arrivals]:
    """The requests of a run at a rate, in requests per second, and how they arrive; ``FASTEST_RATE``: all at once.

    Where there are too few requests for a sustained run, all are taken and counted with ``smoke``; else WorkloadError.
    """
    if rate >= goodputs.FASTEST_RATE:
        return workload, dataclasses.replace(arrivals, request_rate=math.inf)
    needed = goodputs.requests_for(rate)
    workload = workload.first(needed)
    found = len(workload.requests)
    if found < needed and not smoke:
        raise WorkloadError(
            f"{workload.name} has {found:,} requests, but a run at {rate:.4g}/s needs {needed:,}: "
            f"{goodputs.LEAST_SECONDS} s of arrivals, and at least {goodputs.LEAST_REQUESTS}. Take a longer trace or a "
            "synthetic workload without a number of requests, begin at a lower rate, or add --smoke for a short trial"
        )
    warmup_s = (
        goodputs.CONVERSATIONS_WARMUP_S if any(request.follows for request in workload.requests) else goodputs.WARMUP_S
    )
    uncounted_s = warmup_s if found >= needed else 0.0
    return workload, dataclasses.replace(arrivals, request_rate=rate, uncounted_s=uncounted_s)


def fastest_rate(workload: Workload, *, smoke: bool) -> float:
    """The highest rate, in requests per second, for which a workload has enough requests; or any rate."""
    return goodputs.FASTEST_RATE if smoke or workload.longer else len(workload.requests) / goodputs.LEAST_SECONDS


@dataclass(frozen=True, slots=True)
class Cell(Generic[S]):
    """One search: a workload with its targets, served by one system."""

    key: CellKey
    workload: Workload
    slo: Slo
    system: S
    search: goodputs.GoodputSearch

    def __str__(self) -> str:
        """As ``--workload`` takes it."""
        count = "" if self.key.task.num_prompts is None else f"={self.key.task.num_prompts}"
        return f"{self.workload.name}{count}~{self.search.first_rate:g}@{self.slo}"


def make_cells(
    specs: Sequence[WorkloadSpec],
    slos: Sequence[Slo],
    systems: Mapping[str, S],
    *,
    search: goodputs.GoodputSearch,
    load: Callable[[WorkloadSpec], Workload],
    smoke: bool,
) -> list[Cell[S]]:
    """Make the cells of a sweep: each workload with each of its targets on each system, systems changing fastest.

    ``slos``, and the first rate of ``search``, are for workloads without their own.

    Raises ConfigError where a workload has no targets, or two different cells have the same name; WorkloadError where
    a workload has too few requests for its first rate, without ``smoke``.
    """
    cells: dict[CellKey, Cell[S]] = {}
    for spec in specs:
        if spec.slo is None and not slos:
            raise ConfigError(
                f"the workload {spec.name} has no targets to meet: write them behind it, as --workload "
                f"'{spec.name}@ttft:500 tpot:15', or for all workloads (bench sweep) as --slo 'ttft:500 tpot:15'"
            )
        workload, rate = load(spec), spec.first_rate or search.first_rate
        count = len(workload.requests) if workload.longer is None else None
        at_rate(workload, Arrivals(request_rate=rate), rate, smoke=smoke)
        fitting = dataclasses.replace(search, first_rate=rate, fastest=fastest_rate(workload, smoke=smoke))
        for slo in slos if spec.slo is None else (spec.slo,):
            task = Task(workload.name, count, str(slo))
            for name, system in systems.items():
                cell = Cell(CellKey(name, task), workload, slo, system, fitting)
                if cells.setdefault(cell.key, cell) != cell:
                    raise ConfigError(
                        f"--workload {spec.name}: two different ones are both called {task}: rename a file, or give "
                        "one of them only"
                    )
    return list(cells.values())


@dataclass(frozen=True, slots=True)
class SweepRunner(Generic[S]):
    """Serves the cells of a sweep, or what is left of them, and appends each run to the file.

    The cell with the fewest runs is next. All cells thereby meet the same clocks of a power-capped GPU, and an
    interrupted sweep has something of each. A cell that ``is_given_up`` is not searched to the end.
    """

    sweep: Sweep
    is_given_up: Callable[[Cell[S]], bool] = lambda _: False
    quiet: bool = False

    def has_work(self, cells: Sequence[Cell[S]]) -> bool:
        """Whether a run of these cells is left."""
        return any(self._next_rate(cell) is not None for cell in cells)

    def run(
        self,
        cells: Sequence[Cell[S]],
        *,
        warm_up: Callable[[Cell[S]], object],
        measure: Callable[[Cell[S], float, str | None], Mapping[str, Any]],
    ) -> None:
        """Serve until these cells are done, after a ``warm_up`` of each; ``measure`` returns a run's fields.

        It is given a cell, a rate, and a label for a progress bar, None where there should be none.
        """
        self._print_estimate(cells)
        warm: set[CellKey] = set()
        while left := [(cell, rate) for cell in cells if (rate := self._next_rate(cell)) is not None]:
            cell, rate = min(left, key=lambda each: len(self.sweep.cell(each[0].key).runs))
            if cell.key not in warm:
                warm_up(cell)
                warm.add(cell.key)
            at = "all at once" if rate >= goodputs.FASTEST_RATE else f"at {rate:.4g}/s"
            run = f"{cell.workload.name}, {cell.slo}, {cell.key.system}, {at}"
            fields = measure(cell, rate, None if self.quiet else f"run {self.sweep.num_runs + 1}, {run}")
            self.sweep.add_run(cell.key, fields)
            if not self.quiet:
                met, tokens_per_s = 100 * fields["slo_attainment"], fields["output_throughput"]
                unstable = ", unstable" if fields["stable"] is False else ""
                click.echo(f"{run}: {met:.1f} % met, {tokens_per_s:,.0f} output tokens/s{unstable}", err=True)

    def _next_rate(self, cell: Cell[S]) -> float | None:
        return None if self.is_given_up(cell) else cell.search.next_rate(self.sweep.cell(cell.key).rate_runs)

    def _print_estimate(self, cells: Sequence[Cell[S]]) -> None:
        """Show, on stderr, how long the arrivals of all runs that are left may last, if that is a minute or more."""
        num_runs, seconds = 0, 0.0
        for cell in cells:
            rate = self._next_rate(cell)
            if rate is not None and rate < goodputs.FASTEST_RATE:
                left = cell.search.max_runs - len(self.sweep.cell(cell.key).runs)
                sent = len(cell.workload.first(goodputs.requests_for(rate)).requests)  # a short trial has fewer
                num_runs, seconds = num_runs + left, seconds + left * sent / rate
        if seconds >= 60 and not self.quiet:
            click.echo(f"at most {num_runs} runs, with {seconds / 60:,.0f} minutes of arrivals", err=True)
