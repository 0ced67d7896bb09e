"""Workloads whose requests are all there at the start."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from bench.peers.systems import own_setting
from bench.reporting.evidence import Source, is_own, mean_of_device, runs_at
from bench.reporting.measures import Figure, of_runs
from bullet_graph.cli.bench.sweep_cells import SYSTEM

_FULL_SHARE = 0.99
"""Of a KV cache's blocks: the next prompt may need more than what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllAtOnceRun:
    """A run, whichever benchmark wrote it.

    Attributes:
        system: this engine's setting.
        duration_s: from the first request to the last token.
        failed: requests.
        energy_joules: of the whole GPU; None: not watched.
        sm_clock_mhz: mean; None: not watched.
        prompt_tokens, output_tokens: of all requests; None: not told.
        full_kv_blocks: blocks of its KV cache, where they were nearly all taken and requests may wait; else None.
    """

    system: str
    duration_s: float
    failed: int
    energy_joules: float | None
    sm_clock_mhz: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    full_kv_blocks: int | None


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
        quickest = self._quickest(source)
        if quickest:
            durations = [run.duration_s for run in quickest]
            detail = f"{quickest[0].system}, {of_runs(durations)}"
            full = next((run.full_kv_blocks for run in quickest if run.full_kv_blocks), None)
            if full is not None:
                detail += f", its KV cache of {full:,} blocks full"
            yield Figure(median(durations), detail, source.name)
        elif num_runs := sum(1 for _ in self._runs(source)):
            yield f"{num_runs} runs, all with failed requests"

    def run_of(self, source: Source) -> AllAtOnceRun | None:
        """The run that the figure is of; of an even number, the quicker one of the middle."""
        quickest = self._quickest(source)
        if not quickest:
            return None
        middle = median_low(run.duration_s for run in quickest)
        return next(run for run in quickest if run.duration_s == middle)

    def runs_by_setting(self, source: Source) -> Mapping[str, Sequence[AllAtOnceRun]]:
        """All runs of this engine's without failed requests, by its setting."""
        runs: dict[str, list[AllAtOnceRun]] = {}
        for run in self._runs(source):
            if not run.failed:
                runs.setdefault(run.system, []).append(run)
        return runs

    def _quickest(self, source: Source) -> Sequence[AllAtOnceRun]:
        """The runs of the setting whose median is the lowest; empty: there are none."""
        runs = self.runs_by_setting(source).values()
        return min(runs, key=lambda of: median(run.duration_s for run in of), default=())

    def _runs(self, source: Source) -> Iterator[AllAtOnceRun]:
        asked = (self.workload, self.num_prompts)
        if source.sweep is not None and source.sweep.settings.get("model") == self.model:
            for cell in source.sweep.cells:
                if is_own(cell.key.system) and (cell.key.workload, cell.key.num_prompts) == asked:
                    for run in runs_at(cell, None):
                        yield _run(cell.key.system, run["duration"], run["failed"], run)
        for one in source.measurements:
            if "elapsed_time" in one and (one.get("model"), one.get("trace"), one["num_requests"]) == (
                self.model,
                *asked,
            ):
                order = (one.get("engine") or {}).get("prompt_order", "arrival")
                setting = own_setting(one["policy"], order)
                yield _run(f"{SYSTEM} {setting}", one["elapsed_time"], one["num_failed"], one)


def _run(system: str, duration_s: float, failed: int, fields: Mapping[str, Any]) -> AllAtOnceRun:
    return AllAtOnceRun(
        system=system,
        duration_s=duration_s,
        failed=failed,
        energy_joules=fields.get("energy_joules"),
        sm_clock_mhz=mean_of_device(fields, "sm_clock_mhz"),
        prompt_tokens=fields.get("total_input_tokens"),
        output_tokens=fields.get("total_output_tokens"),
        full_kv_blocks=_full_kv_blocks(fields.get("system_counters", fields)),
    )


def _full_kv_blocks(counters: Mapping[str, Any]) -> int | None:
    peak, total = counters.get("kv_blocks_peak"), counters.get("kv_blocks_total")
    return total if peak is not None and total and peak >= _FULL_SHARE * total else None
