"""Capture plans, their files, and the order of captures."""

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
from bullet_graph.graphs.key import GraphKey
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
    assert PLAN.capture_s(32) == pytest.approx(6 * capture_plan.DECODE_GRAPH_S + 2 * 32 * capture_plan.PIECE_S)


def default_of(model: str, decode_sms: Sequence[int] = (), **settings: Any) -> capture_plan.CapturePlan:
    device: dict[str, Any] = {"dtype": "bfloat16", "num_sms": 132, "decode_sms": decode_sms}
    return capture_plan.default_plan(EngineConfig(model=model, **settings), shape=PRESETS[model], **device)


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
