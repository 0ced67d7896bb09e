"""What the products and the attention of a work take by themselves: a limit that was measured, not reckoned."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from bench.reporting.all_at_once import DurationAllAtOnce
from bench.reporting.evidence import TARGET_DEVICE, Evidence, Source
from bench.reporting.markdown import number, table
from bench.reporting.rates import Rate, damaged
from bench.reporting.work import step_work
from bullet_graph.models.presets import PRESETS
from bullet_graph.workloads import load_workload

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

    def with_steps_s(self, outputs: Sequence[int], weights_s: float) -> float:
        """The least time for the work, and for the decode steps that the longest output needs beyond these forwards.

        Such a step reads all weights. Rows that decode in one need not ride along in a forward, which saves at most a
        row's share of it.

        Args:
            outputs: tokens of each; none where the work is a decode step.
            weights_s: what it takes to read the weights.
        """
        steps = max(outputs, default=0) - self.forwards
        if steps <= 0:
            return self.seconds
        rows = sum(min(tokens - 1, steps) for tokens in outputs)
        return self.seconds + max(0.0, steps * weights_s - rows * self.seconds / (self.forwards * self.rows))


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
    outputs: Sequence[int] = (),
    weights_s: float = 0.0,
) -> Iterator[str]:
    """A table of the runs and what the quickest of them says about a limit; nothing where there are none.

    Args:
        measured_s: the engine's figure.
        limit_s: the target.
        outputs: see :meth:`BareRun.with_steps_s`; likewise ``weights_s``.
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
    needed_s = {run: run.with_steps_s(outputs, weights_s) for run in whole}
    if any(seconds > run.seconds for run, seconds in needed_s.items()):
        yield (
            f"The longest output has {max(outputs):,} tokens, and each takes a forward: where these are fewer, the "
            "last column adds decode steps at the time in which their weights can be read, less what their rows would "
            "have taken in the forwards."
        )
    scale, unit = (1e3, "ms") if limit_s < 1 else (1.0, "s")
    header = ["rows a forward", "what", unit, "J", "W", "MHz", "file"]
    cells = [_cells(run, scale) for run in runs]
    if outputs:
        header.append("with all steps, s")
        for run, row in zip(runs, cells, strict=True):
            row.append(number(needed_s[run], 2) if run.is_whole else "–")
    yield from table(header, cells, num_left=2)

    def least(some: Sequence[BareRun]) -> tuple[float, str]:
        run = min(some, key=needed_s.__getitem__)
        return needed_s[run], f"{run.way}, {run.rows:,} rows, {number(run.watts, 0)} W"

    def shown(seconds: float) -> str:
        return f"{scale * seconds:.2f} {unit}"

    seconds, where = least(whole)
    with_passes = [run for run in whole if run.way == _WITH_PASSES]
    if seconds > limit_s:
        yield (
            "**Proven** for these kernels under this cap: products and attention alone, without norms, rotation or the "
            f"cache's writes, take {shown(seconds)} ({where}), and the target is {shown(limit_s)}."
        )
    elif with_passes and least(with_passes)[0] > limit_s:
        needed, with_where = least(with_passes)
        yield (
            "**Proven** for these kernels under this cap: products and attention, and the norms, rotation and cache "
            f"writes between them, take {shown(needed)} by themselves ({with_where}), and the target is "
            f"{shown(limit_s)}. Products and attention alone, as if all between them were free, take {shown(seconds)} "
            f"({where})."
        )
    else:
        yield (
            f"**Not proven**: products and attention alone take {shown(seconds)} ({where}), "
            f"{100 * seconds / limit_s:.1f} % of the target of {shown(limit_s)} and "
            f"{100 * seconds / measured_s:.1f} % of the {shown(measured_s)} measured."
        )


def bare_workload_lines(
    measure: DurationAllAtOnce,
    evidence: Evidence,
    cards: Set[str],
    *,
    measured_s: float,
    limit_s: float,
    copy: Rate | None,
) -> Iterator[str]:
    """As :func:`bare_lines`, for a workload all at once.

    Args:
        measure: of the workload.
        copy: rate at which a step can read its weights, None: not known.
    """
    requests = load_workload(measure.workload, num_requests=measure.num_prompts).requests
    weight_bytes = step_work(PRESETS[measure.model], 1, 1).weight_bytes
    yield from bare_lines(
        evidence,
        f"{measure.workload}={measure.num_prompts}",
        cards,
        measured_s=measured_s,
        limit_s=limit_s,
        outputs=[request.output_tokens for request in requests],
        weights_s=0.0 if copy is None else weight_bytes / copy.per_s,
    )


def _cells(run: BareRun, scale: float) -> list[str]:
    return [
        number(run.rows, 0),
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
