"""A goodput sweep: its cells, the file that keeps each run, and the runner that serves the cells in rounds."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import click
from pydantic import AfterValidator, BaseModel, PrivateAttr, ValidationError

from bullet_graph.cli.result_file import check_result_file, command_line, to_json, write_result_file
from bullet_graph.errors import ConfigError, first_problem
from bullet_graph.perf.goodput_search import FASTEST_RATE, GoodputSearch
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Workload

_MOST_DIFFERENCES_SHOWN = 5

_SHORT_NAMES = {"conv": "azure:conv", "code": "azure:code", "longdoc": "synthetic:longdoc"}
_FORM = re.compile(r"(?P<name>[^=@][^@]*?)(=(?P<count>[^=~@]*))?(~(?P<rate>[^=~@]*))?(@(?P<slo>[^@]*))?")
_FORM_SHOWN = (
    "NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS], such as conv, conv=600 or 'code=400~10@ttft:500 tpot:8'"
)

S = TypeVar("S")  # what serves a cell: a policy of this engine, or a system of a comparison


# ---- the file ----


class Task(NamedTuple):
    """What systems are compared on: the first requests of a workload, and targets as ``str(Slo)`` writes them."""

    workload: str
    num_prompts: int
    slo: str

    def __str__(self) -> str:
        return f"{self.workload}, {self.num_prompts:,} requests, {self.slo}"


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
    """The progress of one search.

    Attributes:
        goodput: the highest rate that served enough, in requests per second; None: none did, or it is not finished.
        runs: the fields of each run, in the order of running: those of
            :class:`~bullet_graph.perf.metrics.ReplayResult`, and what the system adds.
    """

    system: str
    workload: str
    num_prompts: int
    slo: str
    goodput: float | None = None
    finished: bool = False
    runs: tuple[Annotated[dict[str, Any], AfterValidator(_require_figures)], ...] = ()

    @property
    def key(self) -> CellKey:
        return CellKey(self.system, Task(self.workload, self.num_prompts, self.slo))

    @property
    def best(self) -> dict[str, Any] | None:
        """The last run at the goodput; None where there is none."""
        return next((run for run in reversed(self.runs) if run["request_rate"] == self.goodput), None)


class Sweep(BaseModel):
    """A sweep and its file, which appears with the first run and has each run as soon as it has ended.

    Attributes:
        settings: everything that decides the runs; ``attainment`` is the share of requests that must meet all targets.
        provenance: of the machine and the code that began the sweep; ``continued`` has those of later starts on others.
        cells: in the order of their first runs.
    """

    format: Literal[1] = 1
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

        Raises:
            ConfigError: the file cannot be written; or, without ``overwrite``, it is finished, or of another sweep, or
                not a sweep's file.
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
        """Read a sweep's file, finished or not.

        Raises ConfigError where it cannot be read, or is not a sweep's file of this format.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"{path} is no sweep's file of format 1, or it is damaged: {problem}") from None

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
        self._put(key, runs=(*self.cell(key).runs, _as_json(fields)))

    def finish_cell(self, key: CellKey, goodput: float | None) -> None:
        """Store the goodput of a search that is over."""
        self._put(key, goodput=goodput, finished=True)

    def finish(self) -> None:
        """Mark the sweep as finished: it will not be resumed."""
        self.finished = True
        self._write()

    def _put(self, key: CellKey, **changes: Any) -> None:
        cells = {cell.key: cell for cell in self.cells}
        self.cells = list((cells | {key: self.cell(key).model_copy(update=changes)}).values())
        self._write()

    def _write(self) -> None:
        write_result_file(self._path, to_json(self.fields()))


def _require_same(path: Path, found: Sweep, settings: Mapping[str, Any]) -> None:
    differences = list(_differences(found.settings, settings))
    if differences:
        shown = ", ".join(differences[:_MOST_DIFFERENCES_SHOWN])
        more = len(differences) - _MOST_DIFFERENCES_SHOWN
        raise ConfigError(
            f"{path} holds a sweep with other settings: {shown}{f', and {more} more' if more > 0 else ''}"
        )
    if found.finished:
        raise ConfigError(f"{path} holds this sweep, and it is finished")


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in {**found, **asked}:
        there, here = found.get(name), asked.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differences(there, here, f"{prefix}{name}.")
        elif there != here:
            yield f"{prefix}{name} is {there!r} there and {here!r} here"


