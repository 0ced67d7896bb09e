"""What a folder of results holds, read and checked once."""

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from bullet_graph.cli.bench.sweep_cells import SYSTEM
from bullet_graph.cli.bench.sweep_file import KIND, Sweep, SweepCell, read_sweep
from bullet_graph.errors import ConfigError

CLAIMED_SYSTEM = f"{SYSTEM} auto"
"""The setting that comparisons are claimed for: the engine's own choice."""

TARGET_DEVICE = "NVIDIA H200"
"""What the targets were set for; files of other devices are no evidence."""

LATENCIES = tuple(
    f"{label}_{name}_ms" for name in ("ttft", "tpot", "itl") for label in ("median", "p90", "p99")
)
_RUN_NUMBERS = ("duration", "failed", "request_throughput", "output_throughput")
_PEERS_PREFIX = "peers_"


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """What systems are compared at."""

    workload: str
    num_prompts: int
    slo: str

    def __str__(self) -> str:
        return f"{self.workload}, {self.num_prompts:,} requests, {self.slo}"


@dataclass(frozen=True, slots=True)
class Source:
    """A file of results.

    Attributes:
        name: of the file, without its folder.
        fields: its JSON.
        sweep: what it holds where it is a sweep's file, else None.
    """

    name: str
    fields: Any
    sweep: Sweep | None = None

    @property
    def provenances(self) -> list[Mapping[str, Any]]:
        """Of every start that wrote into the file, each once; empty where the file does not tell."""
        if self.sweep is not None:
            found: Sequence[Any] = [self.sweep.provenance, *self.sweep.continued]
        elif isinstance(self.fields, dict):
            parts = self.fields.get("runs") if isinstance(self.fields.get("runs"), list) else []
            found = [_provenance(self.fields), *_provenances(parts)]
        else:
            found = _provenances(self.fields)
        told = [one for one in found if isinstance(one, dict)]
        return [one for index, one in enumerate(told) if one not in told[:index]]

    @property
    def newest_date(self) -> str:
        """ISO 8601; empty where the file does not tell."""
        return max((str(one.get("date_utc") or "") for one in self.provenances), default="")

    @property
    def devices(self) -> set[str]:
        """Names of the GPUs it was measured on."""
        return {str(one.get("device_name") or "an untold device") for one in self.provenances}

    @property
    def cards(self) -> set[str]:
        """UUIDs of the GPUs it was measured on; empty where the file does not tell."""
        return {str(one["device_uuid"]) for one in self.provenances if one.get("device_uuid")}

    def is_of(self, cards: Set[str]) -> bool:
        """Whether it was measured on this very card, of which ``cards`` is the only one."""
        return len(cards) == 1 and self.cards == cards

    @property
    def measurements(self) -> list[Mapping[str, Any]]:
        """The entries of a file of ``bench/offline.py``; empty for any other."""
        if isinstance(self.fields, list) and all(
            isinstance(one, dict) and "command" in one for one in self.fields
        ):
            return self.fields
        return []

    @property
    def is_scaling(self) -> bool:
        """Whether ``bench/partitions.py`` wrote it."""
        return (
            isinstance(self.fields, dict) and {"points", "prompt", "seconds", "backend"} <= self.fields.keys()
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """All files of a folder.

    Attributes:
        sources: by name.
    """

    sources: tuple[Source, ...]

    @property
    def newest_first(self) -> list[Source]:
        """The sources by date; those of one date by name."""
        return sorted(self.sources, key=lambda source: source.newest_date, reverse=True)

    @property
    def sweeps(self) -> list[tuple[str, Sweep]]:
        """Files of comparisons and sweeps, by name."""
        return [(source.name, source.sweep) for source in self.sources if source.sweep is not None]


def read_evidence(folder: Path) -> Evidence:
    """Read all JSON files of a folder.

    Raises:
        ConfigError: there is no such folder, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"--results {folder}: there is no such folder; give one with JSON files of results")
    return Evidence(tuple(_read_source(path) for path in sorted(folder.glob("*.json"))))


def is_own(system: str) -> bool:
    """Whether a system of a sweep's file is this engine under some setting."""
    return system == SYSTEM or system.startswith(f"{SYSTEM} ")


def is_search(sweep: Sweep) -> bool:
    """Whether its rates were searched for a goodput; given rates, or all at once, tell none."""
    return sweep.settings.get("rates") is None and not sweep.settings.get("all_at_once")


def tasks_of(sweep: Sweep) -> dict[Task, list[SweepCell]]:
    """Cells by what they compare systems at."""
    tasks: dict[Task, list[SweepCell]] = {}
    for cell in sweep.cells:
        tasks.setdefault(Task(cell.key.workload, cell.key.num_prompts, cell.key.slo), []).append(cell)
    return tasks


def runs_at(cell: SweepCell, rate: float | None) -> list[dict[str, Any]]:
    """Runs of a cell at a rate, in requests a second; None: those with all requests at once."""
    if rate is None:
        return [run for run in cell.runs if run.get("all_at_once")]
    return [run for run in cell.runs if not run.get("all_at_once") and run["request_rate"] == rate]


def median_of(runs: Sequence[Mapping[str, Any]], field: str) -> float | None:
    """Median of a figure over runs that served every request.

    Returns:
        None: there is no such run, or one of them lacks the figure.
    """
    values = [run.get(field) for run in runs if not run["failed"]]
    return median(values) if values and None not in values else None  # type: ignore[type-var]


def mean_of_device(run: Mapping[str, Any], name: str) -> float | None:
    """Mean of ``power_w`` or ``sm_clock_mhz`` over a run; None: not watched."""
    samples = (run.get("device") or {}).get(name)
    return samples["mean"] if samples else None


def _read_source(path: Path) -> Source:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; mend it or take it away") from None
    is_sweep = isinstance(fields, dict) and fields.get("kind") == KIND
    if not is_sweep and not path.name.startswith(_PEERS_PREFIX):
        source = Source(path.name, fields)
        _check_measurements(path, source)
        return source
    sweep = read_sweep(path)
    try:
        _check_sweep(sweep)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is a damaged sweep's file: {type(error).__name__}: {error}; measure it anew or take it away"
        ) from None
    return Source(path.name, fields, sweep)


