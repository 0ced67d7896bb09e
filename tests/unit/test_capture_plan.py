"""Capture plans, their files, the order of captures, and the sizes that CUDA graphs are captured for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import capture_plans
import pytest
from capture_plans import NARROW
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError
from bullet_graph.graphs import capture_plan
from bullet_graph.graphs.key import (
    GraphKey,
    batch_size_buckets,
    bucket_for,
    launch_bound_rows,
    row_buckets,
    worthwhile_buckets,
)
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition
from bullet_graph.perf.table import load_table, shipped_folder

WIDE = SmPartition(24, 42)
PLAN = replace(capture_plans.PLAN, decode=(*capture_plans.PLAN.decode, capture_plan.DecodeSizes(48, (8,))))
MODEL = 'model = "llama-3.1-8b"'


def rising(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return (st.sets(st.integers(1, most), min_size=least, max_size=12)).map(lambda found: tuple(sorted(found)))


@st.composite
def plans(draw: st.DrawFn) -> capture_plan.CapturePlan:
    num_sms, most = draw(st.integers(2, 200)), draw(st.integers(1, 300))
    lanes = draw(st.sets(st.integers(1, 100).map(lambda tpcs: 2 * tpcs), max_size=5))
    whole = (*(size for size in draw(rising(0, most)) if size < most), most)
    return capture_plan.CapturePlan(
        model=draw(st.text(min_size=1).filter(str.isprintable)),
        dtype=draw(st.sampled_from(capture_plan.PLAN_DTYPES)),
        num_sms=num_sms,
        max_num_seqs=most,
        decode=(
            capture_plan.DecodeSizes(None, whole),
            *(capture_plan.DecodeSizes(sms, draw(rising(1, most))) for sms in sorted(lanes) if sms <= num_sms - 2),
        ),
        piecewise_rows=draw(rising(0, 1024)),
    )


@given(plans(), st.lists(st.text().filter(str.isprintable), max_size=2))
def test_a_plan_is_read_as_it_was_written(plan: capture_plan.CapturePlan, notes: list[str]) -> None:
    assert capture_plan.parse_plan(capture_plan.format_plan(plan, notes)) == plan


@given(plans(), st.data())
def test_a_batch_is_padded_to_the_smallest_captured_size_that_holds_it(
    plan: capture_plan.CapturePlan, data: st.DataObject
) -> None:
    entry = data.draw(st.sampled_from(plan.decode))
    batch_size = data.draw(st.integers(1, plan.max_num_seqs))
    holding = [size for size in entry.batch_sizes if size >= batch_size]
    assert plan.padded(batch_size, entry.decode_sms) == min(holding, default=batch_size)
    assert plan.padded(batch_size) >= batch_size, "the whole GPU holds any"


def test_partitions_and_cost_of_a_plan() -> None:
    assert PLAN.decode_sms == (32, 48)
    assert dict(PLAN.batch_sizes) == {WHOLE_GPU: (1, 8, 64), NARROW: (4, 16), WIDE: (8,)}
    assert PLAN.padded(5, 16) == 5, "no such lane"
    assert PLAN.num_decode_graphs == 6
    assert PLAN.graph_bytes(32) == 6 * capture_plan.DECODE_GRAPH_BYTES + 2 * 32 * capture_plan.PIECE_BYTES
    assert PLAN.graph_bytes(80) == 2.5 * PLAN.graph_bytes(32)
    assert PLAN.graph_bytes(16) == 6 * capture_plan.DECODE_GRAPH_BYTES + 2 * 16 * capture_plan.PIECE_BYTES
    assert PLAN.capture_s(32) == pytest.approx(6 * capture_plan.DECODE_GRAPH_S + 2 * 32 * capture_plan.PIECE_S)


def default_of(model: str, decode_sms: Sequence[int] = (), **settings: Any) -> capture_plan.CapturePlan:
    device: dict[str, Any] = {"dtype": "bfloat16", "num_sms": 132, "decode_sms": decode_sms}
    return capture_plan.default_plan(EngineConfig(model=model, **settings), shape=PRESETS[model], **device)


def test_a_folder_has_its_name_wherever_it_is_named_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, device = EngineConfig(model="."), {"dtype": "bfloat16", "num_sms": 132, "decode_sms": ()}
    assert capture_plan.default_plan(config, shape=PRESETS["tiny"], **device).model == tmp_path.name


def test_shipped_plans() -> None:
    names = {path.stem for path in shipped_folder().glob("*.toml")}
    assert names == {f"llama-3.1-8b_bfloat16{end}" for end in ("", "_conv", "_code")}
    for name in names:
        assert (capture_plan.load_plan(name).model, capture_plan.load_plan(name).dtype) == ("llama-3.1-8b", "bfloat16")
    sizes = sorted({point.sms for point in load_table("h200", model="llama-3.1-8b").points if point.kind == "split"})
    assert capture_plan.load_plan("llama-3.1-8b_bfloat16") == default_of("llama-3.1-8b", decode_sms=sizes)


TEXT = capture_plan.format_plan(PLAN)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (MODEL, "model = 7", "model: Input should be a valid string, found 7"),
        (f"{MODEL}\n", "", "model: Field required"),
        ('"bfloat16"', '"int3"', "dtype must be one of bfloat16, float16, float32; found 'int3'"),
        ("num_sms = 132", "num_sms = 1", "num_sms: Input should be greater than or equal to 2, found 1"),
        ("num_sms = 132", "num_sms = true", "num_sms: Input should be a valid integer, found True"),
        ("max_num_seqs = 64", "max_num_seqs = 99", "decode[0].batch_sizes must be sizes that end with"),
        ("max_num_seqs = 64", "max_num_seqs = 32", "rising integers of 1 to max_num_seqs=32"),
        ("num_sms = 132", "num_sms = 132\nsms = 2", "sms: Unexpected keyword argument"),
        ("[1, 8, 64]", "[8, 1, 64]", "decode[0].batch_sizes must be rising integers"),
        ("[1, 8, 64]", "[8, 8, 64]", "found [8, 8, 64]"),
        ("[1, 8, 64]", "[0, 64]", "batch_sizes.0: Input should be greater than or equal to 1, found 0"),
        ("[1, 8, 64]", '["1", 64]', "decode.0.batch_sizes.0: Input should be a valid integer, found '1'"),
        ("[1, 8, 64]", "64", "decode.0.batch_sizes: Input should be a valid tuple, found 64"),
        ("[4, 16]", "[]", "decode[1].batch_sizes must be rising integers of 1 to"),
        ("[4, 16]", "[4, 16]\nsizes = [3]", "decode.1.sizes: Unexpected keyword argument"),
        ("decode_sms = 32\n", "decode_sms = 32.0\n", "decode_sms: Input should be a valid integer"),
        ("decode_sms = 32\n", "decode_sms = 33\n", "rising multiples of 2 (a TPC) of at most 130, each once"),
        ("decode_sms = 48\n", "decode_sms = 132\n", "found [32, 132]"),
        ("decode_sms = 32\n", "decode_sms = 48\n", "found [48, 48]"),
        ("decode_sms = 32\n", "", "the whole GPU (an entry without decode_sms) first, and once"),
        ("[16, 128]", "[128, 16]", "piecewise_rows must be rising integers of at least 1, each once"),
        ("version = 1", "version = 2", "format and version must be 'bullet_graph capture plan' and 1; found"),
        ("version = 1", "version = [", "not valid TOML"),
        ("[[decode]]", "[decode]", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "plan.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(ConfigError) as refused:
        capture_plan.load_plan(str(path))
    assert str(refused.value).startswith(f"cannot use the capture plan {path}: ")
    assert message in str(refused.value)
    assert "Value error" not in str(refused.value), "our own messages say all of it"


def test_plans_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    no_tables = TEXT[: TEXT.index("[[decode]]")] + "decode = [1]\n"
    missing = r"cannot read the capture plan .*x\.toml.*llama-3\.1-8b_bfloat16_conv"
    for make, message in (
        (lambda: capture_plan.load_plan(str(tmp_path / "x.toml")), missing),
        (lambda: capture_plan.load_plan("nonesuch"), "no capture plan 'nonesuch' comes with the package"),
        (lambda: capture_plan.load_plan(str(tmp_path / "binary.toml")), "name a text file in UTF-8"),
        (lambda: capture_plan.parse_plan(no_tables), r"decode\.0: .*for each \[\[decode\]\]"),
        # However it is made.
        (lambda: replace(PLAN, decode=(PLAN.decode[0], capture_plan.DecodeSizes(33, (1,)))), "rising multiples of 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


# ---- the order of captures ----


def test_the_order_by_hand() -> None:
    ordered = replace(
        PLAN,
        decode=(
            capture_plan.DecodeSizes(None, (1, 2, 4, 6, 16, 24, 64)),
            capture_plan.DecodeSizes(32, (4, 8, 16)),
            capture_plan.DecodeSizes(48, (2, 32)),
        ),
        piecewise_rows=(16, 32, 128),
    )
    hot = [GraphKey(size) for size in (64, 1, 4, 6, 24)]
    assert capture_plan.hot_keys(ordered) == hot
    assert capture_plan.capture_order(ordered, 2) == [
        *hot,
        *(GraphKey(size) for size in (2, 16)),
        GraphKey(16, NARROW),
        GraphKey(32, WIDE),
        *(capture_plan.PieceKey(rows, layer) for rows in (128, 16, 32) for layer in (0, 1)),
        GraphKey(2, WIDE),
        GraphKey(4, NARROW),
        GraphKey(8, NARROW),
    ]


def test_few_of_all_buckets_are_hot() -> None:
    assert [key.batch_size for key in capture_plan.hot_keys(default_of("tiny"))] == [256, 1, 4, 16, 48, 112]


@given(plans(), st.integers(1, 3))
def test_all_is_captured_once_and_the_largest_before_the_smaller(plan: capture_plan.CapturePlan, layers: int) -> None:
    order = capture_plan.capture_order(plan, layers)
    assert len(order) == len(set(order))
    steps = [key for key in order if isinstance(key, GraphKey)]
    assert {(key.partition, key.batch_size) for key in steps} == {
        (partition, size) for partition, found in plan.batch_sizes.items() for size in found
    }
    pieces = [key for key in order if isinstance(key, capture_plan.PieceKey)]
    assert {(key.rows, key.layer) for key in pieces} == {
        (rows, layer) for rows in plan.piecewise_rows for layer in range(layers)
    }
    assert order[0] == GraphKey(plan.max_num_seqs)
    for partition, found in plan.batch_sizes.items():
        assert next(key for key in steps if key.partition == partition).batch_size == found[-1]
    assert [key.rows for key in pieces[:1]] == list(plan.piecewise_rows[-1:])
    for rows in plan.piecewise_rows:
        assert [key.layer for key in pieces if key.rows == rows] == list(range(layers))


@given(plans())
def test_hot_sizes_pad_to_twice_the_planned_rows_at_most(plan: capture_plan.CapturePlan) -> None:
    captured = sorted(key.batch_size for key in capture_plan.hot_keys(plan))
    for rows in range(1, plan.max_num_seqs + 1):
        assert next(size for size in captured if size >= rows) <= 2 * plan.padded(rows)


@given(plans(), st.integers(1, 2))
def test_a_part_of_the_gpu_takes_only_batches_padded_as_planned(plan: capture_plan.CapturePlan, layers: int) -> None:
    progress = capture_plan.CaptureProgress(plan, layers)
    captured: set[object] = set()
    assert all(progress.max_batch_size(partition) == 0 for partition in plan.batch_sizes)
    while (key := progress.next) is not None:
        progress.note(key)
        captured.add(key)
        assert progress.max_batch_size(WHOLE_GPU) == plan.max_num_seqs
        for entry, partition in zip(plan.decode, plan.batch_sizes, strict=True):
            if partition == WHOLE_GPU:
                continue
            most = progress.max_batch_size(partition)
            planned = [plan.padded(rows, entry.decode_sms) for rows in range(1, most + 1)]
            assert all(GraphKey(size, partition) in captured for size in planned)
    assert progress.missing == []
    assert {p: progress.max_batch_size(p) for p in plan.batch_sizes} == {
        p: sizes[-1] for p, sizes in plan.batch_sizes.items()
    }


# ---- the sizes by themselves ----


@given(st.integers(1, 2000), st.data())
def test_the_bucket_is_the_smallest_that_holds_the_batch(max_batch_size: int, data: st.DataObject) -> None:
    buckets = batch_size_buckets(max_batch_size)
    assert (buckets[0], buckets[-1]) == (1, max_batch_size)
    assert list(buckets) == sorted(set(buckets))
    batch_size = data.draw(st.integers(1, max_batch_size))
    bucket = bucket_for(batch_size, buckets)
    assert bucket == min(size for size in buckets if size >= batch_size)
    limit = 8 if batch_size <= 56 else 16 if batch_size <= 240 else 32 if batch_size <= 480 else 64
    assert bucket - batch_size < limit
    with pytest.raises(IndexError):
        bucket_for(max_batch_size + 1, buckets)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 10), min_size=1))
def test_no_larger_bucket_is_faster_than_one_that_is_kept(times_ms: dict[int, float]) -> None:
    kept = worthwhile_buckets(times_ms)
    assert kept[-1] == max(times_ms)
    assert list(kept) == sorted(kept)
    for size, time_ms in times_ms.items():
        padded = bucket_for(size, kept)
        assert times_ms[padded] <= time_ms
        assert times_ms[padded] == min(times_ms[larger] for larger in times_ms if larger >= size)


@given(st.integers(1, 20_000), st.sampled_from(sorted(PRESETS)), st.data())
def test_short_forwards_are_padded_little(max_rows: int, model: str, data: st.DataObject) -> None:
    buckets = row_buckets(max_rows, PRESETS[model])
    assert list(buckets) == sorted(set(buckets))
    largest = max(buckets, default=0)
    assert largest <= max_rows
    # All forwards that wait for the host have a bucket, but for those between the last one and the most rows.
    step = 16 if largest < 256 else 32 if largest < 512 else 64 if largest < 1024 else largest // 8
    assert largest >= max(launch_bound_rows(PRESETS[model]), 1024) or max_rows - largest < step
    if buckets:
        rows = data.draw(st.integers(1, largest))
        padding = bucket_for(rows, buckets) - rows
        assert padding <= (15 if rows <= 256 else 31 if rows <= 512 else 63 if rows <= 1024 else 511)
        assert padding <= max(15, rows / 8)


def test_the_largest_bucket_follows_the_model() -> None:
    assert launch_bound_rows(PRESETS["llama-3.1-8b"]) == 276
    assert launch_bound_rows(PRESETS["qwen3-0.6b"]) == 3815
    assert launch_bound_rows(PRESETS["llama-3.1-8b-fp8"]) == 1926
    large = (*range(16, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
    assert len(large) == 32
    for name in ("llama-3.1-8b", "qwen3-8b", "llama-3.2-1b"):
        assert row_buckets(8448, PRESETS[name]) == large
    small = (*large, *range(1152, 2049, 128), *range(2304, 3841, 256))
    assert row_buckets(8448, PRESETS["qwen3-0.6b"]) == small
    assert row_buckets(8448, PRESETS["llama-3.1-8b-fp8"]) == small[: small.index(2048) + 1]
    assert row_buckets(8448, PRESETS["qwen3-30b-a3b-fp8"]) == (*small, 4096)
    assert row_buckets(2048 + 64, PRESETS["qwen3-0.6b"]) == small[: small.index(2048) + 1]
    assert row_buckets(8448, PRESETS["tiny"])[-4:] == (6656, 7168, 7680, 8192), "no forward is longer"
    assert row_buckets(15, PRESETS["tiny"]) == ()


def test_buckets_by_hand() -> None:
    assert batch_size_buckets(3) == (1, 2, 3)
    steps = (*range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 641, 64))
    assert batch_size_buckets(700) == (1, 2, 4, *steps, 700)
