"""How a target's figure comes of a file. Each measure names its place in the JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from bench.reporting.evidence import (
    CLAIMED_SYSTEM,
    Source,
    is_own,
    median_of,
    runs_at,
    tasks_of,
)
from bench.reporting.markdown import number
from bullet_graph.cli.bench.sweep_cells import SYSTEM


@dataclass(frozen=True, slots=True)
class Figure:
    """Evidence.

    Attributes:
        value: in the target's unit; where the evidence leaves a range, its end that is worse for this engine.
        detail: what it is of, for people.
        file: that has it.
        at_best: the other end of that range; None: there is no range.
        against: what ``value`` is held against where there is a range, for people.
    """

    value: float
    detail: str
    file: str
    at_best: float | None = None
    against: str = ""


class Measure(Protocol):
    """One kind of figure."""

    @property
    def place(self) -> str:
        """Where in the JSON it is."""

    def find(self, source: Source) -> Iterator[Figure | str]:
        """Figures of a file, the one that counts first; text tells why a file that comes near has none."""


@dataclass(frozen=True, slots=True)
class RunRatio:
    """A figure of runs at one load, over the lowest of the peer settings'; medians over repeated runs.

    This engine's figure is its own choice's, all at once its best setting's.

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
        claimed = self.rate is not None and CLAIMED_SYSTEM in own
        mine = CLAIMED_SYSTEM if claimed else min(own, key=lambda system: own[system])
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
        steps_ms = [one["decode_step_ms"]["p50"] for one in self.entries(source)]
        if steps_ms:
            yield Figure(median(steps_ms), f"median step, {of_runs(steps_ms, 3)}", source.name)

    def entries(self, source: Source) -> list[Mapping[str, Any]]:
        """The measurements of a file that the figure is of."""
        return [
            one
            for one in source.measurements
            if "decode_step_ms" in one
            and one.get("model") == self.model
            and one["batch_size"] == self.batch_size
            and one["input_len"] + one["output_len"] / 2 == self.context
        ]


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


def of_runs(values: Sequence[float], decimals: int = 2) -> str:
    """What a median is of, for people."""
    if len(values) == 1:
        return "one run"
    return f"median of {len(values)} runs, {number(min(values), decimals)} to {number(max(values), decimals)}"
