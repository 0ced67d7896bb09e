"""Tables of the report."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.reporting.evidence import LATENCIES, Source, Task, is_own, is_search, mean_of_device, tasks_of
from bench.reporting.markdown import folded, number, significant, table
from bench.reporting.measures import Figure
from bench.reporting.targets import Target, Verdict
from bench.reporting.worse import Compared
from bullet_graph.cli.bench.sweep_file import Sweep, SweepCell
from bullet_graph.slo import NO_TARGETS

_FIGURES = (
    "met all targets, %",
    "requests/s",
    "output tokens/s",
    "TTFT p50 / p90 / p99, ms",
    "TPOT p50 / p90 / p99, ms",
    "ITL p50 / p90 / p99, ms",
    "failed",
    "J/token",
    "W",
    "SM MHz",
)


def target_table(verdicts: Iterable[Verdict]) -> list[str]:
    """What was wanted, and what was measured."""
    rows = []
    for verdict in verdicts:
        target, figure = verdict.target, verdict.figure
        unit = target.unit if target.unit.startswith("×") else f" {target.unit}"
        said = list(verdict.reasons)
        measured = "–"
        if figure is not None:
            measured = _measured(figure, target)
            said = [f"{figure.detail} (`{figure.file}`)"]
            said += [f"also {_measured(o, target)}: {o.detail} (`{o.file}`)" for o in verdict.older]
        word = verdict.word if verdict.word == "not measured" else f"**{verdict.word}**"
        wanted = f"{target.comparator} {target.limit:,g}{' ' if unit.startswith('×') else ''}{unit}"
        rows.append([target.name, wanted, measured, word, "; ".join(said) or "no file has it"])
    return table(("what", "target", "measured", "verdict", "of what"), rows, num_left=5)


def _measured(figure: Figure, target: Target) -> str:
    """The value with its unit; of a range the end that is better for this engine first."""

    def shown(value: float) -> str:
        return f"{_beside(value, target.limit)}{'×' if target.unit.startswith('×') else f' {target.unit}'}"

    if figure.at_best is None:
        return shown(figure.value)
    if math.isinf(figure.at_best):
        return f"at least {shown(figure.value)} ({figure.against})"
    if figure.value == 0:
        return f"{shown(figure.at_best)} ({figure.against})"
    return f"{shown(figure.at_best)} ({shown(figure.value)} {figure.against})"


def place_table(verdicts: Iterable[Verdict]) -> list[str]:
    """Where each target's figure is looked for."""
    places: dict[str, list[str]] = {}
    for verdict in verdicts:
        places.setdefault(verdict.target.measure.place, []).append(verdict.target.name)
    return table(
        ("where in the JSON", "targets"), [[place, "; ".join(names)] for place, names in places.items()], 2
    )


def machine_table(sources: Iterable[Source]) -> list[str]:
    """Where each file comes from; a row for each of its starts that differs in more than the date."""
    rows: list[list[str]] = []
    for source in sources:
        dates: dict[tuple[str, ...], list[str]] = {}
        for one in source.provenances or [{}]:
            dates.setdefault(_machine(one), []).append(str(one.get("date_utc") or "not told"))
        for machine, found in dates.items():
            first, last = min(found), max(found)
            rows.append([f"`{source.name}`", first if first == last else f"{first} to {last}", *machine])
    header = ("file", "date (UTC)", "GPU", "driver / CUDA", "host, CPUs", "commit", "versions")
    return table(header, rows, num_left=len(header))


