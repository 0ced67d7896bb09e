"""The table's model: exact where measured, sensible between, honest beyond."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fakes import perf_tables
from fakes.perf_tables import H200_KEY, LLAMA_8B, h200_table, interrupted_table
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.errors import PerfTableError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.performance import PerformanceModel, attention_pairs, tile_of
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.profile_plan import ErrorReport, PointError, held_back_errors
from bullet_graph.perf.surface import fill_surface
from bullet_graph.perf.table import Measured, PerfTable, PointKind, ProfilePoint, load_table, median_ms
from bullet_graph.runtime.performance import table_model

H200 = h200_table()
MODEL = TableModel(H200, LLAMA_8B)
PAIRS = attention_pairs(2048)

SPARSE = replace(
    H200,
    points={
        ProfilePoint("decode", None, 64, 1000): [(7.3,)],
        ProfilePoint("decode", 32, 64, 1000): [(13.7,)],
        ProfilePoint("prefill", None, tokens=2048): [(48.6,)],
        ProfilePoint("prefill", 100, tokens=2048): [(65.0,)],
        ProfilePoint("split", 32, 64, 1000, 2048): [(17.9, 79.0)],
        ProfilePoint("split", 64, 64, 1000, 2048): [(11.5, 101.8)],
    },
)


def with_points(kind: PointKind, points: Measured) -> TableModel:
    """Of the H200's table, with other points of one kind."""
    others = {point: repeats for point, repeats in H200.points.items() if point.kind != kind}
    return TableModel(replace(H200, points={**others, **points}), LLAMA_8B)


def test_exact_at_every_measured_point() -> None:
    errors = held_back_errors(replace(H200, held_back=H200.points), MODEL).points
    assert len(errors) == sum(2 if point.kind == "split" else 1 for point in H200.points)
    for error in errors:
        assert (error.predicted_ms, error.from_measured) == (pytest.approx(error.measured_ms), True)


@pytest.mark.parametrize("context", [100, 600, 2500, 6000])
@pytest.mark.parametrize("batch_size", [3, 48, 100])
def test_decode_between_the_measured_points(batch_size: int, context: int) -> None:
    predicted, rel = MODEL.decode(batch_size, batch_size * context), 0.04 if batch_size == 3 else 0.02
    assert predicted.ms == pytest.approx(perf_tables.decode_ms(batch_size, context), rel=rel)
    assert predicted.measured


@pytest.mark.parametrize("sms", [20, 28, 40, 72])
def test_sizes_between_measured_ones_are_interpolated(sms: int) -> None:
    smaller = max(size for size in MODEL.decode_sms if size < sms)
    larger = min(size for size in MODEL.decode_sms if size > sms)
    predicted = MODEL.decode(64, 64_000, sms)
    rates = [1 / MODEL.decode(64, 64_000, size).ms for size in (smaller, larger)]
    assert 1 / predicted.ms == pytest.approx(rates[0] + (rates[1] - rates[0]) * (sms - smaller) / (larger - smaller))
    assert predicted.measured


def test_between_two_sizes_only_what_both_have_is_measured() -> None:
    places = ((None, 4), (None, 64), (32, 64), (64, 2), (64, 256))  # few rows on the whole GPU tell of a part
    model = with_points("decode", {ProfilePoint("decode", sms, rows, 1000): [(9.0,)] for sms, rows in places})
    assert [rows for rows in (2, 8, 64, 128, 256) if model.decode(rows, rows * 1000, 48).measured] == [8, 64]


def test_a_row_measured_at_one_depth_takes_the_slope_of_the_nearest_and_no_row_falls_to_nothing() -> None:
    points = [(64, 0, 2.0), (64, 1000, 2.5), (1024, 0, 10.0), (1024, 1000, 26.0), (512, 0, 6.0)]
    assert fill_surface(points, lambda x, _: x, xs=())(512, 1000) == pytest.approx(6.0 + 16.0 * 512 / 1024)
    assert fill_surface([(64, 1000, 1.0), (64, 2000, 10.0)], lambda x, _: x, xs=[128])(64, 0) == 0.25
    # What falls with the depth is noise.
    assert fill_surface([(64, 1000, 12.0), (64, 2000, 10.0)], lambda x, _: x, xs=[128])(128, 0) == 24.0


