"""What a profile measured so far, as a table keeps it and back, and which repeats stand out."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bullet_graph.perf.profile_point import ProfilePoint
from bullet_graph.perf.table import DecodePoint, MixedPoint, Points, PrefillPoint, SplitPoint

OUTLIER_SHARE = 0.1
"""A repeat this far off its point's median is told."""

Measured = Mapping[ProfilePoint, Sequence[tuple[float, ...]]]
"""Each point's repeats: the step's time in ms; of a split the decode step's and the prefill forward's."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A repeat far off the others of its point.

    Attributes:
        point: what was measured.
        lane: whose time it is.
        median_ms: of all its repeats.
        repeat_ms: the one that stands out.
        number: of the repeat, from 0.
    """

    point: ProfilePoint
    lane: str
    median_ms: float
    repeat_ms: float
    number: int


def to_points(measured: Measured, wanted: Sequence[ProfilePoint]) -> Points:
    """Those of the ``wanted`` points that were measured at least once."""
    decode: list[DecodePoint] = []
    prefill: list[PrefillPoint] = []
    mixed: list[MixedPoint] = []
    split: list[SplitPoint] = []
    for point in wanted:
        repeats = measured.get(point, ())
        if not repeats:
            continue
        by_lane = list(zip(*repeats, strict=True))
        medians = [statistics.median(times) for times in by_lane]
        match point.kind:
            case "decode":
                decode.append(
                    DecodePoint(point.batch_size, point.context_tokens, point.sms, medians[0], by_lane[0])
                )
            case "prefill":
                prefill.append(
                    PrefillPoint(point.tokens, point.cached_tokens, point.sms, medians[0], by_lane[0])
                )
            case "mixed":
                mixed.append(
                    MixedPoint(point.tokens, point.batch_size, point.context_tokens, medians[0], by_lane[0])
                )
            case "split":
                assert point.sms is not None
                shape = (point.sms, point.batch_size, point.context_tokens, point.tokens)
                split.append(SplitPoint(*shape, medians[0], medians[1], by_lane[0], by_lane[1]))
    return Points(tuple(decode), tuple(prefill), tuple(mixed), tuple(split))


def from_points(points: Points) -> dict[ProfilePoint, list[tuple[float, ...]]]:
    """The inverse of :func:`to_points`."""
    measured: dict[ProfilePoint, list[tuple[float, ...]]] = {}
    for d in points.decode:
        point = ProfilePoint("decode", d.sms, d.batch_size, d.context_tokens)
        measured[point] = [(ms,) for ms in d.repeats_ms]
    for p in points.prefill:
        point = ProfilePoint("prefill", p.sms, tokens=p.tokens, cached_tokens=p.cached_tokens)
        measured[point] = [(ms,) for ms in p.repeats_ms]
    for m in points.mixed:
        point = ProfilePoint("mixed", None, m.batch_size, m.context_tokens, m.tokens)
        measured[point] = [(ms,) for ms in m.repeats_ms]
    for s in points.split:
        point = ProfilePoint("split", s.decode_sms, s.batch_size, s.context_tokens, s.tokens)
        measured[point] = list(zip(s.decode_repeats_ms, s.prefill_repeats_ms, strict=True))
    return measured


def find_outliers(points: Points) -> list[Outlier]:
    """Repeats more than 10 % off their point's median, the farthest first."""
    found = []
    for point, repeats in from_points(points).items():
        lanes = ("decode", "prefill") if point.kind == "split" else (point.kind,)
        for lane, times in zip(lanes, zip(*repeats, strict=True), strict=True):
            median = statistics.median(times)
            found += [
                Outlier(point, lane, median, time, number)
                for number, time in enumerate(times)
                if abs(time - median) > OUTLIER_SHARE * median
            ]
    return sorted(found, key=lambda outlier: -abs(outlier.repeat_ms / outlier.median_ms - 1))
