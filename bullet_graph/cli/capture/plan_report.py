"""What ``bullet-graph capture plan`` tells: tables, comments for the plan's file, and the fields of its JSON."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bullet_graph.cli.capture.plan_study import CaptureStudy, PlanOutcome
from bullet_graph.engine.capture_proposal import GroupUse
from bullet_graph.graphs.key import batch_size_buckets

_ROW_BINS = (64, 128, 256, 512, 1024, 2048, 4096)


def plan_notes(study: CaptureStudy) -> tuple[str, ...]:
    """Comments for the top of the plan's file: for what it was made, and what it costs."""
    plan, lost = study.proposal.plan, study.proposal.lost_ms
    num_layers = study.workload.num_layers
    return (
        "What an engine captures at its start; written by `bullet-graph capture plan` for",
        f"{_title(study)}, policy {study.simulator.spec.policies[0]}.",
        f"About {plan.graph_bytes(num_layers) / 1e9:.2f} GB and {plan.capture_s(num_layers):.1f} s. There, padding and "
        f"what is left out cost {_share(lost, study.device_ms)} of the device's",
        f"time, and {_share(study.against.lost_ms, study.device_ms)} with {study.against.name}.",
    )


def show_plan(study: CaptureStudy, *, to_stderr: bool) -> None:
    """Show what was seen, what each size is worth, and how the proposal compares."""
    console = Console(stderr=to_stderr)
    console.print(_title(study), markup=False, soft_wrap=True)
    for table in (_seen_table(study), _size_table(study), _plan_table(study)):
        console.print(table)


def plan_fields(study: CaptureStudy, text: str) -> dict[str, Any]:
    """The JSON's fields; a limit that is none, and the worth of a size that must be, are null.

    Args:
        text: the plan as TOML.
    """
    usage, spec = study.usage, study.simulator.spec
    total = sum(group.num_steps for group in study.proposal.groups)
    decode = [
        {"decode_sms": sms, "batch_size": size, "num_steps": rows.num_steps, "share": rows.num_steps / total}
        for sms, sizes in sorted(usage.decode.items(), key=lambda item: item[0] or 0)
        for size, rows in sorted(sizes.items())
    ]
    forwards = [
        {"rows": size, "num_steps": rows.num_steps, "share": rows.num_steps / total}
        for size, rows in sorted(usage.forwards.items())
    ]
    outcomes = (study.proposal, study.against, study.everything)
    return study.simulator.describe() | {
        "model": spec.config.model,
        "policy": str(spec.policies[0]),
        "request_rate": "trace" if spec.request_rate is None else _finite(spec.request_rate, "inf"),
        "budget": {
            "memory_gb": _finite(study.budget.memory_bytes / 1e9),
            "time_s": _finite(study.budget.time_s),
        },
        "device_ms": study.device_ms,
        "seen": {"decode": decode, "forwards": forwards},
        "plan": dataclasses.asdict(study.proposal.plan),
        "plans": {
            role: _outcome_fields(study, outcome)
            for role, outcome in zip(("proposal", "against", "every_size"), outcomes, strict=True)
        },
        "toml": text,
    }


def _title(study: CaptureStudy) -> str:
    spec, device = study.simulator.spec, study.simulator.device
    rate = {None: "its own times", math.inf: "once"}.get(
        spec.request_rate, f"{spec.request_rate or 0:g} requests/s"
    )
    table = "a measured table" if device.is_measured else "roofline"
    served = f"{study.simulator.workload.name} at {rate}, {spec.config.slo}"
    return f"{served}, {spec.config.model} on {device.gpu} ({table})"


def _seen_table(study: CaptureStudy) -> Table:
    """Steps by size: decode steps of each partition, and forwards with prompt tokens."""
    usage = study.usage
    counts: dict[str, Mapping[int, int]] = {
        group.name: {size: rows.num_steps for size, rows in usage.decode.get(sms, {}).items()}
        for sms, group in zip(study.workload.decode, study.everything.groups, strict=False)
    }
    counts["with prompt tokens"] = {size: rows.num_steps for size, rows in usage.forwards.items()}
    bins = [
        size for size in batch_size_buckets(study.workload.max_num_seqs) if size in (1, 8) or size % 32 == 0
    ]
    bins = sorted({*bins, study.workload.max_num_seqs, *_ROW_BINS})
    total = sum(sum(sizes.values()) for sizes in counts.values())
    table = Table("rows", title=f"{total:,} steps on the decode lane, %", title_justify="left")
    for name in counts:
        table.add_column(name, justify="right")
    before = 0
    for end in (*bins, math.inf):
        cells = [sum(n for size, n in sizes.items() if before < size <= end) for sizes in counts.values()]
        if any(cells):
            label = (
                f"more than {before:,}" if end == math.inf else f"{before + 1:,}–{end:,}".removeprefix("1–1")
            )
            table.add_row(label or "1", *(f"{100 * n / total:.1f}" if n else "" for n in cells))
        before = int(min(end, 1e9))
    return table


