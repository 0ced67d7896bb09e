"""What the JSON files of results hold: measurements, and comparisons of this engine with peers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from bullet_graph.cli.tables import fastest_run, goodput_text
from bullet_graph.errors import ConfigError
from bullet_graph.perf.goodput_search import SHARES, Goodput, RateRun, bracket

OWN = "bullet_graph"
CLAIMED = "bullet_graph auto"
Run: TypeAlias = dict[str, Any]

_NEAR = 1.5
"""Across a wider factor, interpolation is a guess: ours counts as the lower rate, a peer's may be up to the higher."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file of results: its name and its JSON."""

    name: str
    fields: Any

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The measurements of a file that is a list, else the one object."""
        found = self.fields if isinstance(self.fields, list) else [self.fields]
        return [one for one in found if isinstance(one, dict)]

    @property
    def provenances(self) -> list[dict[str, Any]]:
        """Of all parts of the file."""
        parts = [*self.entries, *(run for one in self.entries for run in dicts(one.get("runs")))]
        found = [part.get("provenance") for part in parts]
        found += [more for one in self.entries for more in dicts(one.get("continued"))]
        return [one for one in found if isinstance(one, dict)]

    @property
    def date(self) -> str:
        """Of the newest part, ISO 8601; empty where the file has none."""
        return max((str(one.get("date_utc") or "") for one in self.provenances), default="")

    @property
    def card(self) -> str | None:
        """UUID of the only GPU it was measured on; None: several, or not recorded."""
        cards = {one.get("device_uuid") for one in self.provenances}
        return cards.pop() if len(cards) == 1 else None

    @property
    def origin(self) -> tuple[object, ...]:
        """Files of one card and one commit, unchanged, may be compared. Any other file stands alone."""
        commits = {None if one.get("git_dirty") else one.get("git_commit") for one in self.provenances}
        return (self.card, *commits) if self.card and len(commits) == 1 and None not in commits else (self.name,)

    @property
    def has_command(self) -> bool:
        """Whether the file records the command line that made it."""
        return any(one.get("argv") or one.get("command") for one in self.entries)

    @property
    def is_comparison(self) -> bool:
        """Whether ``bench sweep`` or ``bench.peers`` wrote it."""
        return isinstance(self.fields, dict) and "cells" in self.fields and "settings" in self.fields


def read_results(folder: Path) -> list[Source]:
    """All JSON files of a folder, by name; ConfigError if there is no such folder, or a file cannot be read."""
    if not folder.is_dir():
        raise ConfigError(f"--results {folder}: there is no such folder; give one with JSON files of results")
    sources = []
    for path in sorted(folder.glob("*.json")):
        try:
            sources.append(Source(path.name, json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}; mend it or take it away") from None
    return sources


def dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class Searched:
    """One system's search for a goodput; ``tolerance`` is relative."""

    cell: dict[str, Any]
    goodput: Goodput
    tolerance: float

    @classmethod
    def of(cls, cell: dict[str, Any], settings: dict[str, Any], share: float) -> "Searched":
        """From the runs of a cell, finished or not, of a file with these settings."""
        points = [RateRun.of(run) for run in cell["runs"]]
        goodput, (good, bad) = Goodput.of(points, share), bracket(points, share)
        if good and bad and bad.rate > _NEAR * good.rate:
            goodput = Goodput(good.rate if cell["system"].split()[0] == OWN else goodput.rate, bad.rate)
        return cls(cell, goodput, float(settings.get("tolerance") or 0))

    @property
    def text(self) -> str:
        """The goodput, with ``≥`` where the search ended before it was exact, ``<`` where no rate was served."""
        return f"{goodput_text(self.goodput, self.tolerance, '.3g')}/s"

    @property
    def best_run(self) -> Run | None:
        """The fastest run up to the goodput."""
        return dict(run) if (run := fastest_run(self.cell["runs"], self.goodput.rate)) else None

    @property
    def tail(self) -> str:
        """The p99 of TTFT in that run, as more text, and the run's rate where it is another than the goodput."""
        if (run := self.best_run) is None:
            return ""
        at = f" at {run['request_rate']:.3g}/s" if run["request_rate"] < 0.99 * (self.goodput.rate or 0.0) else ""
        return f", {run['p99_ttft_ms']:,.0f} ms{at}"


