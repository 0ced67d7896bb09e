"""Ratios of goodputs, judged by what the peer's searches have ruled out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.reporting.evidence import CLAIMED_SYSTEM, Source, is_own, is_search, tasks_of
from bench.reporting.markdown import number
from bench.reporting.measures import Figure
from bullet_graph.cli.bench.sweep_file import Sweep, SweepCell
from bullet_graph.perf.goodput_search import GoodputSearch


@dataclass(frozen=True, slots=True)
class Bracket:
    """Between which rates the goodput of the best of several settings lies, in requests a second.

    Attributes:
        best: the setting with the highest goodput found; of none, the first.
        lower: its highest rate that served enough; None: no setting had one.
        upper: the highest, over all settings, of the lowest rate above its own goodput that served too few;
            infinite: a setting was tried at no such rate.
        highest: the setting whose rate ``upper`` is.
    """

    best: SweepCell
    lower: float | None
    upper: float
    highest: SweepCell

    def is_closed(self, tolerance: float) -> bool:
        """Whether the ends are as close as the search asks for, relative to the lower one."""
        return self.lower is not None and self.upper - self.lower <= tolerance * self.lower


def bracket_of(cells: Sequence[SweepCell], attainment: float) -> Bracket:
    """The bracket of searches, at least one; what the runs tell, whether they are finished or not.

    Args:
        cells: settings of which the best counts.
        attainment: the share of requests that is enough.
    """
    # max() takes the first of equals: the order of the file.
    best = max(cells, key=lambda cell: _search(cell, attainment).goodput or 0.0)
    highest = max(cells, key=lambda cell: _ceiling(cell, attainment))
    return Bracket(best, _search(best, attainment).goodput, _ceiling(highest, attainment), highest)


def _search(cell: SweepCell, attainment: float) -> GoodputSearch:
    search = GoodputSearch(first_rate=1.0, attainment=attainment)
    for run in cell.runs:
        search.record(run["request_rate"], run["slo_attainment"])
    return search


def _ceiling(cell: SweepCell, attainment: float) -> float:
    ceiling = _search(cell, attainment).ceiling
    return math.inf if ceiling is None else ceiling


@dataclass(frozen=True, slots=True)
class GoodputRatio:
    """Goodput of the claimed setting over the best peer setting's, in one file.

    The engine's goodput is the highest rate that served enough. The peer's may be higher than the one found, where its
    search ended early: the value is against the upper end of its bracket, unless the search is closed. Searches that
    were cut give such a bound as well, and leave open how much more it is.
    """

    model: str
    workload: str
    slo: str
    attainment: float

    @property
    def place(self) -> str:
        """Where in the JSON it is."""
        return "`cells[].goodput` and the rates of `cells[].runs` of a comparison that searched for it"

    def find(self, source: Source) -> Iterator[Figure | str]:
        """One for each number of requests, the largest first."""
        sweep = source.sweep
        if sweep is None or sweep.settings.get("model") != self.model or not is_search(sweep):
            return
        tasks = tasks_of(sweep)
        for task in sorted(tasks, reverse=True):
            if (task.workload, task.slo) != (self.workload, self.slo):
                continue
            if sweep.settings["attainment"] != self.attainment:
                yield f"its attainment is {sweep.settings['attainment']:g}, not {self.attainment:g}"
            else:
                yield self._ratio(sweep, tasks[task], source.name)

    def _ratio(self, sweep: Sweep, cells: Sequence[SweepCell], file: str) -> Figure | str:
        own = next((cell for cell in cells if cell.key.system == CLAIMED_SYSTEM), None)
        peers = [cell for cell in cells if not is_own(cell.key.system)]
        if own is None or not peers:
            return f"it has no {CLAIMED_SYSTEM}" if own is None else "it has no peer"
        unfinished = [cell.key.system for cell in (own, *peers) if not cell.finished]
        peer = bracket_of(peers, self.attainment)
        found = _search(own, self.attainment).goodput
        if unfinished and (found is None or math.isinf(peer.upper)):
            return f"the search of {', '.join(unfinished)} is not finished"
        if found is None and peer.lower is None:
            return "neither this engine nor a peer served enough at any rate"
        mine, detail = found or 0.0, _detail(own, peer.best, self.attainment)
        at_best = math.inf if unfinished or peer.lower is None else mine / peer.lower
        if not unfinished and (not mine or peer.is_closed(float(sweep.settings.get("tolerance") or 0.0))):
            return Figure(at_best, detail, file)
        if math.isinf(peer.upper):
            against = f"no bound: the search of {peer.highest.key.system} is open above"
        elif peer.lower is None:
            against = f"no peer setting served enough at any rate tried, down to {peer.upper:.4g}/s"
        else:
            against = f"against the next rate tried, {peer.upper:.4g}/s"
            if peer.highest is not peer.best:
                against += f" by {peer.highest.key.system}"
        if unfinished:
            against += f"; the search of {', '.join(unfinished)} is not finished"
        return Figure(mine / peer.upper, detail, file, at_best=at_best, against=against)


def _detail(own: SweepCell, peer: SweepCell, attainment: float) -> str:
    rates, late = [], []
    for cell in (own, peer):
        goodput = _search(cell, attainment).goodput
        best = next((run for run in cell.runs[::-1] if run["request_rate"] == goodput), None)
        rates.append("none" if goodput is None else f"{goodput:.4g}/s")
        late.append(number(best["p99_ttft_ms"]) if best else "–")
    return (
        f"{rates[0]} against {rates[1]} ({peer.key.system}); p99 of TTFT there {late[0]} against {late[1]} ms"
    )