def _size_table(study: CaptureStudy) -> Table:
    table = Table("captured for", title="The proposal", title_justify="left")
    for name in ("rows", "steps", "unpadded, %", "worth, ms"):
        table.add_column(name, justify="right")
    for group in study.proposal.groups:
        for use in group.sizes:
            if not use.num_steps and not math.isinf(use.worth_ms):
                continue
            exact = f"{100 * use.num_exact / use.num_steps:.0f}" if use.num_steps else ""
            worth = "must be" if math.isinf(use.worth_ms) else f"{use.worth_ms:,.1f}"
            table.add_row(group.name, str(use.size), f"{use.num_steps:,}", exact, worth)
        if idle := [
            str(use.size) for use in group.sizes if not use.num_steps and not math.isinf(use.worth_ms)
        ]:
            span = idle[0] if len(idle) == 1 else f"{len(idle)}: {idle[0]}–{idle[-1]}"
            all_ms = sum(use.worth_ms for use in group.sizes if not use.num_steps and use.worth_ms < math.inf)
            table.add_row(group.name, span, "0", "", f"{all_ms:,.1f}")
        if group.num_unserved:
            table.add_row(group.name, "none", f"{group.num_unserved:,}", "", "")
        table.add_section()
    return table


def _plan_table(study: CaptureStudy) -> Table:
    outcomes = (study.proposal, study.against, study.everything)
    table = Table("", title="Against other plans", title_justify="left")
    for outcome in outcomes:
        table.add_column(outcome.name, justify="right")
    fields = [_outcome_fields(study, outcome) for outcome in outcomes]
    rows = {
        "decode graphs": "{num_decode_graphs:,}",
        "rows of short forwards": "{num_forward_sizes:,}",
        "memory, GB": "{memory_gb:.2f}",
        "capturing, s": "{time_s:.1f}",
        "time lost, ms": "{lost_ms:,.0f}",
        "time lost, % of the steps'": "{lost_percent:.2f}",
        "met all targets, %": "{met_percent:.1f}",
        "TTFT, p90, ms": "{p90_ttft_ms:.0f}",
        "TPOT, p90, ms": "{p90_tpot_ms:.2f}",
    }
    for label, form in rows.items():
        name = form[1:].partition(":")[0]
        table.add_row(
            label, *("–" if field[name] is None else form.format(**{name: field[name]}) for field in fields)
        )
    return table


def _outcome_fields(study: CaptureStudy, outcome: PlanOutcome) -> dict[str, Any]:
    plan, num_layers, run = outcome.plan, study.workload.num_layers, outcome.run
    attainment = None if run is None else run.result.slo_attainment
    return {
        "name": outcome.name,
        "num_decode_graphs": plan.num_decode_graphs,
        "num_forward_sizes": len(plan.piecewise_rows),
        "memory_gb": plan.graph_bytes(num_layers) / 1e9,
        "time_s": plan.capture_s(num_layers),
        "lost_ms": outcome.lost_ms,
        "lost_percent": 100 * outcome.lost_ms / study.device_ms if study.device_ms else 0.0,
        "met_percent": None if attainment is None else 100 * attainment,
        "p90_ttft_ms": None if run is None else run.result.fields()["p90_ttft_ms"],
        "p90_tpot_ms": None if run is None else run.result.fields()["p90_tpot_ms"],
        "groups": [_group_fields(group) for group in outcome.groups],
    }


def _group_fields(group: GroupUse) -> dict[str, Any]:
    fields = dataclasses.asdict(group)
    for size in fields["sizes"]:
        size["worth_ms"] = _finite(size["worth_ms"])
    return fields


def _share(lost_ms: float, device_ms: float) -> str:
    return f"{100 * lost_ms / device_ms:.2f} %" if device_ms else "nothing"


def _finite(value: float, infinite: str | None = None) -> float | str | None:
    """JSON has no infinity."""
    return infinite if math.isinf(value) else value
