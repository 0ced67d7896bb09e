"""What the products and the attention of a work take by themselves: a limit that was measured, not reckoned."""

import itertools
from collections.abc import Iterator, Sequence, Set
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
        forwards: that the whole work comes to.
        seconds: for the whole work.
        joules: likewise.
        watts: of the GPU meanwhile, mean.
        mhz: of its SMs, likewise.
        source: the file, and whether it is of the same card.
        has_earlier_chunks: prompts longer than a forward attend to their earlier chunks as well.
    """

    rows: int
    way: str
    forwards: float
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


@dataclass(frozen=True, slots=True)
class Least:
    """The least time of a work by runs that went the same way, and the runs of which it is a mixture.

    Attributes:
        seconds: for the whole work.
        runs: one, or one with fewer forwards than are needed and one with more.
    """

    seconds: float
    runs: tuple[BareRun, ...]

    def __str__(self) -> str:
        rows = " and ".join(number(run.rows, 0) for run in self.runs)
        watts = " and ".join(number(run.watts, 0) for run in self.runs)
        return f"{self.runs[0].way}, {rows} rows, {watts} W"


def least_of(runs: Sequence[BareRun], num_forwards: int = 0) -> Least:
    """The quickest way to do the whole work in at least so many forwards of these sizes, or of two of them.

    Each token of an output takes a forward of its own, so a work takes as many as its longest output has tokens.
    Sizes further apart are no quicker, nor are decode steps between larger forwards: time over rows is convex, since
    few rows take as long as it takes to read all weights.

    Args:
        runs: of one work, at least one.
        num_forwards: that it needs. Of a way all of whose runs have fewer, those count as they are: that is too little.
    """
    mixtures: list[Least] = []
    for way in {run.way for run in runs}:
        enough = [run for run in runs if run.way == way and run.forwards >= num_forwards]
        few = [run for run in runs if run.way == way and run.forwards < num_forwards]
        mixtures += [Least(run.seconds, (run,)) for run in enough or few]
        for many, fewer in itertools.product(enough, few):
            share = (num_forwards - fewer.forwards) / (many.forwards - fewer.forwards)
            mixtures.append(Least(share * many.seconds + (1 - share) * fewer.seconds, (many, fewer)))
    return min(mixtures, key=lambda mixture: (mixture.seconds, len(mixture.runs)))


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
    evidence: Evidence,
    work: str,
    cards: Set[str],
    *,
    measured_s: float,
    limit_s: float,
    num_forwards: int = 0,
) -> Iterator[str]:
    """A table of the runs and what the quickest mixture of them says about a limit; nothing where there are none.

    Args:
        measured_s: the engine's figure.
        limit_s: the target.
        num_forwards: see :func:`least_of`.
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
    header = ["rows a forward", "forwards", "what", unit, "J", "W", "MHz", "file"]
    yield from table(header, [_cells(run, scale) for run in runs], num_left=3)

    def shown(seconds: float) -> str:
        return f"{scale * seconds:.2f} {unit}"

    if num_forwards > min(run.forwards for run in whole):
        yield (
            f"The longest output has {num_forwards:,} tokens, and each takes a forward of its own: what counts is the "
            "quickest mixture of two sizes that comes to so many forwards, if the smallest does."
        )
    least = least_of(whole, num_forwards)
    passes = [run for run in whole if run.way == _WITH_PASSES]
    with_passes = least_of(passes, num_forwards) if passes else None
    if least.seconds > limit_s:
        yield (
            "**Proven** for these kernels under this cap: products and attention alone, without norms, rotation or the "
            f"cache's writes, take {shown(least.seconds)} ({least}), and the target is {shown(limit_s)}."
        )
    elif with_passes is not None and with_passes.seconds > limit_s:
        yield (
            "**Proven** for these kernels under this cap: products and attention, and the norms, rotation and cache "
            f"writes between them, take {shown(with_passes.seconds)} by themselves ({with_passes}), and the target is "
            f"{shown(limit_s)}. Products and attention alone, as if all between them were free, take "
            f"{shown(least.seconds)} ({least})."
        )
    else:
        yield (
            f"**Not proven**: products and attention alone take {shown(least.seconds)} ({least}), "
            f"{100 * least.seconds / limit_s:.1f} % of the target of {shown(limit_s)} and "
            f"{100 * least.seconds / measured_s:.1f} % of the {shown(measured_s)} measured."
        )


def _cells(run: BareRun, scale: float) -> list[str]:
    return [
        number(run.rows, 0),
        number(run.forwards, 0),
        run.way,
        number(scale * run.seconds, 2),
        number(run.joules, 1 if scale > 1 else 0),
        number(run.watts, 0),
        number(run.mhz, 0),
        run.source,
    ]


def _runs(source: Source, work: str, cards: Set[str]) -> Iterator[BareRun]:
    if not source.name.startswith(_FILE_PREFIX) or source.devices != {TARGET_DEVICE}:
        return
    same = ", the same card" if source.is_of(cards) else ""
    with damaged(source):
        for row in source.fields["rows"]:
            if row["part"] == work and "seconds" in row:
                yield _run(row, f"`{source.name}`{same}")


def _run(row: dict[str, Any], source: str) -> BareRun:
    numbers = (row["repeats"], row["seconds"], row["joules"], row["watts"], row["mhz"])
    earlier = row["decode_rows"] == row["rows"] or "continued_tokens" in row
    return BareRun(int(row["rows"]), str(row["name"]), *map(float, numbers), source, earlier)
