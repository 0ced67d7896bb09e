"""What the experiment's file says, in lines: a line a step, then what persistence would save."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GRAPHS, PIECES = 24 * 6, 1024
"""What an engine captures: batch sizes times partitions, and pieces of prefill of about eight kernels."""
_LINE_CHARS = 150


def address_summary(probes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of fresh processes: how many got each hint and could use it, and whether the driver's own choices repeat."""
    hints: dict[str, Counter[str]] = {}
    for probe in probes:
        for hint, found in probe["hints"].items():
            counts = hints.setdefault(hint, Counter())
            counts["processes"] += 1
            counts["got"] += found["got"] == hint
            counts["usable"] += found["memory"] == "works"
    return {
        "processes": len(probes),
        "hints": {
            hint: {key: counts[key] for key in ("processes", "got", "usable")}
            for hint, counts in hints.items()
        },
        "different_addresses_of_cuMemAlloc": len({probe["allocated"] for probe in probes}),
        "different_addresses_without_a_hint": len({probe["reserved"] for probe in probes}),
    }


def detail(processes: Iterable[Mapping[str, Any]], step: str, process: str = "") -> Mapping[str, Any] | None:
    """The detail of a step that worked, of the last process whose name begins like that; None if there is none."""
    found = None
    for one in processes:
        if not one["process"].startswith(process):
            continue
        for entry in one["steps"]:
            if entry["step"] == step and entry["works"] and "detail" in entry:
                found = entry["detail"]
    return found


def savings(processes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that all graphs and pieces of an engine take, by way; only of ways that worked.

    Rebuilding is this package's Python: most of its time is the interpreter's, not the driver's.
    """
    seconds: dict[str, float] = {}
    if again := detail(processes, "F: capture again"):
        first = next(iter(again["capture_ms"]))
        one = min(again["capture_ms"][first]) + min(again["instantiate_ms"][first])
        seconds["graphs, captured"] = GRAPHS * one / 1e3
        seconds["graphs, instantiating alone"] = GRAPHS * min(again["instantiate_ms"][first]) / 1e3
    if rebuilt := detail(processes, "F: rebuild a whole step"):
        seconds["graphs, rebuilt"] = GRAPHS * min(rebuilt["total_ms"]) / 1e3
    if small := detail(processes, "F: capture again, small graphs"):
        seconds["pieces, captured"] = PIECES * (small["capture_ms"] + small["instantiate_ms"]) / 1e3
    if piece := detail(processes, "F: rebuild a piece of eight kernels"):
        seconds["pieces, rebuilt"] = PIECES * piece["total_ms"] / 1e3
    return {way: round(value, 3) for way, value in seconds.items()}


def _figures(entry: Mapping[str, Any]) -> str:
    if entry.get("error") and not entry.get("detail"):
        return str(entry["error"])
    return ", ".join(f"{key} {value}" for key, value in entry.get("detail", {}).items() if key != "works")


def table(report: Mapping[str, Any]) -> list[str]:
    """The lines to print."""
    lines = []
    addresses = report["addresses"]
    if "error" in addresses:
        lines.append(f"C  addresses: {addresses['error']}")
    else:
        for hint, counts in addresses["summary"]["hints"].items():
            lines.append(
                f"C  hint {hint}: {counts['got']} of {counts['processes']} processes got it, {counts['usable']} used it"
            )
    for process in report["processes"]:
        ending = "" if process["rc"] == 0 else f"  ENDED WITH {process['rc']}"
        lines.append(f"-- {process['process']}, {process['seconds']:.1f} s{ending}")
        for entry in process["steps"]:
            mark = "works" if entry["works"] else "FAILS"
            line = f"{mark} {1e3 * entry.get('seconds', 0):9.1f} ms  {entry['step']}: {_figures(entry)}"
            lines.append(line[:_LINE_CHARS])
    lines.append(f"-- seconds for {GRAPHS} graphs and {PIECES} pieces")
    lines += [f"{way:30} {seconds:8.2f} s" for way, seconds in report["savings"].items()]
    return lines