@dataclass(frozen=True, slots=True)
class Task:
    """What this engine and a peer are compared at: cells of one file, or of files of one card and commit.

    Attributes:
        own: this engine's cells by system.
        peers: the peer's, a cell for each of its settings.
        older: the same searches before it, newest first.
        runs: of ``auto`` with the included table, at rates, each with its file's date, also where no peer ran.
    """

    source: Source
    workload: str
    num_prompts: int | None
    slo: str
    own: dict[str, dict[str, Any]]
    peers: dict[str, dict[str, Any]]
    older: "list[Task]" = field(default_factory=list)
    runs: list[tuple[str, Run]] = field(default_factory=list)

    @property
    def model(self) -> str:
        """That was served, the format of the KV cache if it has one of its own, and the GPUs if they are several."""
        settings = self.source.fields["settings"]
        ranks = settings.get("tensor_parallel_size", 1)
        formats = ", FP8 KV" * (settings.get("kv_cache_dtype") == "fp8")
        return f"{settings['model']}{formats}{f', {ranks} GPUs' * (ranks > 1)}"

    @property
    def file(self) -> str:
        """The files that a row rests on."""
        own = [self.own[CLAIMED]] if self.is_search and CLAIMED in self.own else self.own.values()
        return "`, `".join(dict.fromkeys(name for cell in (*own, *self.peers.values()) for name in cell["files"]))

    @property
    def peer(self) -> str:
        """The peer's name."""
        kind = next(iter(self.peers)).split()[0]
        return {"vllm": "vLLM", "sglang": "SGLang"}.get(kind, kind)

    @property
    def short(self) -> str:
        """Such as ``conv, 500/15 ms``, the targets of TTFT and TPOT; then the peer, where it is not vLLM."""
        name = (self.workload.partition(":")[2] or self.workload).removesuffix(".jsonl")
        beside = f", {self.peer}" * (self.peer != "vLLM")
        if ":" not in self.slo:
            return f"{name}, {self.num_prompts} requests{beside}"
        return f"{name}, {self.slo.removeprefix('ttft:').replace('ms tpot:', '/').replace('ms', ' ms')}{beside}"

    @property
    def is_search(self) -> bool:
        """Whether it is for goodputs, and not all at once."""
        return not self.source.fields["settings"].get("all_at_once")

    @property
    def ours(self) -> "list[Task]":
        """This and the older ones in which this engine ran ``auto``."""
        return [one for one in (self, *self.older) if CLAIMED in one.own]

    def since(self, best: Run | None, share: float) -> str:
        """As text, how many of the later runs that tell contradict the best run; "" where none does."""
        later = [run for date, run in self.runs if best and date > self.source.date]
        served = [run["stable"] and run["slo_attainment"] >= share for run in later]
        rates = [run["request_rate"] / best["request_rate"] for run in later] if best else []
        good = [one for one, rate in zip(served, rates, strict=True) if (rate > 0.995 if one else rate < 1.005)]
        return f"; later {good.count(False)}/{len(good)} failed" * (False in good)

    def searched(self, share: float = min(SHARES)) -> tuple[Searched, list[Searched]]:
        """This engine's search for the rate that serves a share, and the peers'."""
        settings = self.source.fields["settings"]
        peers = [Searched.of(cell, settings, share) for cell in self.peers.values()]
        return Searched.of(self.own[CLAIMED], settings, share), peers


def tasks_of(sources: Sequence[Source]) -> list[Task]:
    """What both were measured at, a task for each peer; of the same searches, the newest. Short runs do not count."""
    found: dict[tuple[object, ...], Task] = {}
    for source in sorted(filter(lambda one: one.is_comparison, sources), key=lambda one: one.date):
        for cell in source.fields["cells"]:
            bursts = source.fields["settings"].get("burstiness", 1.0)
            workload = cell["workload"] + f", burstiness {bursts}" * (bursts != 1)
            new = Task(source, workload, cell["num_prompts"], cell["slo"], {}, {})
            key = source.origin, new.model, new.is_search, new.workload, new.num_prompts, new.slo
            task = found.setdefault(key, new)
            side = task.own if cell["system"].split()[0] == OWN else task.peers
            joined = side.setdefault(cell["system"], cell | {"runs": [], "files": []})
            joined["runs"].extend(run for run in cell["runs"] if run.get("sustained") is not False)
            joined["files"].append(source.name)
    tasks: dict[tuple[object, ...], Task] = {}
    runs: dict[tuple[object, ...], list[tuple[str, Run]]] = {}
    for one in found.values():
        own = runs.setdefault((one.model, one.workload, one.slo), [])
        if one.is_search and CLAIMED in one.own and not one.source.fields["settings"].get("perf_table"):
            own.extend((one.source.date, run) for run in one.own[CLAIMED]["runs"])
    for both in found.values():
        for kind in sorted({name.split()[0] for name in both.peers}) if both.own else ():
            peers = {name: cell for name, cell in both.peers.items() if name.split()[0] == kind}
            task = replace(both, peers=peers, older=[], runs=runs[both.model, both.workload, both.slo])
            # The number of requests of a search differs from run to run; all at once it is the work.
            key = task.model, kind, task.workload, task.slo, None if task.is_search else task.num_prompts
            if (before := tasks.get(key)) is not None:
                task.older.extend((before, *before.older))
            tasks[key] = task
    return sorted(
        tasks.values(), key=lambda one: (one.model, one.workload, one.slo, one.peer != "vLLM", one.source.name)
    )


def rate_of(run: Run) -> float:
    """Requests a second; inf: all at once."""
    return float("inf") if run.get("all_at_once") else run["request_rate"]


def figure_of(cell: dict[str, Any], rate: float, field: str) -> float | None:
    """Median of a figure over the runs at a rate; a run with a failed request does not count."""
    runs = (run for run in cell["runs"] if not run["failed"] and rate_of(run) == rate)
    values = [run[field] for run in runs if run.get(field) is not None]
    return median(values) if values else None


def best_of(cells: dict[str, dict[str, Any]], rate: float, field: str) -> tuple[str, float] | None:
    """The system with the lowest figure, and that figure."""
    known = {name: value for name, cell in cells.items() if (value := figure_of(cell, rate, field)) is not None}
    return min(known.items(), key=lambda item: item[1]) if known else None
