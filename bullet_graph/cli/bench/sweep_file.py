"""The one file of a sweep: each run is in it as soon as it has ended, and an interrupted sweep resumes from it."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullet_graph.cli.result_file import check_result_file, command_line, to_json, write_result_file
from bullet_graph.errors import ConfigError

FORMAT = 1
KIND = "goodput sweep"
_MOST_DIFFERENCES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class CellKey:
    """The name of one search.

    Attributes:
        system: what served, with its setting, such as ``bullet_graph auto`` or ``vllm 0.24.0 chunk 512``.
        num_prompts: requests of each run.
        slo: the targets, as ``str(Slo)`` writes them.
    """

    system: str
    workload: str
    num_prompts: int
    slo: str


@dataclass(frozen=True, slots=True)
class SweepCell:
    """The progress of one search.

    Attributes:
        goodput: the highest rate that served enough, in requests per second; None: none did, or it is not finished.
        finished: whether the search is over.
        runs: the fields of each run, in the order of running: those of
            :class:`~bullet_graph.perf.metrics.ReplayResult`, and what the system adds.
    """

    key: CellKey
    goodput: float | None = None
    finished: bool = False
    runs: tuple[dict[str, Any], ...] = ()

    @property
    def best(self) -> dict[str, Any] | None:
        """The last run at the goodput; None where there is none."""
        return next((run for run in reversed(self.runs) if run["request_rate"] == self.goodput), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The content of a sweep's file.

    Attributes:
        settings: everything that decides the runs; ``attainment`` is the share of requests that must meet all targets.
        provenance: of the machine and the code that began the sweep; ``continued`` has those of later starts on others.
        argv: the command line that began it.
        cells: in the order of their first runs.
    """

    settings: dict[str, Any]
    provenance: dict[str, Any]
    argv: tuple[str, ...] = ()
    continued: tuple[dict[str, Any], ...] = ()
    finished: bool = False
    cells: tuple[SweepCell, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The sweep as in its file's JSON."""
        return {
            "format": FORMAT,
            "kind": KIND,
            "finished": self.finished,
            "argv": list(self.argv),
            "settings": self.settings,
            "provenance": self.provenance,
            "continued": list(self.continued),
            "cells": [
                dataclasses.asdict(cell.key)
                | {"goodput": cell.goodput, "finished": cell.finished, "runs": list(cell.runs)}
                for cell in self.cells
            ],
        }


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's file, finished or not.

    Raises:
        ConfigError: it cannot be read, or is not a sweep's file of this format.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no sweep's file, it cannot be read as JSON: {error}") from None
    found = (fields.get("kind"), fields.get("format")) if isinstance(fields, dict) else (None, None)
    if found != (KIND, FORMAT):
        raise ConfigError(
            f"{path} is no sweep's file: it must have kind {KIND!r} and format {FORMAT}, got {found[0]!r} and "
            f"{found[1]!r}"
        )
    try:
        return Sweep(
            settings=dict(fields["settings"]),
            provenance=dict(fields["provenance"]),
            argv=tuple(fields.get("argv", ())),
            continued=tuple(fields["continued"]),
            finished=bool(fields["finished"]),
            cells=tuple(_read_cell(cell) for cell in fields["cells"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is a damaged sweep's file: {type(error).__name__}: {error}") from None


def _read_cell(fields: Mapping[str, Any]) -> SweepCell:
    runs = tuple(dict(run) for run in fields["runs"])
    for name, run in itertools.product(("request_rate", "slo_attainment"), runs):
        if not isinstance(run[name], (int, float)):
            raise TypeError(f"{name} of a run must be a number, got {run[name]!r}")
    key = CellKey(*(fields[field.name] for field in dataclasses.fields(CellKey)))
    return SweepCell(key, fields["goodput"], bool(fields["finished"]), runs)


class SweepFile:
    """A sweep under way. :meth:`open` makes it; the file itself appears with the first run."""

    def __init__(self, path: Path, sweep: Sweep) -> None:
        self.path = path
        self.sweep = sweep

    @classmethod
    def open(
        cls, path: Path, *, settings: Mapping[str, Any], provenance: Mapping[str, Any], overwrite: bool
    ) -> "SweepFile":
        """Begin a sweep, or resume the one in the file if it has these settings and is not finished.

        Args:
            settings: everything that decides the runs, in values that JSON has.
            provenance: of this machine and code; its ``date_utc`` may differ when a sweep resumes.
            overwrite: whether a file that cannot be resumed may be replaced.

        Raises:
            ConfigError: the file cannot be written; or, without ``overwrite``, it is finished, or of another sweep, or
                not a sweep's file.
        """
        check_result_file(path, overwrite=True)
        new = Sweep(settings=_as_json(settings), provenance=_as_json(provenance), argv=tuple(command_line()))
        if not path.exists():
            return cls(path, new)
        try:
            found = read_sweep(path)
            _require_same(path, found, new.settings)
        except ConfigError as error:
            if overwrite:
                return cls(path, new)
            raise ConfigError(f"{error}; add --overwrite or give another name") from None
        known = (found.provenance, *found.continued)
        if not any(_without_date(new.provenance) == _without_date(other) for other in known):
            found = dataclasses.replace(found, continued=(*found.continued, new.provenance))
        return cls(path, found)

    @property
    def num_runs(self) -> int:
        """Runs in the file."""
        return sum(len(cell.runs) for cell in self.sweep.cells)

    def cell(self, key: CellKey) -> SweepCell:
        """The progress of a search."""
        return next((cell for cell in self.sweep.cells if cell.key == key), SweepCell(key))

    def add_run(self, key: CellKey, fields: Mapping[str, Any]) -> None:
        """Append a run, in values that JSON has; ``request_rate`` and ``slo_attainment`` are numbers."""
        cell = self.cell(key)
        self._put(dataclasses.replace(cell, runs=(*cell.runs, _as_json(fields))))

    def finish_cell(self, key: CellKey, goodput: float | None) -> None:
        """Store the goodput of a search that is over."""
        self._put(dataclasses.replace(self.cell(key), goodput=goodput, finished=True))

    def finish(self) -> None:
        """Mark the sweep as finished: it will not be resumed."""
        self._write(finished=True)

    def _put(self, cell: SweepCell) -> None:
        cells = {known.key: known for known in self.sweep.cells} | {cell.key: cell}
        self._write(cells=tuple(cells.values()))

    def _write(self, **changes: Any) -> None:
        self.sweep = dataclasses.replace(self.sweep, **changes)
        write_result_file(self.path, to_json(self.sweep.fields()))


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


def _without_date(provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in provenance.items() if name != "date_utc"}


def _as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same values as a file returns them: a tuple becomes a list."""
    parsed: dict[str, Any] = json.loads(json.dumps(fields, allow_nan=False))
    return parsed
