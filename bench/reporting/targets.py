"""The project's targets, frozen, and what the files say to each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from bench.reporting.all_at_once import DurationAllAtOnce
from bench.reporting.evidence import TARGET_DEVICE, Evidence
from bench.reporting.goodput import GoodputRatio
from bench.reporting.measures import (
    DecodeStep,
    Figure,
    Measure,
    PrefillRate,
    RunRatio,
)

Word = Literal["met", "missed", "open", "not measured"]
WORDS: tuple[Word, ...] = get_args(Word)

_MODEL = "llama-3.1-8b"
_OTHER_MODELS = ("qwen3-0.6b", "qwen3-8b")
_TIMES_BEST_PEER = "× the best peer setting"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure wanted.

    Attributes:
        name: what is measured.
        comparator: how the figure must compare with the limit.
        limit: in ``unit``.
        unit: of the figure.
        measure: where in the files the figure is, and how it comes of them.
    """

    name: str
    comparator: Literal["≤", "≥"]
    limit: float
    unit: str
    measure: Measure

    def is_met_by(self, value: float) -> bool:
        """Whether a figure, not rounded, is within the limit."""
        return value <= self.limit if self.comparator == "≤" else value >= self.limit


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the files say to a target.

    Attributes:
        target: the target.
        figure: the newest evidence; None: not measured.
        older: evidence of other files or conditions, which does not count.
        reasons: why files that come near it are no evidence.
    """

    target: Target
    figure: Figure | None
    older: tuple[Figure, ...]
    reasons: tuple[str, ...]

    @property
    def word(self) -> Word:
        """The verdict; open where the evidence leaves a range that holds the limit."""
        if self.figure is None:
            return "not measured"
        if self.target.is_met_by(self.figure.value):
            return "met"
        at_best = self.figure.at_best
        return "open" if at_best is not None and self.target.is_met_by(at_best) else "missed"


def _goodputs(model: str) -> Iterator[Target]:
    """Rows of a model; the limits are the same for every model."""
    shown = "" if model == _MODEL else f", {model}"
    for name, workload, slo, limit in (
        ("conv (ttft:500 tpot:15, 90 %)", "azure:conv", "ttft:500ms tpot:15ms", 1.15),
        ("code (ttft:500 tpot:15, 90 %)", "azure:code", "ttft:500ms tpot:15ms", 1.25),
        ("code, interactive (ttft:500 tpot:8, 90 %)", "azure:code", "ttft:500ms tpot:8ms", 1.55),
        ("longdoc (ttft:2000 tpot:20, 90 %)", "synthetic:longdoc", "ttft:2000ms tpot:20ms", 1.25),
    ):
        yield Target(
            f"goodput, {name}{shown}", "≥", limit, _TIMES_BEST_PEER, GoodputRatio(model, workload, slo, 0.9)
        )


TARGETS = (
    Target("conv, first 600, all at once", "≤", 22.0, "s", DurationAllAtOnce(_MODEL, "azure:conv", 600)),
    Target("code, first 400, all at once", "≤", 21.5, "s", DurationAllAtOnce(_MODEL, "azure:code", 400)),
    *_goodputs(_MODEL),
    Target(
        "p99 ITL, longdoc at 3.5/s",
        "≤",
        0.6,
        _TIMES_BEST_PEER,
        RunRatio(_MODEL, "synthetic:longdoc", None, 3.5, "p99_itl_ms", "ms"),
    ),
    *(
        Target(
            f"decode step, batch {batch_size}, context 1,000",
            "≤",
            limit,
            "ms",
            DecodeStep(_MODEL, batch_size, 1000),
        )
        for batch_size, limit in ((1, 4.3), (64, 6.9), (256, 14.5))
    ),
    Target(
        "prefill, 2,048-token prompts, sustained", "≥", 41_000, "tokens/s", PrefillRate(_MODEL, 2048, 2.0)
    ),
    Target(
        "joules a token, conv, first 600, all at once",
        "≤",
        0.9,
        _TIMES_BEST_PEER,
        RunRatio(_MODEL, "azure:conv", 600, None, "joules_per_token", "J"),
    ),
    *(target for model in _OTHER_MODELS for target in _goodputs(model)),
)


def judge(evidence: Evidence, targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Compare each target with what was measured: the newest file counts that has the figure."""
    return [_judge(evidence, target) for target in targets]


def _judge(evidence: Evidence, target: Target) -> Verdict:
    figures: list[Figure] = []
    reasons: list[str] = []
    for source in evidence.newest_first:
        for found in target.measure.find(source):
            if source.devices != {TARGET_DEVICE}:
                where = ", ".join(sorted(source.devices)) or "a device that it does not tell"
                reasons.append(f"{source.name} is of {where}, not {TARGET_DEVICE}")
            elif isinstance(found, Figure):
                figures.append(found)
            else:
                reasons.append(f"{source.name}: {found}")
    return Verdict(target, figures[0] if figures else None, tuple(figures[1:]), tuple(dict.fromkeys(reasons)))