def test_prefill_pays_for_the_pairs_it_has() -> None:
    # 8 prompts of 256 tokens have fewer pairs than one of 2,048, a chunk after a long prefix has more.
    fewer = 8 * attention_pairs(256)
    short, alone = (MODEL.prefill(2048, pairs).ms for pairs in (fewer, PAIRS))
    later = MODEL.prefill(1000, attention_pairs(1000, 3000)).ms
    assert alone > short == pytest.approx(perf_tables.prefill_ms(2048) - (PAIRS - fewer) * 1.165e-6, rel=0.01)
    assert later == pytest.approx(perf_tables.prefill_ms(1000, 3000), rel=0.02)


def test_mixed_takes_context_and_cached_prefix_into_account() -> None:
    predicted = MODEL.mixed(700, attention_pairs(700, 2000), 100, 100 * 3000).ms
    assert predicted == pytest.approx(perf_tables.mixed_ms(700, 100, 3000) + 700 * 2000 * 1.165e-6, rel=0.03)
    later = MODEL.mixed(700, attention_pairs(700, 32_000), 100, 100 * 3000).ms
    assert later - predicted == pytest.approx(700 * 30_000 * 1.165e-6, rel=0.03)
    brief = with_points("mixed", {ProfilePoint("mixed", None, 64, 1000, 448): [(0.8,)]})
    assert brief.mixed(448, 0.0, 64, 0).ms == pytest.approx(0.2), "attention takes three quarters at most"
    # Without decode rows it is nearly a prefill.
    assert MODEL.mixed(2048, PAIRS, 0, 0).ms == pytest.approx(MODEL.prefill(2048, PAIRS).ms, rel=0.05)


def test_mixed_points_at_two_contexts_give_the_slope() -> None:
    points = {
        ProfilePoint("mixed", None, 64, context, tokens): [(10.0 + tokens / 50 + context / 500,)]
        for tokens in (256, 1024)
        for context in (1000, 3000)
    }
    for context in (1000, 2000, 3000):
        predicted = with_points("mixed", points).mixed(256, attention_pairs(256), 64, 64 * context)
        assert predicted.ms == pytest.approx(10 + 256 / 50 + context / 500)
        assert predicted.measured


def with_tiles(*rows: int, opened: Sequence[tuple[int, float]] = ()) -> TableModel:
    """Mixed forwards of so many rows take 1/16 ms a row; ``opened``: ms of 16 decode rows beside so many of prompts."""
    points = {
        ProfilePoint("mixed", None, batch_size, context, total - batch_size): [(total / 16 + context / 500,)]
        for total, batch_size, context in itertools.product(rows, (16, 64), (1000, 3000))
    }
    return with_points("mixed", points | {ProfilePoint("mixed", None, 16, 1000, n): [(ms,)] for n, ms in opened})


def test_a_mixed_forward_takes_as_long_as_its_full_tiles() -> None:
    def ms(table: TableModel, tokens: int, batch_size: int = 16) -> float:
        # As many pairs for all, so that the rows alone count.
        return table.mixed(tokens, attention_pairs(112), batch_size, 16_000).ms

    assert [tile_of(rows) for rows in (1, 64, 65, 128, 129)] == [(0, 64), (0, 64), (64, 128), (64, 128), (128, 256)]
    full, part = with_tiles(128, 256, 512), with_tiles(160, 256, 512)
    assert ms(full, 100) == pytest.approx(ms(full, 112), abs=0.01)
    assert ms(full, 113) == pytest.approx(ms(full, 240), abs=0.01) == pytest.approx(ms(full, 112) + 8, abs=0.1)
    assert ms(full, 320) == pytest.approx((ms(full, 240) + ms(full, 496)) / 2, rel=0.03)
    # Where points end within a tile, as in older tables, times rise with the rows.
    assert ms(part, 113) < ms(part, 130) < ms(part, 240)
    # 144 rows were measured, more than half of their tile's 8 ms, and 272, nearly all of the next tile.
    opens, dear, cheap = (with_tiles(128, 256, 512, opened=[(128, ms), (256, 25.0)]) for ms in (14.5, 20.0, 9.0))
    for tokens, opened_ms in ((128, 14.5), (256, 25.0)):
        assert opens.mixed(tokens, attention_pairs(tokens), 16, 16_000).ms == pytest.approx(opened_ms, abs=0.01)
    first, middle, last = (ms(opens, tokens) - ms(opens, 112) for tokens in (113, 176, 240))
    assert 3 < first < middle - 1 < last - 2 == pytest.approx(6, abs=0.1)
    assert ms(dear, 200) == pytest.approx(ms(full, 200)), "no more than the whole tile"
    assert ms(cheap, 113) < ms(full, 112) + 1, "no less than rows without tiles"


