"""How a target's figure comes of a file. Each measure names its place in the JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from bench.reporting.evidence import (
    CLAIMED_SYSTEM,
    Source,
    is_own,
    is_search,
    median_of,
    runs_at,
    tasks_of,
)
from bench.reporting.markdown import number
from bullet_graph.cli.bench.sweep_cells import SYSTEM
from bullet_graph.cli.bench.sweep_file import SweepCell


@dataclass(frozen=True, slots=True)
class Figure:
    """Evidence.

    Attributes:
        value: in the target's unit.
        detail: what it is of, for people.
        file: that has it.
    """

    value: float
    detail: str
    file: str


class Measure(Protocol):
    """One kind of figure."""

    @property
    def place(self) -> str:
        """Where in the JSON it is."""

    def find(self, source: Source) -> Iterator[Figure | str]:
        """Figures of a file, the one that counts first; text tells why a file that comes near has none."""


@dataclass(frozen=True, slots=True)
class DurationAllAtOnce:
    """Seconds for a workload's first requests, all there at the start: the quickest setting's median run."""

    model: str
    workload: str
    num_prompts: int

    @property
    def place(self) -> str:
        """Where in the JSON it is."""
        return "`duration` of all-at-once runs of a comparison, or `elapsed_time` of `bench/offline.py`"

    def find(self, source: Source) -> Iterator[Figure | str]:
        """At most one figure."""
        seconds: dict[str, list[float]] = {}
        num_incomplete = 0
        for system, duration_s, failed in self._durations(source):
            if failed:
                num_incomplete += 1
            else:
                seconds.setdefault(system, []).append(duration_s)
        if seconds:
            system, durations = min(seconds.items(), key=lambda item: median(item[1]))
            yield Figure(median(durations), f"{system}, {_of_runs(durations)}", source.name)
        elif num_incomplete:
            yield f"{num_incomplete} runs, all with failed requests"

    def _durations(self, source: Source) -> Iterator[tuple[str, float, int]]:
        if source.sweep is not None and source.sweep.settings.get("model") == self.model:
            for cell in source.sweep.cells:
                if is_own(cell.key.system) and (cell.key.workload, cell.key.num_prompts) == (
                    self.workload,
                    self.num_prompts,
                ):
                    for run in runs_at(cell, None):
                        yield cell.key.system, run["duration"], run["failed"]
        for one in source.measurements:
            if "elapsed_time" in one and (one.get("model"), one.get("trace"), one["num_requests"]) == (
                self.model,
                self.workload,
                self.num_prompts,
            ):
                yield f"{SYSTEM} {one['arm']}", one["elapsed_time"], one["num_failed"]


@dataclass(frozen=True, slots=True)
class GoodputRatio:
    """Goodput of the claimed setting over that of the peer setting with the highest, in one file."""

    model: str
    workload: str
    slo: str
    attainment: float

    @property
    def place(self) -> str:
        """Where in the JSON it is."""
        return "`cells[].goodput` of a comparison that searched for it"

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
                yield self._ratio(tasks[task], source.name)

    def _ratio(self, cells: Sequence[SweepCell], file: str) -> Figure | str:
        own = next((cell for cell in cells if cell.key.system == CLAIMED_SYSTEM), None)
        peers = [cell for cell in cells if not is_own(cell.key.system)]
        if own is None or not peers:
            return f"it has no {CLAIMED_SYSTEM}" if own is None else "it has no peer"
        unfinished = [cell.key.system for cell in (own, *peers) if not cell.finished]
        if unfinished:
            return f"the search of {', '.join(unfinished)} is not finished"
        # max() takes the first of equals: the order of the file.
        best = max(peers, key=lambda cell: cell.goodput or 0.0)
        if not best.goodput:
            return "no peer setting served enough at any rate: there is nothing to divide by"
        detail = f"{_goodput(own)} against {_goodput(best)} ({best.key.system})"
        late = [number(cell.best["p99_ttft_ms"]) if cell.best else "–" for cell in (own, best)]
        return Figure(
            (own.goodput or 0.0) / best.goodput,
            f"{detail}; p99 of TTFT there {late[0]} against {late[1]} ms",
            file,
        )


@dataclass(frozen=True, slots=True)
class RunRatio:
    """A figure of runs at one load, over the lowest of the peer settings'; medians over repeated runs.

    Attributes:
        num_prompts: of the workload; None is any.
        rate: in requests a second; None is all at once.
        field: of the runs.
        unit: of the field.
    """

    model: str
    workload: str
    num_prompts: int | None
    rate: float | None
    field: str
    unit: str

    @property
    def place(self) -> str:
        """Where in the JSON it is."""
        load = "all-at-once runs" if self.rate is None else f"runs with `request_rate` {self.rate:g}"
        return f"`{self.field}` of {load} of a comparison"

    def find(self, source: Source) -> Iterator[Figure | str]:
        """One for each number of requests and targets, the most requests first."""
        if source.sweep is None or source.sweep.settings.get("model") != self.model:
            return
        tasks = tasks_of(source.sweep)
        for task in sorted(tasks, key=lambda task: (-task.num_prompts, task.slo)):
            if task.workload == self.workload and self.num_prompts in (None, task.num_prompts):
                runs = {cell.key.system: runs_at(cell, self.rate) for cell in tasks[task]}
                if any(runs.values()):
                    yield self._ratio({name: of for name, of in runs.items() if of}, source.name)

    def _ratio(self, runs: Mapping[str, Sequence[Mapping[str, object]]], file: str) -> Figure | str:
        figures = {system: median_of(of, self.field) for system, of in runs.items()}
        known = {system: value for system, value in figures.items() if value is not None}
        missing = [system for system in figures if system not in known]
        if missing:
            return f"{', '.join(missing)} has no run with {self.field} that served every request"
        own = {system: value for system, value in known.items() if is_own(system)}
        peers = {system: value for system, value in known.items() if not is_own(system)}
        if not own or not peers:
            return f"it has no {'peer' if own else SYSTEM} at this load"
        mine = CLAIMED_SYSTEM if CLAIMED_SYSTEM in own else min(own, key=lambda system: own[system])
        best = min(peers, key=lambda system: peers[system])
        if peers[best] <= 0:
            return f"{self.field} of {best} is {peers[best]:g}: there is nothing to divide by"
        decimals = 4 if self.unit == "J" else 1
        shown = f"{number(own[mine], decimals)} {self.unit} ({mine})"
        return Figure(
            own[mine] / peers[best],
            f"{shown} against {number(peers[best], decimals)} {self.unit} ({best})",
            file,
        )


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Median decode step in ms, at a context that is right on average over the steps; the median of repeated runs."""

    model: str
    batch_size: int
    context: int

    @property
    def place(self) -> str:
        """Where in the JSON it is."""
        return "`decode_step_ms.p50` of `bench/offline.py`"

    def find(self, source: Source) -> Iterator[Figure | str]:
        """At most one figure."""
        steps_ms = [
            one["decode_step_ms"]["p50"]
            for one in source.measurements
            if "decode_step_ms" in one
            and one.get("model") == self.model
            and one["batch_size"] == self.batch_size
            and one["input_len"] + one["output_len"] / 2 == self.context
        ]
        if steps_ms:
            yield Figure(median(steps_ms), f"median step, {_of_runs(steps_ms, 3)}", source.name)


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Tokens a second of prompts of one length on the whole GPU, nothing beside them.

    Attributes:
        prompt: tokens.
        least_seconds: of measuring, to count as sustained.
    """

    model: str
    prompt: int
    least_seconds: float

    @property
    def place(self) -> str:
        """Where in the JSON it is."""
        return "`points[].prefill_tokens_per_s` of `bench/partitions.py`, on all SMs, without decode"

    def find(self, source: Source) -> Iterator[Figure | str]:
        """At most one figure."""
        if not source.is_scaling or (source.fields.get("model"), source.fields["prompt"]) != (
            self.model,
            self.prompt,
        ):
            return
        alone = [point for point in source.fields["points"] if point["decode_sms"] is None]
        if not alone:
            return
        if source.fields["seconds"] < self.least_seconds:
            yield f"measured for {source.fields['seconds']:g} s, not {self.least_seconds:g} s"
            return
        whole = max(alone, key=lambda point: point["prefill_sms"])
        backend = source.fields["backend"].split(":")[0]
        detail = f"{whole['prefill_sms']} SMs for {source.fields['seconds']:g} s, {backend}"
        yield Figure(whole["prefill_tokens_per_s"], detail, source.name)


def _goodput(cell: SweepCell) -> str:
    return "none" if cell.goodput is None else f"{cell.goodput:.4g}/s"


def _of_runs(values: Sequence[float], decimals: int = 2) -> str:
    if len(values) == 1:
        return "one run"
    return f"median of {len(values)} runs, {number(min(values), decimals)} to {number(max(values), decimals)}"
