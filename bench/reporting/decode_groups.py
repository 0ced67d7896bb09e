"""Where the time of a decode step goes, by groups of kernels, out of the file of ``bench/kernels/decode_step.py``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.reporting.evidence import TARGET_DEVICE, Evidence, Source, mean_of_device
from bench.reporting.markdown import number, table
from bench.reporting.rates import DECODE_STEP, Rates, damaged

_WHOLE_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Kernels of one kind in a step.

    Attributes:
        name: of the group; ``step`` is all of them and the gaps between.
        us: measured, in the profiler.
        num_bytes: that it must move, activations too.
        flops: that it must compute.
        least_us: at the rate of a copy, or of the matrix products of many rows, whichever takes longer.
    """

    name: str
    us: float
    num_bytes: float
    flops: float
    least_us: float


def group_lines(
    evidence: Evidence, model: str, batch_size: int, context: float, rates: Rates
) -> Iterator[str]:
    """Kernel groups of a step and what each takes beyond its least time; says so where no file has them.

    Raises:
        ConfigError: the file is damaged.
    """
    for source in evidence.newest_first:
        if source.name != DECODE_STEP or source.devices != {TARGET_DEVICE}:
            continue
        with damaged(source):
            if (source.fields["model"], source.fields["context"]) == (model, context):
                lines = list(_lines_of(source, batch_size, rates))
                if lines:
                    yield from lines
                    return
    yield f"\nBy kernel: not measured (`{DECODE_STEP}`)."


def _lines_of(source: Source, batch_size: int, rates: Rates) -> Iterator[str]:
    fields = source.fields
    for part in fields["breakdowns"]:
        if part["rows"] == batch_size and "groups" in part:
            named = {
                row["group"]: _group(row, fields["copy_gb_per_s"] * 1e9, rates) for row in part["groups"]
            }
            step = named.pop(_WHOLE_STEP)
            yield f"\nBy kernel, profiled (`{source.name}`{_power(fields, batch_size)}):"
            yield from _group_table(list(named.values()), step)


def _group(row: Mapping[str, Any], copy_bytes_per_s: float, rates: Rates) -> Group:
    num_bytes, flops = float(row["num_bytes"]), float(row["flops"])
    computing_s = 0.0 if rates.products is None else flops / rates.products.per_s
    return Group(
        name=str(row["group"]),
        us=float(row["us"]),
        num_bytes=num_bytes,
        flops=flops,
        least_us=1e6 * max(num_bytes / copy_bytes_per_s, computing_s),
    )


def _power(fields: Mapping[str, Any], batch_size: int) -> str:
    """What the GPU drew while steps of so many rows were timed."""
    case: Mapping[str, Any] = next((case for case in fields["cases"] if case["rows"] == batch_size), {})
    watts, mhz = (mean_of_device(case, name) for name in ("power_w", "sm_clock_mhz"))
    return "" if watts is None else f", {number(watts, 0)} W at {number(mhz, 0)} MHz while steps were timed"


def _group_table(groups: list[Group], step: Group) -> Iterator[str]:
    rows = [
        [
            group.name,
            number(group.us),
            f"{100 * group.us / step.us:.1f}",
            number(group.num_bytes / 1e6),
            f"{group.num_bytes / group.us / 1e3:,.0f}" if group.us else "–",
            number(group.least_us),
            number(group.us - group.least_us),
        ]
        for group in sorted(groups, key=lambda group: group.least_us - group.us)
    ]
    least_us = sum(group.least_us for group in groups)
    last = [number(step.us), "100.0", number(step.num_bytes / 1e6), f"{step.num_bytes / step.us / 1e3:,.0f}"]
    rows.append([step.name, *last, number(least_us), number(step.us - least_us)])
    yield from table(("kernels", "µs", "% of the step", "MB", "GB/s", "least, µs", "beyond it, µs"), rows)
    worst = min(groups, key=lambda group: group.least_us - group.us)
    yield (
        f"Most is lost in {worst.name}: {number(worst.us - worst.least_us)} of {number(step.us - least_us)} µs beyond "
        "the least. Least is by the bytes at the rate of a copy, or the operations at that of many rows; activations "
        "count as moved, though the L2 cache may hold them."
    )