def test_without_mixed_points_the_parts_are_added_up_and_flagged() -> None:
    predicted = (TableModel(h200_table(mixed=False), LLAMA_8B)).mixed(1024, attention_pairs(1024), 64, 64_000)
    assert predicted.ms == pytest.approx(perf_tables.mixed_ms(1024, 64, 1000), rel=0.06)
    assert not predicted.measured


@pytest.mark.parametrize(
    "predict",
    [
        lambda m: m.decode(600, 60_000),
        lambda m: m.decode(64, 64_000, 8),
        lambda m: m.prefill(16, 136),
        lambda m: m.prefill(20_000, attention_pairs(20_000)),
        lambda m: m.prefill(2048, PAIRS, 10),
        lambda m: m.mixed(8192, attention_pairs(8192), 64, 64_000),
        lambda m: m.mixed(1024, attention_pairs(1024), 400, 400_000),
        lambda m: m.split(64, 600, 60_000, 2048, PAIRS),
        lambda m: m.split(64, 64, 64_000, 20_000, attention_pairs(20_000)),
        lambda m: m.split(72, 64, 64_000, 2048, PAIRS),
    ],
)
def test_what_lies_outside_the_measured_range_is_flagged(predict: Callable[[PerformanceModel], object]) -> None:
    assert not predict(MODEL).measured  # type: ignore[attr-defined]


def test_beyond_the_measured_range_the_rate_goes_on() -> None:
    largest, beyond = MODEL.prefill(8192, 8192 * 1000.0).ms, MODEL.prefill(32768, 32768 * 1000.0).ms
    assert beyond == pytest.approx(4 * largest, rel=0.1)
    assert MODEL.decode(1024, 1024 * 500).ms == pytest.approx(perf_tables.decode_ms(1024, 500), rel=0.25)


def test_a_split_that_was_not_measured_takes_the_slowdown_of_its_neighbour() -> None:
    both, near = MODEL.split(68, 64, 64_000, 2048, PAIRS), MODEL.split(64, 64, 64_000, 2048, PAIRS)
    slowdown = near.decode_ms / MODEL.decode(64, 64_000, 64).ms
    assert both.decode_ms == pytest.approx(slowdown * MODEL.decode(64, 64_000, 68).ms)
    assert both.prefill_ms > near.prefill_ms


def test_a_table_without_partitions() -> None:
    model = TableModel(h200_table(decode_sms=()), LLAMA_8B)
    assert model.decode_sms == ()
    both = model.split(64, 64, 64_000, 2048, PAIRS)
    assert both.decode_ms > model.decode(64, 64_000, 64).ms > model.decode(64, 64_000).ms
    assert not both.measured
    assert not model.decode(64, 64_000, 64).measured


def test_a_single_point_of_each_kind_is_enough() -> None:
    model = TableModel(SPARSE, LLAMA_8B)
    assert model.decode(64, 64_000).ms == pytest.approx(7.3)
    assert model.decode(64, 64_000, 32).ms == pytest.approx(13.7)
    # Elsewhere the roofline's form, through the point.
    assert model.decode(64, 128_000).ms == pytest.approx(7.3 + 2.4, rel=0.1)
    assert model.prefill(1024, attention_pairs(1024)).ms == pytest.approx(24, rel=0.1)
    both = model.split(64, 64, 64_000, 2048, PAIRS)
    assert (both.decode_ms, both.prefill_ms) == (pytest.approx(11.5), pytest.approx(101.8))
    smaller = model.split(32, 32, 32_000, 1024, attention_pairs(1024))
    assert 10 < smaller.decode_ms < 17.9
    assert 35 < smaller.prefill_ms < 50
    # Of no point at all, a roofline.
    empty = TableModel(replace(H200, points={}), LLAMA_8B)
    assert empty.decode(64, 64_000).ms == pytest.approx(7.3, rel=0.15)
    assert not empty.decode(64, 64_000).measured
    assert not empty.prefill(512, attention_pairs(512)).measured


