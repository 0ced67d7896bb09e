"""The cells of a sweep, and the runner that serves them in rounds: one run of each cell, then the next of each."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import click

from bullet_graph.cli.bench.sweep_file import CellKey, SweepFile
from bullet_graph.errors import ConfigError
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Workload

_SHORT_NAMES = {"conv": "azure:conv", "code": "azure:code", "longdoc": "synthetic:longdoc"}
_FORM = re.compile(r"(?P<name>[^=@][^@]*?)(=(?P<count>[^=~@]*))?(~(?P<rate>[^=~@]*))?(@(?P<slo>[^@]*))?")
_FORM_SHOWN = (
    "NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS], such as conv, conv=600 or 'code=400~10@ttft:500 tpot:8'"
)

S = TypeVar("S")
"""What serves a cell: a policy of this engine, or a system of a comparison."""


class Rates(Protocol):
    """The rates of one cell: a :class:`~bullet_graph.perf.goodput_search.GoodputSearch`, or fixed ones."""

    @property
    def goodput(self) -> float | None:
        """The highest rate recorded that served enough."""

    @property
    def ceiling(self) -> float | None:
        """The lowest rate above the goodput that served too few; None: none was recorded."""

    def next_rate(self) -> float | None:
        """The next rate, in requests per second; None: no more."""

    def record(self, rate: float, attainment: float) -> None:
        """Add the share of requests that met all targets at a rate."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload as the command line names it.

    Attributes:
        name: see :func:`~bullet_graph.workloads.load_workload`.
        num_prompts: its first N requests; None: all.
        first_rate: of its searches, in requests per second; None: the sweep's.
        slo: its own targets; None: the sweep's.
    """

    name: str
    num_prompts: int | None = None
    first_rate: float | None = None
    slo: Slo | None = None

    @classmethod
    def parse(cls, text: str) -> "WorkloadSpec":
        """Read ``NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS]``, such as ``conv=600`` or ``code~10@ttft:500 tpot:8``.

        Raises:
            ConfigError: the text has another form; the message shows it.
        """
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
    """Read targets such as ``ttft:500 tpot:15``.

    Raises:
        ConfigError: another form, or no targets.
    """
    slo = Slo.parse(text.replace(",", " ").split())
    if slo == NO_TARGETS:
        raise ConfigError(
            "a goodput needs targets, got none: write them as 'ttft:500 tpot:15' (milliseconds)"
        )
    return slo


@dataclass(frozen=True, slots=True)
class Cell(Generic[S]):
    """One search: a workload with its targets, served by one system.

    Attributes:
        key: its name in the file.
        workload: the requests.
        slo: their targets.
        system: what serves them.
        first_rate: of the search, in requests per second.
        rates: the search, or fixed rates.
    """

    key: CellKey
    workload: Workload
    slo: Slo
    system: S
    first_rate: float
    rates: Rates = field(compare=False)

    def __str__(self) -> str:
        """Its workload, number of prompts, first rate and targets, as ``--workload`` takes them."""
        return f"{self.key.workload}={self.key.num_prompts}~{self.first_rate:g}@{self.slo}"


def make_cells(
    specs: Sequence[WorkloadSpec],
    slos: Sequence[Slo],
    systems: Mapping[str, S],
    *,
    first_rate: float,
    load: Callable[[WorkloadSpec], Workload],
    new_rates: Callable[[float], Rates],
) -> list[Cell[S]]:
    """Make the cells of a sweep: each workload with each of its targets on each system, systems changing fastest.

    Args:
        specs: the workloads; one may come more than once, with other targets.
        slos: the targets of workloads without targets of their own.
        systems: by their names in the file.
        first_rate: of workloads without a first rate of their own.
        load: loads a workload.
        new_rates: makes the rates of one cell, from its first rate.

    Raises:
        ConfigError: a workload has no targets, or two different cells have the same name.
        WorkloadError: from ``load``.
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
            for name, system in systems.items():
                key = CellKey(name, workload.name, len(workload.requests), str(slo))
                rate = spec.first_rate or first_rate
                cell = Cell(key, workload, slo, system, rate, new_rates(rate))
                if cells.setdefault(key, cell) != cell:
                    raise ConfigError(
                        f"--workload {spec.name}: two different ones are both called {workload.name} with "
                        f"{key.num_prompts} requests and {slo}: rename a file, or give one of them only"
                    )
    return list(cells.values())


class SweepRunner(Generic[S]):
    """Serves the cells of a sweep, or what is left of them, and appends each run to the file.

    The cell with the fewest runs is next. All cells thereby meet the same clocks of a power-capped GPU, and an
    interrupted sweep has something of each.

    Args:
        cells: in the order of a round.
        file: holds the runs; those of an earlier start count.
        is_given_up: whether a cell's search is not worth finishing.
        quiet: print nothing about each run.
    """

    def __init__(
        self,
        cells: Sequence[Cell[S]],
        file: SweepFile,
        *,
        is_given_up: Callable[[Cell[S]], bool] = lambda _: False,
        quiet: bool = False,
    ) -> None:
        self.cells = cells
        self.file = file
        self._is_given_up = is_given_up
        self._quiet = quiet
        for cell in cells:
            for run in file.runs(cell.key):
                cell.rates.record(run["request_rate"], run["slo_attainment"])

    def has_work(self, cells: Sequence[Cell[S]]) -> bool:
        """Whether a run of these cells is left."""
        return any(self._next_rate(cell) is not None for cell in cells)

    def run(
        self,
        cells: Sequence[Cell[S]],
        *,
        warm_up: Callable[[Cell[S]], object],
        measure: Callable[[Cell[S], float], Mapping[str, Any]],
    ) -> None:
        """Serve until these cells are done.

        Args:
            cells: some of this runner's.
            warm_up: called before a cell's first run of this call.
            measure: serves a cell at a rate; returns the run's fields.
        """
        warm: set[CellKey] = set()
        while left := [cell for cell in cells if self._next_rate(cell) is not None]:
            cell = min(left, key=lambda cell: len(self.file.runs(cell.key)))
            if cell.key not in warm:
                warm_up(cell)
                warm.add(cell.key)
            rate = self._next_rate(cell)
            assert rate is not None
            fields = measure(cell, rate)
            self.file.add_run(cell.key, fields)
            cell.rates.record(rate, fields["slo_attainment"])
            self._finish_cells()
            if not self._quiet:
                self._print_run(cell, fields)

    def finish(self) -> None:
        """Mark the sweep as finished."""
        self._finish_cells()
        self.file.finish()

    def _next_rate(self, cell: Cell[S]) -> float | None:
        return None if self._is_given_up(cell) else cell.rates.next_rate()

    def _finish_cells(self) -> None:
        """Store the goodput of searches that are over; a run may end those of other cells, too."""
        for cell in self.cells:
            if self._next_rate(cell) is None and not self.file.cell(cell.key).finished:
                self.file.finish_cell(cell.key, cell.rates.goodput)

    def _print_run(self, cell: Cell[S], fields: Mapping[str, Any]) -> None:
        key, done = self.file.cell(cell.key), ""
        if key.finished:
            done = f"; goodput {'none' if key.goodput is None else f'{key.goodput:.4g}/s'}"
        when = "all at once" if fields.get("all_at_once") else f"at {fields['request_rate']:.4g}/s"
        click.echo(
            f"{cell.key.workload}, {cell.key.slo}, {cell.key.system}, {when}: "
            f"{100 * fields['slo_attainment']:.1f} % met, {fields['output_throughput']:,.0f} output tokens/s{done}",
            err=True,
        )
