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

S = TypeVar("S")  # what serves a cell: a policy of this engine, or a system of a comparison


class Rates(Protocol):
    """The rates of one cell: a :class:`~bullet_graph.perf.goodput_search.GoodputSearch`, or fixed ones."""

    @property
    def goodput(self) -> float | None: ...
    @property
    def ceiling(self) -> float | None: ...
    def next_rate(self) -> float | None: ...
    def record(self, rate: float, attainment: float) -> None: ...


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
    """One search: a workload with its targets, served by one system, from ``first_rate`` (requests per second) on."""

    key: CellKey
    workload: Workload
    slo: Slo
    system: S
    first_rate: float
    rates: Rates = field(compare=False)

    def __str__(self) -> str:
        """As ``--workload`` takes it."""
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
        slos: the targets of workloads without targets of their own; ``first_rate`` likewise.
        systems: by their names in the file.
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
            for run in file.cell(cell.key).runs:
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
        """Serve until these cells are done, after a ``warm_up`` of each; ``measure`` returns a run's fields."""
        warm: set[CellKey] = set()
        while left := [(cell, rate) for cell in cells if (rate := self._next_rate(cell)) is not None]:
            cell, rate = min(left, key=lambda each: len(self.file.cell(each[0].key).runs))
            if cell.key not in warm:
                warm_up(cell)
                warm.add(cell.key)
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
        found, done = self.file.cell(cell.key), ""
        if found.finished:
            done = f"; goodput {'none' if found.goodput is None else f'{found.goodput:.4g}/s'}"
        when = "all at once" if fields.get("all_at_once") else f"at {fields['request_rate']:.4g}/s"
        click.echo(
            f"{cell.key.workload}, {cell.key.slo}, {cell.key.system}, {when}: "
            f"{100 * fields['slo_attainment']:.1f} % met, {fields['output_throughput']:,.0f} output tokens/s{done}",
            err=True,
        )
