"""Write bench/REPORT.md and its plots from the JSON files of results, and from the tables of measured times, alone.

    python -m bench.report            # bench/REPORT.md and bench/report/*.svg
    python -m bench.report --check    # exit 1 if the report on disk is not what the files say

No figure is typed by hand. A figure that no file has is left out.
"""

import io
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, mode
from typing import Any

import click
import matplotlib as mpl
from matplotlib.figure import Figure

from bench import splitting
from bench.evidence import CLAIMED, OWN, Source, Task, best_of, dicts, figure_of, rate_of, read_results, tasks_of
from bench.record import Tool
from bullet_graph.cli.tables import goodput_text
from bullet_graph.errors import ConfigError
from bullet_graph.perf.goodput_search import LEAST_SECONDS, SHARES, Goodput
from bullet_graph.workloads import load_workload

BENCH = Path(__file__).resolve().parent
BARE_WAY = "in turn, with passes"
LATENCIES = tuple(f"{label}_{name}_ms" for name in ("ttft", "tpot", "itl") for label in ("median", "p90", "p99"))
USUAL = "llama-3.1-8b, "  # left out of the rows
SAME = 1.02
"""Figures closer than this factor are not called worse."""
PLOTS = {"goodput.svg": "Goodput, p99 TTFT", "on_time.svg": "Requests on time by rate"}
STARTS = {
    "cold": "nothing cached",
    "warm": "libraries' caches filled",
    "cached": "from a capture cache",
    "cached_hot": "from a capture cache, `--ready hot`",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A headline figure. ``peer`` is the peer's or the limit, ``ratio`` is over it, ``worse`` is what is worse here.

    ``least`` is the least that the ratio of a goodput can be; inf: it has none.
    """

    what: str
    here: str
    peer: str = "-"
    ratio: str = "-"
    worse: str = "-"
    file: str = ""
    least: float = math.inf

    @property
    def is_bound(self) -> bool:
        """Whether the ratio has no upper end."""
        return ">" in self.ratio or "≥" in self.ratio

    def __str__(self) -> str:
        cells = (self.what, self.here, self.peer, self.ratio, self.worse, f"`{self.file}`" if self.file else "")
        return f"| {' | '.join(cells)} |".replace(".json`", "`")


# ---- comparisons ----


def goodput_rows(task: Task) -> Iterator[Row]:
    """Goodputs beside the best peer setting's."""
    first = None
    for share in SHARES:
        if found := _best_search(task, share):
            first, before = found[0], first
            file = "" if before and before.file == first.file else first.file
            yield replace(first, what=f"… {100 * share:.0f} %", file=file) if before else first


def _best_search(task: Task, share: float) -> tuple[Row, Task] | None:
    """The newest that tells a ratio, else the tightest bound of one, else the newest without one."""
    rows = [(row, one) for one in task.ours if (row := _goodput_row(one, share))]
    return min(rows, key=lambda each: (each[0].ratio == "-", each[0].is_bound / each[0].least), default=None)


def _goodput_row(task: Task, share: float) -> Row | None:
    """None: a side has no goodput; without a ratio where no rate was too high for the peer."""
    own, peers = task.searched(share)
    best = max(peers, key=lambda one: one.goodput.rate or 0.0)
    here, there, ceiling = own.goodput.rate, best.goodput.rate, max(one.goodput.below or math.inf for one in peers)
    if here is None or (there is None and ceiling == math.inf):
        return None
    most = there if there and ceiling <= (1 + best.tolerance) * there else ceiling  # that the peer's goodput can be
    least = math.inf if most == math.inf else here / most
    if there is None:
        ratio, shown = f"> {least:.2f}×", f"< {ceiling:.3g}/s"
    elif ceiling == math.inf:
        ratio, shown = "-", best.text
    else:
        ratio, shown = f"{'≥ ' * own.text.startswith('≥')}{here / there:.2f}×", f"{there:.3g}/s"
        if least < here / there:
            # The peer's goodput may be anywhere below its next rate, which served too few.
            ratio, shown = f"{least:.2f} to {ratio}", f"{shown} (< {ceiling:.3g})"
    sides = own.text + own.tail + task.since(own.best_run, share), shown + best.tail
    return Row(f"goodput_{100 * share:.0f}, {task.model}, {task.short}", *sides, ratio, file=task.file, least=least)


def least_ratios(tasks: Sequence[Task]) -> Iterator[str]:
    """The means of the usual model's least ratios, each load's by its better peer."""
    for share in SHARES:
        loads = dict[tuple[str, str], float]()
        for task in tasks:
            if task.is_search and f"{task.model}, " == USUAL and (found := _best_search(task, share)):
                load = task.workload, task.slo
                loads[load] = min(found[0].least, loads.get(load, math.inf))
        if known := [least for least in loads.values() if least < math.inf]:
            yield f"goodput_{100 * share:.0f} {mean(known):.2f}× ({len(known)} loads)"


def load_rows(task: Task, sources: Sequence[Source]) -> Iterator[Row]:
    """Time and energy all at once; the best setting of each side counts."""
    own, peer = (best_of(cells, math.inf, "duration") for cells in (task.own, task.peers))
    if own is None or peer is None:
        return
    limit = workload_limit_s(task, sources)
    sides = [f"{seconds:.2f} s" for _, seconds in (own, peer)]
    ratio = f"{own[1] / peer[1]:.2f}×"
    joules = [best_of(cells, math.inf, "joules_per_token") for cells in (task.own, task.peers)]
    if joules[0] and joules[1]:
        sides = [f"{side}, {1e3 * each[1]:.1f} mJ/token" for side, each in zip(sides, joules, strict=True) if each]
        ratio += f", {joules[0][1] / joules[1][1]:.2f}×"
    setting = own[0].removeprefix(OWN).strip()
    name = f"{task.short.partition(',')[0]}, {task.num_prompts} at once, {task.model}, {setting}"
    ratio += "" if limit is None else f", {own[1] / limit:.3f}× of the limit"
    yield Row(name, *sides, ratio, file=task.file)


# ---- limits ----


def bare_rows(sources: Sequence[Source], card: str | None, part: str) -> list[dict[str, Any]]:
    """The engine's kernels alone, measured on this card: rows of a work, in forwards of several sizes."""
    rows = []
    for source in sources:
        if card is not None and source.card == card and isinstance(source.fields, dict):
            rows += [
                row
                for row in dicts(source.fields.get("rows"))
                if (row.get("part"), row.get("name")) == (part, BARE_WAY) and "seconds" in row
            ]
    return rows


def workload_limit_s(task: Task, sources: Sequence[Source]) -> float | None:
    """The least time of a workload with these kernels on this card; None: not measured there.

    Each token of the longest output takes a forward of its own, so the quickest mixture of two sizes counts that comes
    to as many forwards.
    """
    rows = bare_rows(sources, task.source.card, f"{task.workload}={task.num_prompts}")
    if not rows:
        return None
    requests = load_workload(task.workload, num_requests=task.num_prompts).requests
    longest = max(request.output_tokens for request in requests)
    enough = [row["seconds"] for row in rows if row["repeats"] >= longest]
    for few, many in ((a, b) for a in rows for b in rows if a["repeats"] < longest <= b["repeats"]):
        share = (longest - few["repeats"]) / (many["repeats"] - few["repeats"])
        enough.append(few["seconds"] + share * (many["seconds"] - few["seconds"]))
    return min(enough, default=None)


def decode_rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Decode steps of single batches, newest file; the limit is kernels alone, or a copy's bandwidth."""
    newest: dict[tuple[str, int], tuple[str, Source, dict[str, Any]]] = {}
    for source in sources:
        for one in source.entries:
            if "decode_step_ms" in one and "share_of_copy_percent" in one:
                key = one["model"], one["batch_size"]
                newest[key] = max(newest.get(key, ("", source, one)), (source.date, source, one), key=lambda t: t[0])
    for (model, size), (_, source, one) in sorted(newest.items()):
        step_ms = one["decode_step_ms"]["p50"]
        context = one["input_len"] + one["output_len"] // 2
        bare = [1e3 * row["seconds"] for row in bare_rows(sources, source.card, f"decode={size}x{context}")]
        copy_ms = one["decode_step_bytes"] / one["copy_gb_per_s"] / 1e6
        limit_ms, kind = (min(bare), "kernels alone") if bare else (copy_ms, "at a copy's rate")
        name = f"decode step, {model}, batch {size}, context {context:,}"
        sides = f"{step_ms:.2f} ms", f"limit: {limit_ms:.2f} ms, {kind}"
        yield Row(name, *sides, f"{step_ms / limit_ms:.3f}×", file=source.name)


def start_rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Starts, from the process's start to readiness."""
    for source in sources:
        for kind, text in STARTS.items():
            for one in source.entries:
                if (seconds := one.get(f"avg_{kind}_startup_time")) is not None:
                    yield Row(f"start, {one['model']}, {text}", f"{seconds:.1f} s", file=source.name)


def worse_at(task: Task) -> tuple[float, str]:
    """The highest rate that both sides served (inf: all at once, -1: none), and what the row's setting does worse."""
    fastest = None if task.is_search else best_of(task.own, math.inf, "duration")
    own = task.own.get(fastest[0] if fastest else CLAIMED) or next(iter(task.own.values()))
    rates = {rate_of(run) for run in own["runs"]}
    rate = max((one for one in rates if best_of(task.peers, one, "duration")), default=-1.0)
    worse = dict[str, list[str]]()
    for field in (*LATENCIES, "joules_per_token"):
        value, peer = figure_of(own, rate, field), best_of(task.peers, rate, field)
        if value is not None and peer is not None and value > SAME * peer[1] > 0:
            label, _, name = field.removesuffix("_ms").replace("median", "p50").partition("_")
            shown, label = ("energy", "") if field == "joules_per_token" else (name.upper(), f"{label} ")
            worse.setdefault(shown, []).append(f"{label}{value / peer[1]:.2f}×")
    told = "; ".join(f"{name} {', '.join(ratios)}" for name, ratios in worse.items())
    if worse and rate < math.inf:
        on_time = [figure_of(cell, rate, "slo_attainment") or 0.0 for cell in (own, *task.peers.values())]
        told = f"{rate:.3g}/s ({100 * on_time[0]:.0f} and {100 * max(on_time[1:]):.0f} %): {told}"
    return rate, told


def task_rows(task: Task, sources: Sequence[Source]) -> list[Row]:
    """All rows of a comparison; the first has what is worse at the highest load, be it the only thing to say."""
    rows = list(goodput_rows(task) if task.is_search else load_rows(task, sources))
    (_, worse), at = max(((worse_at(one), one) for one in (task, *task.older)), key=lambda each: each[0][0])
    if worse:
        first, *others = rows or [Row(f"{task.model}, {task.short}", "-", file=task.file)]
        worse += "" if first.file == at.file else f" (`{at.file}`)"
        rows = [replace(first, worse=worse), *others]
    return rows


# ---- simulations ----


def named(simulation: dict[str, Any]) -> str:
    """A simulation's trace and targets, such as ``conv, 500/15``."""
    targets = (part.partition(":")[2].removesuffix("ms") for part in simulation["slo"].split())
    return f"{simulation['trace'].partition(':')[2]}, {'/'.join(targets)}"


def simulated_goodput(found: dict[str, Any], name: str, base: float = 1.0, form: str = ".3g") -> str:
    """A goodput over ``base``; ``name`` is ``goodput_90`` or ``goodput_99``."""
    return goodput_text(Goodput(*(found[key] and found[key] / base for key in (name, f"{name}_below"))), 0.05, form)


def policy_rows(simulations: Sequence[Source]) -> Iterator[str]:
    """Simulated goodputs of each policy by trace and targets (``bullet-graph simulate --sweep``)."""
    for source in simulations:
        if source.name.startswith("ablation_"):
            names, found = ("goodput_90", "goodput_99"), source.fields["policies"].values()
            texts = (" / ".join(simulated_goodput(one, name) for name in names) for one in found)
            yield f"| {named(source.fields)} | {' | '.join(texts)} |"


def fleet_rows(simulations: Sequence[Source]) -> Iterator[str]:
    """Simulated goodputs per GPU by trace, targets and size of the fleet: shared, and divided at each bandwidth."""
    rows: dict[tuple[str, int, str], dict[float, dict[str, Any]]] = {}
    for source in simulations:
        for one in dicts(source.fields.get("systems")) if source.name.startswith("fleet_") else ():
            short = f" (< {LEAST_SECONDS:g} s)" if (source.fields["arrival_seconds"] or 0) < LEAST_SECONDS else ""
            rows.setdefault((named(source.fields), one["machines"], short), {})[one["gb_per_s"] or 0.0] = one
    for (name, machines, mark), systems in sorted(rows.items()):
        shared = systems.pop(0.0)
        rate, texts, shown = shared["goodput_90"], [], simulated_goodput(shared, "goodput_90")
        # If the shared goodput may be higher, its upper bound gives the least ratio. Without one, "≤" marks the most.
        base = shared["goodput_90_below"] if shown.startswith("≥") else rate
        for gb_per_s, one in sorted(systems.items()):
            bold = "**" if (one["goodput_90"] or 0.0) < rate else ""
            ratio = "≤ " * (base is None) + simulated_goodput(one, "goodput_90", base or rate, ".2f")
            texts.append(f"{gb_per_s:g}: {bold}{ratio}×{bold} ({one['prefill_machines'] or '–'})")
        yield f"| {name} | {machines:,}{mark} | {shown}/s | {', '.join(texts)} |"


def simulated_rows(simulations: Sequence[Source]) -> Iterator[str]:
    """Each fastest stable run, measured and simulated (``bench.simulator_error``); then how far all of them differ."""
    found = next((source.fields for source in simulations if source.name == "error.json"), {"rows": ()})
    stable = sorted((row for row in found["rows"] if row["stable"]), key=lambda row: float(row["request_rate"]))
    for row in {tuple(row[key] for key in ("gpu", "model", "workload", "slo")): row for row in stable}.values():
        ways = row["measured"], row["simulated"]
        cells = [
            " / ".join(f"{scale * way[name]:,.{digits}f}" for way in ways)
            for name, scale, digits in (("slo_attainment", 100, 1), ("median_tpot_ms", 1, 1), ("p99_ttft_ms", 1, 0))
        ]
        cells.append(" / ".join(f"{100 * row['on_time'][policy]:.1f}" for policy in ("mixed", "split")))
        name = f"{row['gpu'].upper()}: {row['model']}, {Path(row['workload'].rpartition(':')[2]).stem}"
        yield f"| {name.removeprefix('H200: ')}, {row['request_rate']:.3g}/s | {' | '.join(cells)} |"
    if off := [abs(row["measured"]["slo_attainment"] - row["simulated"]["slo_attainment"]) for row in stable]:
        tpot = median(abs(r["simulated"]["median_tpot_ms"] / r["measured"]["median_tpot_ms"] - 1) for r in stable)
        apart = f"{100 * median(off):.1f} points apart in the median ({100 * max(off):.1f} at most)"
        by = found["provenance"]["git_commit"][:7]
        yield f"\nOn time, {len(off)} stable runs: {apart}, TPOT {100 * tpot:.0f} %. By {by}."


# ---- the report ----

INTRODUCTION = """# Measurements

Written by `python -m bench.report` from `{folder}`.
Machine: {device}, driver {driver}, {versions}. Random weights.

Unnamed: llama-3.1-8b. "Ratio" is this engine over vLLM or a named peer: high is good for goodput, else low. vLLM takes
512 tokens a step (70B also 256), all at once 8,192; other sizes served fewer. SGLang mixes prompts with decode.
Here `auto` runs; all at once, the best policy. goodput_90 is the highest rate at which 90 % of requests meet both
targets ("500/15 ms": of TTFT and TPOT), for ≥ 120 s; beside it: p99 TTFT. "Later": newer runs that contradict it. Gaps
are exponential, or gamma of shape "burstiness". Chats come at 86 to 90 % of their rate. "<": it failed there, the ratio
is a bound (the tightest, if no file has a ratio). "≥": the next rate was unstable, 1.5 × as high, or not run. "Worse
here": by over 2 % at the top load of both (on time here, there). Cards differ by 6 %. Most files predate the engine.

## Headline figures

"""
TABLE = """| what | this engine | peer | ratio | worse here | file (.json) |
| --- | ---: | ---: | ---: | --- | --- |
"""
OTHER_GPU = """
## {device}

Files in `{folder}/`, driver {driver}.

"""
FLEETS = """
## Sharing each GPU, or dividing the fleet

Simulated by `python -m bench.fleet` from the H200's tables: goodput_90 per GPU, within 5 %. "Shared":
`auto` on each GPU. "Divided": at GB/s of each GPU's link (prefill GPUs: the best; 1,000 scaled from 100). Bold:
sharing wins.

| trace, TTFT/TPOT in ms | GPUs | shared | divided ÷ shared |
| --- | ---: | ---: | --- |
"""
ABLATION = """
## What each part of the planner brings

Simulated goodput_90 / goodput_99 in requests/s (`bullet-graph simulate --sweep`, H200). `mixed:512` has
chunks of one size, like peers; `mixed` sizes them by targets and measured times. `auto` may also split, and spaces
decode steps to save energy. goodput_99 rests on 3 of 300 requests.

| trace, TTFT/TPOT in ms | `serial` | `mixed:512` | `mixed` | `split` | `auto` |
| --- | ---: | ---: | ---: | ---: | ---: |
"""
SIMULATED = """
## Simulated beside measured

The fastest stable run of `auto`: measured / simulated (`python -m bench.simulator_error`); the last column
is simulated alone. Unnamed: H200. The H100's chats are older than waits for room.

| requests, rate | on time, % | median TPOT, ms | p99 TTFT, ms | on time: `mixed` / `split` |
| --- | ---: | ---: | ---: | ---: |
"""
FILES = "\nFiles without a command (`argv`): "


def headlines(sources: Sequence[Source], tasks: Sequence[Task]) -> list[Row]:
    """The rows of the first table; ``tasks`` are those of the sources. "…" stands for a name that a row above has."""
    rows = [
        *decode_rows(sources),
        *(row for task in sorted(tasks, key=lambda one: one.is_search) for row in task_rows(task, sources)),
        *start_rows(sources),
    ]
    parts = [(row.what.rpartition(", "), row) for row in rows]
    names = {row.what for row in rows}
    return [replace(row, what=f"… {last}") if whole in names else row for (whole, _, last), row in parts]


def _newest(sources: Sequence[Source]) -> dict[str, Any]:
    """Provenance of the newest measurement; not of one beside SGLang, which has libraries of its own."""
    found = (p for source in sources for p in source.provenances if not (p.get("versions") or {}).get("sglang"))
    return max(found, key=lambda p: str(p.get("date_utc") or ""), default={})


def other_gpus(results: Path, own: str) -> Iterator[str]:
    """A section for each folder of another GPU; CPUs and simulations are none."""
    for folder in sorted(f for f in results.iterdir() if f.is_dir()):
        if folder.name in ("cpu", "simulated", Path(own).name):
            continue
        sources = read_results(folder)
        newest = _newest(sources)
        if newest.get("device_uuid"):
            driver, device = newest.get("driver_version", "unknown"), newest["device_name"]
            head = OTHER_GPU.format(device=device, driver=driver, folder=folder.name)
            yield head + TABLE + "\n".join(map(str, headlines(sources, tasks_of(sources))))


def make_report(sources: Sequence[Source], folder: str, pictures: str, simulations: Path) -> str:
    """The report as Markdown; the same text for the same files.

    ``pictures`` is the name of the plots' folder, ``simulations`` the folder of what was simulated.
    """
    newest = _newest(sources)
    versions = newest.get("versions") or {}
    simulated = read_results(simulations) if simulations.is_dir() else ()
    sections = {ABLATION: policy_rows, SIMULATED: simulated_rows, FLEETS: fleet_rows}
    head = INTRODUCTION.format(
        folder=folder,
        device=newest.get("device_name", "unknown"),
        driver=newest.get("driver_version", "unknown"),
        versions=", ".join(f"{n} {versions[n]}" for n in ("torch", "triton", "flashinfer") if versions.get(n)),
    )
    tasks = tasks_of(sources)
    lines = [
        head + TABLE + "\n".join(map(str, headlines(sources, tasks))) + "\n",
        f"Least ratios in bf16 on average, by each load's better peer: {', '.join(least_ratios(tasks)) or '-'}.\n",
        *(f"![{text}]({pictures}/{name})" for name, text in PLOTS.items()),
        *other_gpus(simulations.parent, folder),
        splitting.SECTION.format(path=f"{pictures}/{splitting.PLOT}"),
        *(title + rows for title, of in sections.items() if (rows := "\n".join(of(simulated)))),
        FILES + ", ".join(f"`{source.name.removesuffix('.json')}`" for source in sources if not source.has_command),
    ]
    return "\n".join(lines).replace(USUAL, "") + "\n"


# ---- plots ----

OWN_COLOUR, PEER_COLOUR = "#1f6f8b", "#d1603d"


def draw(sources: Sequence[Source]) -> dict[str, bytes]:
    """The plots as SVG, by file name; the same bytes for the same figures and release of matplotlib."""
    searches = [task for task in tasks_of(sources) if task.is_search and CLAIMED in task.own]
    return {
        "goodput.svg": _draw_goodput(searches),
        "on_time.svg": _draw_on_time([task for task in searches if task.model == mode(one.model for one in searches)]),
        splitting.PLOT: _save(splitting.draw_splitting()),
    }


def _save(figure: Figure) -> bytes:
    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": OWN, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _draw_goodput(searches: Sequence[Task]) -> bytes:
    """Goodput, and the tail at each side's own goodput, where this engine serves more."""
    figure = Figure(figsize=(13, 0.9 + 0.45 * len(searches)), layout="constrained")
    axes, tails = figure.subplots(1, 2, sharey=True)
    for index, task in enumerate(searches):
        own, peers = (_best_search(task, min(SHARES)) or (None, task))[1].searched()
        sides = own, max(peers, key=lambda one: (one.goodput.rate or 0.0, one.goodput.below or 0.0))
        rates = [one.goodput.rate or one.goodput.below or 1e-9 for one in sides]
        for offset, one, rate, colour in zip((-0.2, 0.2), sides, rates, (OWN_COLOUR, PEER_COLOUR), strict=True):
            share, tail_ms = rate / max(rates), (one.best_run or {}).get("p99_ttft_ms")
            axes.barh(index + offset, share, 0.38, color=colour, edgecolor=colour, fill=one.goodput.rate is not None)
            axes.text(share, index + offset, f" {one.text}", va="center", fontsize=8)
            if tail_ms is not None:
                tails.barh(index + offset, tail_ms, 0.38, color=colour)
                tails.text(tail_ms, index + offset, f" {tail_ms:,.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(searches)), [f"{task.model}, {task.short}" for task in searches], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.25), xlabel="goodput ÷ the higher one (blue: here, red: the peer's best setting, hollow: less)")
    tails.set(xscale="log", xlabel="p99 TTFT at that rate, ms")
    tails.margins(x=0.2)
    return _save(figure)


def _draw_on_time(searches: Sequence[Task]) -> bytes:
    rows = max(1, math.ceil(len(searches) / 4))
    figure = Figure(figsize=(15, 3 * rows), layout="constrained")
    for place, task in enumerate(searches, 1):
        panel = figure.add_subplot(rows, 4, place, ylim=(0, 1.05), title=task.short)
        for one in task.ours:
            for cell, colour in ((one.own[CLAIMED], OWN_COLOUR), *((peer, PEER_COLOUR) for peer in one.peers.values())):
                points = sorted((run["request_rate"], run["slo_attainment"]) for run in cell["runs"])
                panel.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1)
        panel.hlines(SHARES, 0, 1, "#555555", "dotted", linewidth=0.8, transform=panel.get_yaxis_transform())
    figure.supxlabel("requests/s; up: share on time (blue: here, red: the peer); lines: runs of one card")
    return _save(figure)


@click.command(cls=Tool)
@click.option("--results", type=click.Path(path_type=Path), default=BENCH / "results" / "h200", help="JSON files.")
@click.option("--output", type=click.Path(path_type=Path), default=BENCH / "REPORT.md", help="The report.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if the report on disk is another.")
def main(results: Path, output: Path, check: bool) -> None:
    pictures = output.with_name(output.stem.lower())
    sources = read_results(results)
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.parent} does not exist; make it first")
    path = results.resolve()
    shown = path.relative_to(BENCH.parent).as_posix() if path.is_relative_to(BENCH.parent) else path.name
    try:
        text = make_report(sources, shown, pictures.name, path.parent / "simulated")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"a file in {results} is damaged: {type(error).__name__}: {error}") from error
    if check:
        if not output.is_file() or output.read_text(encoding="utf-8") != text:
            click.echo(f"{output} is not what the files say: run python -m bench.report", err=True)
            sys.exit(1)
        return
    pictures.mkdir(exist_ok=True)
    for name, picture in draw(sources).items():
        (pictures / name).write_bytes(picture)
    output.write_text(text, encoding="utf-8", newline="\n")
    click.echo(f"{output}, {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