def _check_sweep(sweep: Sweep) -> None:
    _require_number(sweep.settings["attainment"], "attainment of the settings")
    for cell in sweep.cells:
        if cell.goodput is not None:
            _require_number(cell.goodput, "goodput of a cell")
        for run in cell.runs:
            for name in _RUN_NUMBERS:
                _require_number(run[name], f"{name} of a run")
            for name in LATENCIES:
                if run[name] is not None:
                    _require_number(run[name], f"{name} of a run")
            _check_energy(run)


def _check_energy(run: Mapping[str, Any]) -> None:
    """What a run tells of energy, power and clock, if anything."""
    told = {name: run.get(name) for name in ("joules_per_token", "energy_joules")}
    told |= {f"device.{name}.mean": mean_of_device(run, name) for name in ("power_w", "sm_clock_mhz")}
    for name, value in told.items():
        if value is not None:
            _require_number(value, f"{name} of a run")


def _check_measurements(path: Path, source: Source) -> None:
    """The figures that targets are judged by."""
    try:
        for one in source.measurements:
            if "decode_step_ms" in one:
                for name in ("batch_size", "input_len", "output_len"):
                    _require_number(one[name], name)
                _require_number(one["decode_step_ms"]["p50"], "decode_step_ms.p50")
            if "elapsed_time" in one:
                for name in ("elapsed_time", "num_requests", "num_failed"):
                    _require_number(one[name], name)
                _check_energy(one)
                if not isinstance(one["policy"], str):
                    raise TypeError(f"policy must be text, got {one['policy']!r}")
        if source.is_scaling:
            for point in source.fields["points"]:
                if point["decode_sms"] is None:
                    _require_number(point["prefill_sms"], "prefill_sms")
                    _require_number(point["prefill_tokens_per_s"], "prefill_tokens_per_s")
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged: {type(error).__name__}: {error}; measure it anew or take it away"
        ) from None


def _require_number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{name} must be a number, got {value!r}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


def _provenances(parts: Any) -> list[Any]:
    return [_provenance(part) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _provenance(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """That of a report, with the commit that it says was measured, if it does."""
    told = {name: part[name] for name in ("measured_commit",) if name in part}
    provenance = part.get("provenance")
    return {**(provenance or {}), **told} or None