def test_groups_of_split_points_are_told_apart() -> None:
    # A chunk of 512 rows leaves decode faster than one of 2,048; each group is met, and the middle lies between.
    points = {
        ProfilePoint("split", 64, batch_size, 1000, tokens): [(decode_ms, 100.0 * tokens / 2048)]
        for batch_size, tokens, decode_ms in ((64, 2048, 11.5), (128, 2048, 14.0), (64, 512, 10.0))
    }
    model = with_points("split", points)

    def beside(tokens: int) -> float:
        return model.split(64, 64, 64_000, tokens, attention_pairs(tokens)).decode_ms

    assert beside(2048) == pytest.approx(11.5)
    assert beside(512) == pytest.approx(10.0)
    assert beside(1024) == pytest.approx(10.75)
    assert beside(8192) == pytest.approx(11.5)


def test_chunks_follow_measured_rates_where_there_are_enough_and_else_the_waves() -> None:
    assert [MODEL.wave_chunk_tokens(most) for most in (2048, 2000, 30)] == [2048, 1984, 30]
    # A size measured to be slow is not taken.
    prefill = {p: median_ms(repeats) for p, repeats in H200.points.items() if p.kind == "prefill"}
    known = {p: [ms] for p, ms in prefill.items() if p.tokens <= 4096 or p.sms is not None}
    slow = {p: [(1.5 * ms,)] for p, ((ms,),) in known.items() if (p.tokens, p.sms) == (4096, None)}
    assert with_points("prefill", known | slow).wave_chunk_tokens(4096) == 2048
    # Too little was measured.
    two, three = (with_points("prefill", {p: [ms] for p, ms in list(prefill.items())[:n]}) for n in (2, 3))
    assert [two.wave_chunk_tokens(2000, sms) for sms in (None, 96)] == [1984, 1536]
    assert three.wave_chunk_tokens(2000) == 256
    assert MODEL.wave_chunk_tokens(700, 40) == 640


@pytest.mark.parametrize(
    ("table", "shape", "message"),
    [
        (interrupted_table(), LLAMA_8B, "interrupted profile: run `bullet-graph profile` again to resume"),
        (H200, replace(LLAMA_8B, hidden_size=5120), "another model or number format than the one to predict"),
    ],
)
def test_other_tables_are_refused(table: PerfTable, shape: ModelConfig, message: str) -> None:
    with pytest.raises(PerfTableError, match=message):
        TableModel(table, shape)


def test_an_unknown_gpu_takes_the_generic_roofline_scaled_to_its_points() -> None:
    model = TableModel(replace(H200, key=replace(H200_KEY, gpu="Some GPU")), LLAMA_8B)
    assert model.decode(64, 64_000).ms == MODEL.decode(64, 64_000).ms
    assert model.prefill(16384, 16384 * 1000.0).ms == pytest.approx(MODEL.prefill(16384, 16384 * 1000.0).ms, rel=0.1)


# ---- more work never takes less time, whatever was measured ----


def noisy_sparse_model(seed: int) -> TableModel:
    """A table with large errors of measurement and most points missing."""
    rng = random.Random(seed)
    share = (0.03, 0.1, 0.3, 0.7)[seed % 4]
    points = h200_table(noise=0.3, seed=seed).points
    kept = {point: repeats for point, repeats in points.items() if rng.random() < share}
    return TableModel(replace(H200, points=kept), LLAMA_8B)


TILED = with_tiles(128, 512, 2048), with_tiles(128, 256, opened=[(128, 14.5)])
MODELS = st.sampled_from([MODEL, *TILED, *(noisy_sparse_model(seed) for seed in range(8))])
SMS = st.sampled_from([None, 4, 16, 20, 32, 40, 84, 100, 120])


def assert_rises(ms: float, *more_ms: float) -> None:
    assert 0 < ms < math.inf
    assert all(ms <= more * (1 + 1e-9) for more in more_ms)


