"""Where a peer is ahead: found in the files, nothing left out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.reporting.evidence import (
    CLAIMED_SYSTEM,
    LATENCIES,
    Evidence,
    Task,
    is_own,
    is_search,
    median_of,
    runs_at,
    tasks_of,
)
from bullet_graph.cli.bench.sweep_file import SweepCell

_HIGHER_IS_BETTER = {
    "slo_attainment": "share that met all targets",
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
}
_FAILED = "failed requests"


def _shown(field: str) -> str:
    label, name, unit = field.split("_")
    return f"{name.upper()}, {label}, {unit}"


_LOWER_IS_BETTER = {field: _shown(field) for field in LATENCIES} | {
    "joules_per_token": "J/token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A figure of this engine's and the best of the peer settings'.

    Attributes:
        file: that has both.
        task: what was served.
        load: at what rate.
        figure: its name, with its unit.
        system: this engine's setting.
        own: its figure; None: it served enough at no rate.
        peer: the peer setting with the best figure.
        best: that figure.
        times_worse: above 1 where the peer is ahead; infinite where only the peer has a figure.
    """

    file: str
    task: Task
    load: str
    figure: str
    system: str
    own: float | None
    peer: str
    best: float
    times_worse: float


def compare_all(evidence: Evidence) -> Iterator[Compared]:
    """Every figure that this engine and a peer both have in one file at one load, each against the best peer's.

    Compared are the goodputs of finished searches, the figures at those goodputs, and the medians over repeated runs
    of one rate, or all at once. The engine's setting is ``auto``; all its settings where a file has no ``auto``.
    """
    for file, sweep in evidence.sweeps:
        for task, cells in tasks_of(sweep).items():
            own = [cell for cell in cells if is_own(cell.key.system)]
            own = [cell for cell in own if cell.key.system == CLAIMED_SYSTEM] or own
            peers = [cell for cell in cells if not is_own(cell.key.system)]
            for cell in own:
                if is_search(sweep):
                    yield from _at_goodput(file, task, cell, peers)
                yield from _at_same_load(file, task, cell, peers)


def _at_goodput(file: str, task: Task, own: SweepCell, peers: Sequence[SweepCell]) -> Iterator[Compared]:
    done = [cell for cell in peers if cell.finished and cell.goodput]
    if not own.finished or not done:
        return
    goodputs = {cell.key.system: {"goodput": cell.goodput} for cell in done}
    shown = {"goodput": "goodput, requests/s"}
    yield from _figures(file, task, "searched", own, {"goodput": own.goodput}, goodputs, shown, higher=True)
    if own.best is not None:
        # Against the peer setting that a user would choose, not against the best of every figure at any rate.
        best = max(done, key=lambda cell: cell.goodput or 0.0)
        load = f"each at its own goodput: {own.goodput:.4g}/s and {best.goodput:.4g}/s"
        at_best = {best.key.system: best.best or {}}
        yield from _figures(file, task, load, own, own.best, at_best, _LOWER_IS_BETTER, higher=False)


def _at_same_load(file: str, task: Task, own: SweepCell, peers: Sequence[SweepCell]) -> Iterator[Compared]:
    rates = sorted({run["request_rate"] for run in own.runs if not run.get("all_at_once")})
    for rate in (None, *rates):
        own_runs = runs_at(own, rate)
        peer_runs = {cell.key.system: runs_at(cell, rate) for cell in peers}
        peer_runs = {system: runs for system, runs in peer_runs.items() if runs}
        if not own_runs or not peer_runs:
            continue
        load = "all at once" if rate is None else f"{rate:.4g}/s"
        for shown, higher in ((_LOWER_IS_BETTER, False), (_HIGHER_IS_BETTER, True)):
            own_figures = {field: median_of(own_runs, field) for field in shown}
            peer_figures = {
                system: {field: median_of(runs, field) for field in shown}
                for system, runs in peer_runs.items()
            }
            yield from _figures(file, task, load, own, own_figures, peer_figures, shown, higher=higher)
        failed = {system: {_FAILED: _num_failed(runs)} for system, runs in peer_runs.items()}
        own_failed = {_FAILED: _num_failed(own_runs)}
        if own_failed[_FAILED]:
            yield from _figures(file, task, load, own, own_failed, failed, {_FAILED: _FAILED}, higher=False)


def _figures(
    file: str,
    task: Task,
    load: str,
    own: SweepCell,
    own_figures: Mapping[str, Any],
    peer_figures: Mapping[str, Mapping[str, Any]],
    shown: Mapping[str, str],
    *,
    higher: bool,
) -> Iterator[Compared]:
    for field, name in shown.items():
        peers = {system: of[field] for system, of in peer_figures.items() if of.get(field) is not None}
        if not peers:
            continue
        peer = (max if higher else min)(peers, key=lambda system: peers[system])
        value, best = own_figures.get(field), peers[peer]
        better, worse = (value, best) if higher else (best, value)
        yield Compared(
            file=file,
            task=task,
            load=load,
            figure=name,
            system=own.key.system,
            own=value,
            peer=peer,
            best=best,
            times_worse=_quotient(worse, better),
        )


def _quotient(worse: float | None, better: float | None) -> float:
    """How many times; infinite where this engine has none, or the peer has zero of something bad."""
    if worse is None or better is None:
        return float("inf")
    if better == 0:
        return 1.0 if worse == 0 else float("inf")
    return worse / better


def _num_failed(runs: Sequence[Mapping[str, Any]]) -> int:
    return sum(run["failed"] for run in runs)
