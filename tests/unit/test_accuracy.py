"""Errors on held-back points."""

from dataclasses import replace

import pytest
from fakes.perf_tables import LLAMA_8B, h200_table

from bullet_graph.perf.accuracy import ErrorReport, PointError, held_back_errors
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.table import Measured, PerfTable, ProfilePoint, median_ms


def report_of(table: PerfTable) -> ErrorReport:
    return held_back_errors(table, TableModel(table, LLAMA_8B))


def test_every_kind_is_judged_and_a_split_twice() -> None:
    report = report_of(h200_table())
    counts = {summary.kind: summary.num_points for summary in report.kinds}
    assert counts == {"decode": 10, "prefill": 2, "mixed": 2, "split decode": 8, "split prefill": 8}
    assert report.overall is not None
    assert report.overall.num_points == 30
    assert all(point.from_measured for point in report.points)
    # The fake's times are nearly those of the model's own form.
    assert report.overall.worst.percent == pytest.approx(0, abs=1)


def test_noise_of_3_percent_stays_within_the_target() -> None:
    report = report_of(h200_table(noise=0.03))
    assert report.overall is not None
    assert 0 < report.overall.median_percent <= 8
    assert report.overall.p90_percent <= 20


def test_errors_by_hand() -> None:
    ((one, one_repeats), (other, other_repeats), *_) = h200_table().held_back.items()
    (one_ms,), (other_ms,) = median_ms(one_repeats), median_ms(other_repeats)
    # Measured at half of the prediction and at its double: 100 % too long, 50 % too short.
    held_back: Measured = {one: [(one_ms / 2,)], other: [(other_ms * 2,)]}
    report = report_of(replace(h200_table(), held_back=held_back))
    assert [point.percent for point in report.points] == pytest.approx([100, -50])
    assert report.overall is not None
    assert report.overall.median_percent == pytest.approx(75)
    assert report.overall.p90_percent == pytest.approx(95)
    assert report.overall.worst == PointError(
        "decode", "96 rows of context 1500 on the whole GPU", one_ms / 2, pytest.approx(one_ms), True
    )


def test_nothing_held_back() -> None:
    report = report_of(replace(h200_table(), held_back={}))
    assert report.points == report.kinds == ()
    assert report.overall is None


def test_a_point_outside_of_the_measured_range_is_told() -> None:
    held_back: Measured = {ProfilePoint("prefill", 84, tokens=16384): [(900.0,)]}
    (point,) = report_of(replace(h200_table(), held_back=held_back)).points
    assert not point.from_measured
    assert point.point == "16384 tokens after 0 on 84 SMs"