def _machine(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    def told(name: str) -> str:
        return str(provenance.get(name) or "–")

    versions = (provenance.get("versions") or {}).items()
    commit = told("git_commit")[:10] + (" with changes" if provenance.get("git_dirty") else "")
    if "measured_commit" in provenance:
        commit += f"; the file says {told('measured_commit')[:10]} was measured"
    return (
        told("device_name"),
        f"{told('driver_version')} / {told('cuda_version')}",
        f"{told('host_cpu')}, {told('host_num_cpus')}",
        commit,
        ", ".join(f"{name} {version}" for name, version in versions if version) or "–",
    )


def comparison_tables(sweep: Sweep) -> Iterator[str]:
    """Lines of all tables of a comparison's file: goodputs, then every run."""
    for task, cells in tasks_of(sweep).items():
        yield from ("", f"#### {task}", "")
        if is_search(sweep):
            yield from _goodput_table(cells)
        num_runs = sum(len(cell.runs) for cell in cells)
        runs = _run_table(cells)
        yield from folded(f"every run ({num_runs})", runs) if is_search(sweep) else runs


def worse_table(compared: Sequence[Compared]) -> list[str]:
    """What a peer is ahead in, the worst of each load first."""
    places: dict[tuple[str, Task, str, str], int] = {}
    for one in compared:
        places.setdefault((one.file, one.task, one.load, one.system), len(places))
    ordered = sorted(
        compared,
        key=lambda one: (places[one.file, one.task, one.load, one.system], -one.times_worse, one.figure),
    )
    rows = [
        [
            f"`{one.file}`",
            str(one.task),
            one.load,
            one.system,
            one.figure,
            "none" if one.own is None else significant(one.own),
            f"{significant(one.best)} ({one.peer})",
            "–" if math.isinf(one.times_worse) else f"{one.times_worse:.3f}",
        ]
        for one in ordered
    ]
    header = ("file", "workload", "load", "setting", "figure", "here", "best peer", "times worse")
    return table(header, rows, num_left=5)


def settings_table(sweep: Sweep) -> list[str]:
    """What each peer was started with, as its runs tell; one column for settings that are the same."""
    rows = []
    for system, settings in _peer_settings(sweep).items():
        for name, value in _flat(settings):
            rows.append([system, f"`{name}`", f"`{value}`"])
    return table(("peer", "setting", "value"), rows, num_left=3) if rows else []


def _peer_settings(sweep: Sweep) -> dict[str, Mapping[str, Any]]:
    """By the names of the peers that were one engine."""
    engines: list[tuple[list[str], Mapping[str, Any]]] = []
    for cell in sweep.cells:
        for run in cell.runs:
            settings = run.get("system_settings")
            if is_own(cell.key.system) or not settings:
                continue
            names = next((names for names, known in engines if known == settings), None)
            if names is None:
                engines.append(([cell.key.system], settings))
            elif cell.key.system not in names:
                names.append(cell.key.system)
    return {", ".join(names): settings for names, settings in engines}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            # A model's folder is of the machine that measured: its name says enough.
            text = str(value)
            yield f"{prefix}{name}", text.rsplit("/", 1)[-1] if text.startswith("/") else text


def _goodput_table(cells: Sequence[SweepCell]) -> list[str]:
    peers = [cell.goodput for cell in cells if not is_own(cell.key.system) and cell.finished and cell.goodput]
    all_peers_done = all(cell.finished for cell in cells if not is_own(cell.key.system))
    best_peer = max(peers) if peers and all_peers_done else None
    rows = []
    for cell in cells:
        ratio = "–" if best_peer is None or not cell.goodput else f"{cell.goodput / best_peer:.3f}"
        goodput = (
            "not finished" if not cell.finished else "none" if cell.goodput is None else f"{cell.goodput:.4g}"
        )
        figures = _figures(cell.best, cell.key.slo) if cell.best else ["–"] * len(_FIGURES)
        rows.append([cell.key.system, goodput, ratio, *figures])
    return table(("system", "goodput, requests/s", "× best peer", *_FIGURES), rows)


def _run_table(cells: Sequence[SweepCell]) -> list[str]:
    runs = [(cell.key, run) for cell in cells for run in cell.runs]
    # Stable: within a rate, systems in the order of the file and repeated runs in that of running.
    runs.sort(key=lambda item: (not item[1].get("all_at_once"), item[1]["request_rate"]))
    rows = [
        [
            "all at once" if run.get("all_at_once") else f"{run['request_rate']:.4g}",
            key.system,
            f"{run['duration']:.2f}",
            *_figures(run, key.slo),
        ]
        for key, run in runs
    ]
    return table(("at, requests/s", "system", "duration, s", *_FIGURES), rows, num_left=2)


def _figures(run: Mapping[str, Any], slo: str) -> list[str]:
    latencies = [number(run[name]) for name in LATENCIES]
    return [
        # Without targets there is nothing to meet.
        "–" if slo == str(NO_TARGETS) else f"{100 * run['slo_attainment']:.1f}",
        number(run["request_throughput"], 2),
        number(run["output_throughput"], 0),
        *(" / ".join(latencies[start : start + 3]) for start in (0, 3, 6)),
        f"{run['failed']:,}",
        number(run.get("joules_per_token"), 4),
        number(mean_of_device(run, "power_w"), 0),
        number(mean_of_device(run, "sm_clock_mhz"), 0),
    ]


def _beside(value: float, limit: float) -> str:
    """A figure with enough digits that it does not look like the limit unless it is."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    decimals = 2 if limit >= 10 else 3
    # A quotient of two rates may be the limit itself, but for its last bit.
    if not math.isclose(value, limit):
        while round(value, decimals) == limit:
            decimals += 1
    return f"{value:.{decimals}f}"