def _as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same values as a file returns them: a tuple becomes a list."""
    parsed: dict[str, Any] = json.loads(json.dumps(fields, allow_nan=False))
    return parsed


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
            _SHORT_NAMES.get(name, name),
            None if count is None else int(count),
            None if rate is None else float(rate),
            None if slo is None else parse_targets(slo),
        )


def parse_targets(text: str) -> Slo:
    """Read targets such as ``ttft:500 tpot:15``; ConfigError for another form, or none."""
    slo = Slo.parse(text.replace(",", " ").split())
    if slo == NO_TARGETS:
        raise ConfigError(
            "a goodput needs targets, got none: write them as 'ttft:500 tpot:15' (milliseconds)"
        )
    return slo


@dataclass(frozen=True, slots=True)
class Cell(Generic[S]):
    """One search: a workload with its targets, served by one system, from ``first_rate`` (requests per second) on."""

    key: CellKey
    workload: Workload
    slo: Slo
    system: S
    first_rate: float
    rates: GoodputSearch = field(compare=False)

    def __str__(self) -> str:
        """As ``--workload`` takes it."""
        return f"{self.workload.name}={len(self.workload.requests)}~{self.first_rate:g}@{self.slo}"


def make_cells(
    specs: Sequence[WorkloadSpec],
    slos: Sequence[Slo],
    systems: Mapping[str, S],
    *,
    first_rate: float,
    load: Callable[[WorkloadSpec], Workload],
    new_rates: Callable[[float], GoodputSearch],
) -> list[Cell[S]]:
    """Make the cells of a sweep: each workload with each of its targets on each system, systems changing fastest.

    ``slos`` and ``first_rate`` are for workloads without their own.

    Raises ConfigError where a workload has no targets, or two different cells have the same name.
    """
    cells: dict[CellKey, Cell[S]] = {}
    for spec in specs:
        if spec.slo is None and not slos:
            raise ConfigError(
                f"the workload {spec.name} has no targets to meet: write them behind it, as --workload "
                f"'{spec.name}@ttft:500 tpot:15', or for all workloads (bench sweep) as --slo 'ttft:500 tpot:15'"
            )
        workload = load(spec)
        for slo in slos if spec.slo is None else (spec.slo,):
            task = Task(workload.name, len(workload.requests), str(slo))
            for name, system in systems.items():
                rate = spec.first_rate or first_rate
                cell = Cell(CellKey(name, task), workload, slo, system, rate, new_rates(rate))
                if cells.setdefault(cell.key, cell) != cell:
                    raise ConfigError(
                        f"--workload {spec.name}: two different ones are both called {workload.name} with "
                        f"{task.num_prompts} requests and {slo}: rename a file, or give one of them only"
                    )
    return list(cells.values())


class SweepRunner(Generic[S]):
    """Serves the cells of a sweep, or what is left of them, and appends each run to the file.

    The cell with the fewest runs is next. All cells thereby meet the same clocks of a power-capped GPU, and an
    interrupted sweep has something of each. A cell that ``is_given_up`` is not searched to the end.
    """

    def __init__(
        self,
        cells: Sequence[Cell[S]],
        sweep: Sweep,
        *,
        is_given_up: Callable[[Cell[S]], bool] = lambda _: False,
        quiet: bool = False,
    ) -> None:
        self.cells = cells
        self.sweep = sweep
        self._is_given_up = is_given_up
        self._quiet = quiet
        for cell in cells:
            for run in sweep.cell(cell.key).runs:
                cell.rates.record(run["request_rate"], run["slo_attainment"])

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
        warm: set[CellKey] = set()
        while left := [(cell, rate) for cell in cells if (rate := self._next_rate(cell)) is not None]:
            cell, rate = min(left, key=lambda each: len(self.sweep.cell(each[0].key).runs))
            if cell.key not in warm:
                warm_up(cell)
                warm.add(cell.key)
            at = "all at once" if rate >= FASTEST_RATE else f"{rate:.4g}/s"
            label = (
                f"run {self.sweep.num_runs + 1}, {cell.workload.name}, {cell.slo}, {cell.key.system}, {at}"
            )
            fields = measure(cell, rate, None if self._quiet else label)
            self.sweep.add_run(cell.key, fields)
            cell.rates.record(rate, fields["slo_attainment"])
            self._finish_cells()
            if not self._quiet:
                self._print_run(cell, fields)

    def finish(self) -> None:
        """Mark the sweep as finished."""
        self._finish_cells()
        self.sweep.finish()

    def _next_rate(self, cell: Cell[S]) -> float | None:
        return None if self._is_given_up(cell) else cell.rates.next_rate()

    def _finish_cells(self) -> None:
        """Store the goodput of searches that are over; a run may end those of other cells, too."""
        for cell in self.cells:
            if self._next_rate(cell) is None and not self.sweep.cell(cell.key).finished:
                self.sweep.finish_cell(cell.key, cell.rates.goodput)

    def _print_run(self, cell: Cell[S], fields: Mapping[str, Any]) -> None:
        found, done = self.sweep.cell(cell.key), ""
        if found.finished:
            done = f"; goodput {'none' if found.goodput is None else f'{found.goodput:.4g}/s'}"
        when = "all at once" if fields.get("all_at_once") else f"at {fields['request_rate']:.4g}/s"
        click.echo(
            f"{cell.workload.name}, {cell.slo}, {cell.key.system}, {when}: "
            f"{100 * fields['slo_attainment']:.1f} % met, {fields['output_throughput']:,.0f} output tokens/s{done}",
            err=True,
        )
