"""What the products and the attention of a work take by themselves: a limit that was measured, not reckoned."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from bench.reporting.evidence import TARGET_DEVICE, Evidence, Source
from bench.reporting.markdown import number, table
from bench.reporting.rates import damaged

_FILE_PREFIX = "bare_"
_PARTS_ALONE = ("products", "attention")
_WITH_PASSES = "in turn, with passes"
_LEFT_OUT = " Of prompts longer than a forward, attention to earlier chunks is left out."


@dataclass(frozen=True, slots=True)
class BareRun:
    """A work's products and attention, replayed in a graph under the power cap.

    Attributes:
        rows: of a forward.
        way: how they ran.
        seconds: for the whole work.
        joules: likewise.
        watts: of the GPU meanwhile, mean.
        mhz: of its SMs, likewise.
        source: the file, and whether it is of the same card.
        has_earlier_chunks: prompts longer than a forward attend to their earlier chunks as well.
    """

    rows: int
    way: str
    seconds: float
    joules: float
    watts: float
    mhz: float
    source: str
    has_earlier_chunks: bool

    @property
    def is_whole(self) -> bool:
        """Whether both products and attention ran."""
        return self.way not in _PARTS_ALONE


def bare_runs(evidence: Evidence, work: str, cards: Set[str]) -> list[BareRun]:
    """All runs of a work, those of the same card alone where there are any.

    Args:
        work: such as ``azure:conv=600`` or ``decode=256x1000``.
        cards: on which the figure was measured that they are to explain.

    Raises:
        ConfigError: a file that should have runs is damaged.
    """
    found = [(source, run) for source in evidence.sources for run in _runs(source, work, cards)]
    same = [run for source, run in found if source.is_of(cards)]
    return sorted(same or [run for _, run in found], key=lambda run: (run.rows, run.seconds))


def bare_lines(
    evidence: Evidence, work: str, cards: Set[str], *, measured_s: float, limit_s: float
) -> Iterator[str]:
    """A table of the runs and what the quickest of them says about a limit; nothing where there are none.

    Args:
        measured_s: the engine's figure.
        limit_s: the target.
    """
    runs = bare_runs(evidence, work, cards)
    whole = [run for run in runs if run.is_whole]
    if not whole:
        return
    yield (
        "\nMeasured by themselves (`bench/kernels/bare_work.py`): the same products and attention, in forwards as the "
        "work has them on average, replayed as one graph until the card is at its power cap; no host, no scheduler, "
        f"no sampling, no batch that shrinks.{'' if all(run.has_earlier_chunks for run in runs) else _LEFT_OUT}"
    )
    scale, unit = (1e3, "ms") if limit_s < 1 else (1.0, "s")
    yield from table(
        ("rows a forward", "what", unit, "J", "W", "MHz", "file"),
        [
            [
                number(run.rows, 0),
                run.way,
                number(scale * run.seconds, 2),
                number(run.joules, 1 if limit_s < 1 else 0),
                number(run.watts, 0),
                number(run.mhz, 0),
                run.source,
            ]
            for run in runs
        ],
        num_left=2,
    )
    least = min(whole, key=lambda run: run.seconds)
    shown, target, taken = (
        f"{scale * seconds:.2f} {unit}" for seconds in (least.seconds, limit_s, measured_s)
    )
    where = f"{least.way}, {least.rows:,} rows, {number(least.watts, 0)} W"
    if least.seconds > limit_s:
        left_out = (
            "with norms" if least.way == _WITH_PASSES else "without norms, rotation or the cache's writes"
        )
        yield (
            f"**Proven** for these kernels under this cap: products and attention alone, {left_out}, take {shown} "
            f"({where}), and the target is {target}."
        )
    else:
        yield (
            f"**Not proven**: products and attention alone take {shown} ({where}), "
            f"{100 * least.seconds / limit_s:.1f} % of the target of {target} and "
            f"{100 * least.seconds / measured_s:.1f} % of the {taken} measured."
        )


def _runs(source: Source, work: str, cards: Set[str]) -> Iterator[BareRun]:
    if not source.name.startswith(_FILE_PREFIX) or source.devices != {TARGET_DEVICE}:
        return
    same = ", the same card" if source.is_of(cards) else ""
    with damaged(source):
        for row in source.fields["rows"]:
            if row["part"] == work and "seconds" in row:
                yield _run(row, f"`{source.name}`{same}")


def _run(row: dict[str, Any], source: str) -> BareRun:
    numbers = (row["seconds"], row["joules"], row["watts"], row["mhz"])
    earlier = row["decode_rows"] == row["rows"] or "continued_tokens" in row
    return BareRun(int(row["rows"]), str(row["name"]), *map(float, numbers), source, earlier)