@given(MODELS, st.integers(1, 1024), st.integers(1, 2_000_000), st.integers(0, 2_000_000), SMS)
def test_decode_never_falls(model: TableModel, batch_size: int, kv: int, more: int, sms: int | None) -> None:
    assert_rises(model.decode(batch_size, kv, sms).ms, model.decode(batch_size, kv + more, sms).ms)
    # One row more, at the same context.
    assert_rises(*(model.decode(n, n * (kv // batch_size), sms).ms for n in (batch_size, batch_size + 1)))


@given(MODELS, st.integers(1, 16384), st.integers(0, 4096), st.integers(0, 100_000), SMS)
def test_prefill_never_falls(model: TableModel, tokens: int, more: int, cached: int, sms: int | None) -> None:
    chunks = ((tokens, cached), (tokens + more, cached), (tokens, cached + more))
    assert_rises(*(model.prefill(chunk[0], attention_pairs(*chunk), sms).ms for chunk in chunks))


@given(MODELS, st.integers(1, 8192), st.integers(0, 50_000), st.integers(1, 512), st.integers(1, 8000))
def test_mixed_never_falls(model: TableModel, tokens: int, cached: int, batch_size: int, context: int) -> None:
    kv, pairs = batch_size * context, attention_pairs(tokens, cached)
    assert_rises(
        model.mixed(tokens, pairs, batch_size, kv).ms,
        model.mixed(tokens + 64, attention_pairs(tokens + 64, cached), batch_size, kv).ms,
        model.mixed(tokens, 2 * pairs, batch_size, kv).ms,
        model.mixed(tokens, pairs, batch_size, 2 * kv).ms,
    )


@given(
    MODELS,
    st.sampled_from([16, 32, 64, 70, 112]),
    st.integers(1, 512),
    st.integers(1, 8000),
    st.integers(1, 8192),
    st.integers(0, 8192),
)
def test_split_never_falls(model: TableModel, sms: int, batch_size: int, context: int, tokens: int, more: int) -> None:
    kv, pairs = batch_size * context, attention_pairs(tokens)
    both = model.split(sms, batch_size, kv, tokens, pairs)
    longer = model.split(sms, batch_size, kv + more, tokens, pairs)
    larger = model.split(sms, batch_size, kv, tokens + more, attention_pairs(tokens + more))
    # For a size that was not measured, products of three predictions: each is monotone, their product need not be.
    is_monotone = sms in model.decode_sms or not model.decode_sms
    assert_rises(both.decode_ms, *([longer.decode_ms] if is_monotone else []))
    assert_rises(both.prefill_ms, *([larger.prefill_ms] if is_monotone else []))


# ---- errors on held-back points ----


def test_decode_steps_with_experts_between_the_measured_ones() -> None:
    # A line from 16 to 64 rows is 8 % too low at 23. 5 rows run in a graph of 8: three are padding, which is alike.
    table = load_table("h200", model="qwen3-30b-a3b")
    errors = held_back_errors(table, table_model(table, 512, PRESETS["qwen3-30b-a3b"])).points
    percents = [abs(error.percent) for error in errors if error.kind == "decode"]
    assert sum(percents) / len(percents) < 2


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
    one, other, *_ = H200.held_back
    one_ms, other_ms = (error.predicted_ms for error in report_of(H200).points[:2])
    # Measured at half of the prediction and at its double: 100 % too long, 50 % too short.
    held_back: Measured = {one: [(one_ms / 2,)], other: [(other_ms * 2,)]}
    report = report_of(replace(H200, held_back=held_back))
    assert [point.percent for point in report.points] == pytest.approx([100, -50])
    assert report.overall is not None
    assert report.overall.median_percent == pytest.approx(75)
    assert report.overall.p90_percent == pytest.approx(95)
    assert report.overall.worst == PointError(
        "decode", "96 rows of context 1500 on the whole GPU", one_ms / 2, pytest.approx(one_ms), True
    )


def test_nothing_held_back() -> None:
    assert report_of(replace(h200_table(), held_back={})) == ErrorReport((), (), None)


def test_a_point_outside_of_the_measured_range_is_told() -> None:
    held_back: Measured = {ProfilePoint("prefill", 84, tokens=16384): [(900.0,)]}
    (point,) = report_of(replace(h200_table(), held_back=held_back)).points
    assert not point.from_measured
    assert point.point == "16384 tokens after 0 on 84 SMs"
