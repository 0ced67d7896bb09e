"""The report as a whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.reporting import text
from bench.reporting.commands import command_for
from bench.reporting.evidence import CLAIMED_SYSTEM, TARGET_DEVICE, Evidence, is_own
from bench.reporting.limits import limit_lines
from bench.reporting.markdown import code, folded
from bench.reporting.pictures import all_pictures, draw_all
from bench.reporting.tables import (
    comparison_tables,
    machine_table,
    place_table,
    settings_table,
    target_table,
    worse_table,
)
from bench.reporting.targets import WORDS, Verdict, judge
from bench.reporting.worse import Compared, compare_all

_SETTINGS_SHOWN = (
    "model",
    "attainment",
    "tolerance",
    "first_rate",
    "step",
    "max_runs",
    "best_peer_only",
    "repeats",
    "seed",
    "warmup_requests",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "one_at_a_time",
    "event_loop",
)
_OF_SEARCHES = ("tolerance", "first_rate", "step", "max_runs", "best_peer_only")


@dataclass(frozen=True, slots=True)
class Report:
    """What is to be on disk.

    Attributes:
        markdown: of the report.
        pictures: of its folder, by name.
    """

    markdown: str
    pictures: dict[str, bytes]


def make_report(evidence: Evidence, folder: str, picture_folder: str) -> Report:
    """Write the report; the same bytes for the same files.

    Args:
        evidence: what was measured.
        folder: of the results, as the report is to call it.
        picture_folder: of the pictures, as seen from the report.
    """
    drawn = draw_all(evidence)
    verdicts = judge(evidence)
    lines = [
        text.INTRODUCTION.format(folder=folder),
        *_targets(verdicts),
        text.LIMITS,
        *limit_lines(verdicts, evidence),
        *_worse(verdicts, list(compare_all(evidence))),
        text.METHOD,
        "## Machine and versions",
        *machine_table(evidence.sources),
        *_one_machine(evidence),
        "## Comparisons",
        *_comparisons(evidence, drawn, picture_folder),
        text.PITFALLS,
        *_not_measured(verdicts, evidence),
        text.REPRODUCE,
        *_reproduce(evidence, folder),
    ]
    return Report("\n".join(lines).rstrip("\n") + "\n", all_pictures(drawn))


def _targets(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield text.TARGETS.format(claimed=CLAIMED_SYSTEM, device=TARGET_DEVICE)
    counts = [f"{sum(v.word == word for v in verdicts)} {word}" for word in WORDS]
    yield f"Of {len(verdicts)} targets: {', '.join(counts)}."
    yield from target_table(verdicts)
    yield from folded("where each figure is looked for", place_table(verdicts))


def _worse(verdicts: Sequence[Verdict], compared: Sequence[Compared]) -> Iterator[str]:
    yield text.WORSE.format(claimed=CLAIMED_SYSTEM)
    missed = [verdict.target.name for verdict in verdicts if verdict.word == "missed"]
    if missed:
        yield f"Targets missed, whether a peer is better or not: {'; '.join(missed)}.\n"
    worse = [one for one in compared if one.times_worse > 1]
    if not compared:
        yield "Not measured: no file has this engine and a peer at the same load.\n"
        return
    yield f"Of {len(compared):,} figures compared, {len(worse):,} are worse than the best peer's."
    yield from worse_table(worse) if worse else [""]


def _one_machine(evidence: Evidence) -> Iterator[str]:
    machines = {
        (str(one.get("device_name")), str(one.get("driver_version")), str(one.get("host_cpu")))
        for source in evidence.sources
        for one in source.provenances
        if one.get("device_name")
    }
    if len(machines) > 1:
        yield "These are not all one machine; figures of different files are not to be compared:"
        yield ""
        yield from (f"- {device}, driver {driver}, {cpu}" for device, driver, cpu in sorted(machines))
        yield ""


def _comparisons(
    evidence: Evidence, drawn: Mapping[str, Mapping[str, bytes]], picture_folder: str
) -> Iterator[str]:
    if not evidence.sweeps:
        yield "\nNot measured: no file is a comparison."
    for file, sweep in evidence.sweeps:
        yield f"\n### `{file}`\n"
        if not sweep.finished:
            yield "**Not finished**: what is here may change.\n"
        if not any(not is_own(cell.key.system) for cell in sweep.cells):
            yield "No peer in this file.\n"
        if sweep.settings.get("one_at_a_time"):
            yield "One system after the other, each alone on the GPU: these runs were **not interleaved**.\n"
        yield _settings(sweep.settings)
        yield from comparison_tables(sweep)
        yield from (f"![{name}]({picture_folder}/{name})\n" for name in drawn.get(file, {}))
        peers = settings_table(sweep)
        if peers:
            yield from folded("settings of the peers", peers)


def _settings(settings: Mapping[str, Any]) -> str:
    is_search = settings.get("rates") is None and not settings.get("all_at_once")
    names = [name for name in _SETTINGS_SHOWN if name in settings and (is_search or name not in _OF_SEARCHES)]
    return "Settings: " + ", ".join(f"{name} {settings[name]}" for name in names) + "."


def _not_measured(verdicts: Sequence[Verdict], evidence: Evidence) -> Iterator[str]:
    yield text.NOT_MEASURED
    missing = [verdict for verdict in verdicts if verdict.figure is None]
    for verdict in missing:
        reasons = f" ({'; '.join(verdict.reasons)})" if verdict.reasons else ""
        yield f"- {verdict.target.name}{reasons}"
    yield from (f"- the rest of `{file}`" for file, sweep in evidence.sweeps if not sweep.finished)
    if not missing and all(sweep.finished for _, sweep in evidence.sweeps):
        yield "Every target is measured and every comparison finished."


def _reproduce(evidence: Evidence, folder: str) -> Iterator[str]:
    unknown = []
    for source in evidence.sources:
        command = command_for(source, folder)
        if command is None:
            unknown.append(f"`{source.name}`")
        else:
            yield f"`{source.name}`:"
            yield from code(command)
    if unknown:
        yield f"No single command writes {', '.join(unknown)}: see `bench/LOG.md` for where they come from.\n"
