"""Performance tables: their numbers, their file, what they hold for, and where they are found."""

import json
import math
import random
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import perf_tables
from fakes.perf_tables import H200_KEY, LLAMA_8B, h200_table, interrupted_table
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.errors import PerfTableError, PerfTableWarning
from bullet_graph.hardware import GENERIC, H100, H200, KNOWN_GPUS, gpu_spec
from bullet_graph.models.config import ModelConfig, without_wide_windows
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.sharding import shard
from bullet_graph.perf import table as tables
from bullet_graph.perf.bandwidth import measure_copy_gb_per_s
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.roofline import (
    Roofline,
    decode_step_bytes,
    decode_weight_bytes,
    kv_cache_bytes_per_token,
    num_waves,
    touched_experts,
    wave_efficiency,
)
from bullet_graph.perf.table import (
    PerfTable,
    ProfilePoint,
    _checksum,
    for_lengths,
    format_name,
    list_tables,
    load_table,
    median_ms,
    own_table_file_name,
    read_table,
    require_match,
    shape_numbers,
    table_file_name,
    write_table,
)

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    write_table(h200_table(), path)
    return path


def change(path: Path, edit: Change, *, sign: bool = True) -> None:
    """Edit a table's file; with ``sign`` its checksum is made to fit again."""
    content = json.loads(path.read_text())
    edit(content)
    if sign:
        content.pop("checksum", None)
        content["checksum"] = _checksum(content)
    path.write_text(json.dumps(content))


ESTIMATE = Roofline(H200, LLAMA_8B)
REPEATED = replace(
    h200_table(noise=0.1),
    points={
        point: [(1.0 + number, 20.0)[: 2 if point.kind == "split" else 1] for number in (0, 2, 1)]
        for point in h200_table().points
    },
)


@pytest.mark.parametrize("table", [REPEATED, interrupted_table()], ids=["whole", "interrupted"])
def test_what_is_written_is_read(tmp_path: Path, table: Any) -> None:
    path = tmp_path / "table.json"
    for written in (h200_table(), table):  # the second replaces the first
        write_table(written, path)
        assert read_table(path) == written
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_records_name_what_applies_to_their_kind_and_hold_medians(tmp_path: Path) -> None:
    write_table(REPEATED, tmp_path / "table.json")
    points = json.loads((tmp_path / "table.json").read_text())["points"]
    repeats = {"ms": 2.0, "repeats_ms": [1.0, 3.0, 2.0]}
    assert points["decode"][0] == {"batch_size": 1, "context_tokens": 250, "sms": None} | repeats
    assert points["prefill"][0] == {"tokens": 64, "cached_tokens": 0, "sms": None} | repeats
    assert points["mixed"][0] == {"tokens": 64, "batch_size": 16, "context_tokens": 1000} | repeats
    lanes = {
        "decode_ms": 2.0,
        "prefill_ms": 20.0,
        "decode_repeats_ms": [1.0, 3.0, 2.0],
        "prefill_repeats_ms": [20.0] * 3,
    }
    assert points["split"][0] == {"decode_sms": 16, "batch_size": 64, "context_tokens": 1000, "tokens": 2048} | lanes


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    (tmp_path / "table.json").mkdir()
    for path in (tmp_path / "table.json", tmp_path / "missing" / "table.json"):
        with pytest.raises(PerfTableError, match="cannot write the performance table"):
            write_table(h200_table(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"], "nothing is left"
    with pytest.raises(PerfTableError, match=r"there is no performance table .*bullet-graph profile"):
        read_table(tmp_path / "other.json")
    with pytest.raises(PerfTableError, match="cannot read the performance table"):
        read_table(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: b"", r"not valid JSON .*truncated.*bullet-graph profile"),
        (lambda content: content[: int(0.99 * len(content))], "not valid JSON .*truncated"),
        (lambda _: b"\xff\xfe\xfa{}", "not valid JSON"),
        (lambda _: b"[]", "this is something else"),
        *(
            (
                lambda content, name=name: content.replace(b'"num_sms": 132', b'"num_sms": ' + name, 1),
                f"it holds {name.decode()} where a finite number is required",
            )
            for name in (b"NaN", b"Infinity", b"-Infinity")
        ),
    ],
)
def test_a_damaged_file(path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PerfTableError, match=message):
        read_table(path)


@pytest.mark.parametrize("edit", [lambda c: c["points"]["decode"][0].update(ms=1.0), lambda c: c.pop("checksum")])
def test_an_edit_is_detected(path: Path, edit: Change) -> None:
    change(path, edit, sign=False)
    with pytest.raises(PerfTableError, match="checksum does not fit"):
        read_table(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(format="something"), "is required; this is something else"),
        (lambda c: c.update(version=2), "version 1 of the format is required, found 2"),
        (lambda c: c.pop("points"), "its fields are not those of a table .*points"),
        (lambda c: c.update(colour="red"), "its fields are not .*colour"),
        (lambda c: c["key"].pop("gpu"), "its fields are not .*gpu"),
        (lambda c: c["points"]["split"][0]["decode_repeats_ms"].append(1.0), "its fields are not .*shorter than"),
        (lambda c: c["key"].update(num_sms=132.5), "its fields are not .*key.num_sms: .*132.5"),
        (lambda c: c["key"].update(dtype="int3"), "key.dtype: .*bfloat16.*, found 'int3'"),
        (lambda c: c["points"].update(decode=5), "its fields are not"),
        (lambda c: c["points"]["split"][1].pop("tokens"), "its fields are not .*tokens"),
        *(
            (lambda c, place=place, bad=bad: c["points"][place[0]][0].update({place[1]: bad}), place[1])
            for place, values in (
                (("decode", "batch_size"), (0, 1.5, None, True, "1")),
                (("decode", "sms"), (0,)),
                (("prefill", "cached_tokens"), (-1,)),
                (("split", "decode_sms"), (None,)),
                (("mixed", "ms"), (0.0, -1.0, True, "1")),
                (("prefill", "repeats_ms"), ([1.0, 0.0], [])),
                (("split", "prefill_ms"), (0.0,)),
                (("split", "decode_repeats_ms"), ([-1.0],)),
            )
            for bad in values
        ),
    ],
)
def test_bad_content_with_a_fitting_checksum(path: Path, edit: Change, message: str) -> None:
    change(path, edit)
    with pytest.raises(PerfTableError, match=message) as error:
        read_table(path)
    assert str(path) in str(error.value)
    assert "bullet-graph profile" in str(error.value)


@pytest.mark.parametrize("ms", [math.nan, math.inf, 0.0])
def test_no_table_is_made_of_a_bad_time(ms: float) -> None:
    with pytest.raises(ValueError, match="validation error for PerfTable"):
        PerfTable(H200_KEY, {ProfilePoint("decode", None, 1, 1): [(ms,)]}, {})


def test_a_table_of_these_conditions_matches() -> None:
    require_match(h200_table(), H200_KEY)
    # A checkpoint of the same shape takes the same time, whatever it is called, and whatever the driver.
    require_match(replace(h200_table(), provenance={"driver_version": "999"}), replace(H200_KEY, model="my-finetune"))


def test_every_difference_is_named() -> None:
    shape = {**H200_KEY.shape, "num_layers": 36, "hidden_size": 5120}
    kernels = {"torch": "2.12.0", "triton": "3.6.0", "flashinfer": "0.6.12"}
    key = replace(
        H200_KEY, gpu="NVIDIA H100", num_sms=114, model="other", shape=shape, dtype="float16", kernels=kernels
    )
    with pytest.raises(PerfTableError) as error:
        require_match(h200_table(), key)
    for text in (
        "gpu 'NVIDIA H100' required, 'NVIDIA H200' found",
        "num_sms 114 required, 132 found",
        "dtype 'float16' required, 'bfloat16' found",
        "model 'other' required, 'llama-3.1-8b' found",
        "hidden_size 5120 required, 4096 found; num_layers 36 required, 32 found",
        "kernels: bullet_graph_kernels None required, '1' found",
        "kernels: torch '2.12.0' required, '2.11.0' found",
        "bullet-graph profile",
    ):
        assert text in str(error.value)
    assert "triton" not in str(error.value)


def test_other_versions_are_told_and_other_gpus_refused() -> None:
    newer = replace(H200_KEY, kernels={**H200_KEY.kernels, "torch": "2.13.0"})
    with pytest.warns(PerfTableWarning, match=r"on NVIDIA H200 .* torch '2.13.0' required, '2.11.0' found"):
        require_match(h200_table(), newer, any_versions=True)
    with pytest.warns(PerfTableWarning), pytest.raises(PerfTableError, match=r"conditions: num_sms 78 required, 132"):
        require_match(h200_table(), replace(newer, num_sms=78), any_versions=True)


def test_one_table_serves_all_lengths_of_a_model_with_windows() -> None:
    windowed = replace(LLAMA_8B, layer_windows=(512, 4096) * 16)
    key = replace(H200_KEY, shape=shape_numbers(windowed))
    for length in (4097, 4096, 513, 512):
        expected = replace(key, shape=shape_numbers(without_wide_windows(windowed, length)))
        assert for_lengths(h200_table(key=key), length).key == expected
        assert own_table_file_name(expected) == own_table_file_name(key)


def test_tables_of_folders_with_one_name_have_files_of_their_own() -> None:
    keys = [replace(H200_KEY, model=f"/{name}/checkpoint", shape=shape_numbers(PRESETS[name])) for name in PRESETS]
    assert len({own_table_file_name(key) for key in keys}) == len({str(key.shape) for key in keys})
    assert re.fullmatch(r"h200_checkpoint-[0-9a-f]{8}_bfloat16\.json", own_table_file_name(keys[0]))


def test_shape_numbers_and_file_names() -> None:
    assert list(shape_numbers(LLAMA_8B).values()) == [128256, 4096, 14336, 32, 32, 8, 128, 0, 0]
    windowed = replace(LLAMA_8B, layer_windows=(512, None) * 16)
    assert shape_numbers(windowed) == shape_numbers(LLAMA_8B) | {"layers_of_window_512": 16}
    assert shape_numbers(PRESETS["qwen3-30b-a3b"]).keys() - shape_numbers(LLAMA_8B) == {
        *("num_experts", "experts_per_token", "expert_intermediate_size", "shared_expert_intermediate_size")
    }
    for gpu, short in (
        ("NVIDIA H200", "h200"),
        ("h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ):
        assert table_file_name(gpu, "/models/tiny", "float32") == f"{short}_tiny_float32.json"


def test_a_table_of_other_ranks_is_refused() -> None:
    moe, names = PRESETS["qwen3-30b-a3b"], []
    for ranks in ({}, {"num_ranks": 2}, {"num_ranks": 2, "expert_parallel": True}):
        of_rank = shard(moe, ranks.get("num_ranks", 1), 0, expert_parallel=ranks.get("expert_parallel", False))
        numbers = shape_numbers(of_rank)
        names.append(format_name("bfloat16", numbers))
        assert numbers.keys() - shape_numbers(moe).keys() == ranks.keys()
    assert names == ["bfloat16", "bfloat16-tp2", "bfloat16-ep2"]
    on_two = replace(H200_KEY, shape=shape_numbers(shard(PRESETS["llama-3.1-8b"], 2, 0)))
    with pytest.raises(PerfTableError, match="conditions: tensor_parallel_size 2 required, 1 found"):
        require_match(h200_table(), on_two)
    with pytest.raises(PerfTableError, match="expert_parallel True required, False found; tensor_parallel_size 2"):
        require_match(h200_table(), replace(H200_KEY, shape=numbers))


def test_tables_are_found_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "shipped_folder", lambda: tmp_path)
    with pytest.raises(PerfTableError, match="there: none"):
        load_table("h200", model="tiny", dtype="float32")
    path = tmp_path / "h200_llama-3.1-8b_bfloat16.json"
    write_table(h200_table(), path)
    (tmp_path / "plan.toml").touch()
    assert list_tables() == (path,)
    for gpu in ("NVIDIA H200", "h200"):
        assert load_table(gpu, model="llama-3.1-8b") == h200_table()
    assert load_table(path, model="whatever") == load_table(str(path), model="whatever") == h200_table()
    missing = r"h100_llama-3.1-8b_bfloat16.json is known .*\(there: h200_llama-3.1-8b_bfloat16.json\)"
    with pytest.raises(PerfTableError, match=missing):
        load_table("h100", model="llama-3.1-8b")


def test_an_installed_package_looks_inside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "bullet_graph"
    package.mkdir()
    monkeypatch.setattr(tables, "PACKAGE_FOLDER", package)
    assert tables.shipped_folder() == tmp_path / "capture"
    (package / "_capture").mkdir()
    assert tables.shipped_folder() == package / "_capture"


def test_every_shipped_table_can_be_read() -> None:
    for path in list_tables():
        table = read_table(path)
        dtype = format_name(table.key.dtype, table.key.shape)
        assert path.name == table_file_name(table.key.gpu, table.key.model, dtype)
        assert table.complete


# ---- arithmetic of bytes, experts, waves and times: by hand, near to an H200's measurements, and sound elsewhere ----

SMALL = PRESETS["qwen3-0.6b"]
COUNTED = replace(
    LLAMA_8B, vocab_size=100, hidden_size=8, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=5
)
"""Small enough to count by hand."""


def test_weight_bytes_by_hand() -> None:
    # A layer: qkv 8×40, o 20×8, gate, up and down 3×8×20, two norms of 8.
    layer = 320 + 160 + 480 + 16
    # The final norm, the output head and the two sequences' embedding rows.
    rest = 8 + 800 + 2 * 8
    assert decode_weight_bytes(COUNTED, batch_size=2, dtype_bytes=2) == 2 * (3 * layer + rest)

    for more, elements in (({"qkv_bias": True}, 3 * 40), ({"qk_norm": True}, 3 * 10)):
        counted = decode_weight_bytes(replace(COUNTED, **more), batch_size=2, dtype_bytes=2)
        assert counted == 2 * (3 * layer + rest + elements)


def test_step_bytes_by_hand() -> None:
    # Keys and values, 3 layers, 2 heads of 5, 4 bytes each.
    assert kv_cache_bytes_per_token(COUNTED, dtype_bytes=4) == 240
    weights = decode_weight_bytes(COUNTED, batch_size=7, dtype_bytes=4)
    # 50 tokens read and one written for each of the 7 sequences.
    assert decode_step_bytes(COUNTED, batch_size=7, context_tokens=50, dtype_bytes=4) == weights + 7 * 51 * 240
    # Two of three layers read 20 tokens: 30 on average.
    windowed = replace(COUNTED, layer_windows=(20, None, 20))
    assert decode_step_bytes(windowed, batch_size=7, context_tokens=50, dtype_bytes=4) == weights + 7 * 31 * 240


def test_a_windowed_row_takes_the_time_of_its_window() -> None:
    windowed = Roofline(H200, replace(LLAMA_8B, layer_windows=(512,) * 32))
    full = Roofline(H200, LLAMA_8B)
    assert windowed.decode(64, 64 * 300) == full.decode(64, 64 * 300)
    assert windowed.decode(64, 64 * 9000) == full.decode(64, 64 * 512)
    assert windowed.prefill(1024, 1024 * 9000.0) == full.prefill(1024, 1024 * 512.0)
    assert windowed.mixed(1024, 1024 * 400.0, 8, 8 * 9000) == full.mixed(1024, 1024 * 400.0, 8, 8 * 512)


def test_copy_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bullet_graph.perf.bandwidth._time_on_cpu_s", lambda *_: 1e-3)
    monkeypatch.setattr("bullet_graph.perf.bandwidth._NUM_BYTES", {"cpu": 1_000_000})
    assert measure_copy_gb_per_s("cpu") == pytest.approx(2.0)


MOE = PRESETS["qwen3-30b-a3b"]


def test_expert_bytes_by_hand() -> None:
    mixture = replace(COUNTED, num_experts=4, experts_per_token=2, expert_intermediate_size=3)
    # Attention and norms as above; the router 4×8; an expert's gate, up and down 3×8×3.
    layer, expert, rest = 320 + 160 + 16 + 32, 72, 8 + 800
    for rows, touched in ((0, 0), (1, 2), (2, 3), (1000, 4)):
        counted = decode_weight_bytes(mixture, batch_size=rows, dtype_bytes=2)
        assert counted == 2 * (3 * (layer + touched * expert) + rest + rows * 8)
    shared = replace(mixture, shared_expert_intermediate_size=5)
    # Its gate, up and down, and the gate of one column.
    more = decode_weight_bytes(shared, batch_size=1, dtype_bytes=2) - decode_weight_bytes(
        mixture, batch_size=1, dtype_bytes=2
    )
    assert more == 2 * 3 * (3 * 8 * 5 + 8)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256])
def test_touched_experts_as_drawn(rows: int) -> None:
    rng = random.Random(rows)
    draws = [len({e for _ in range(rows) for e in rng.sample(range(128), 8)}) for _ in range(300)]
    assert touched_experts(MOE, rows) == pytest.approx(statistics.mean(draws), rel=0.01)
    assert touched_experts(LLAMA_8B, rows) == 0


def test_times_of_experts() -> None:
    roofline = Roofline(H200, MOE)
    # One row reads 3.3e9 weights of 30.5e9 with its operations; 64 rows nearly all, within the time of a few rows more.
    one, many, more = (roofline.decode(rows, rows * 100).ms for rows in (1, 64, 128))
    assert one == pytest.approx(2 * 3.03e9 / 3600e6 + 48 * 0.01, rel=0.1)
    assert many == pytest.approx(2 * 30e9 / 3600e6 + 48 * 0.01, rel=0.1)
    assert more < 1.1 * many
    # A short chunk waits for the same weights as a long one.
    assert roofline.prefill(256, attention_pairs(256)).ms > 0.8 * roofline.prefill(1024, attention_pairs(1024)).ms
    assert roofline.wave_chunk_tokens(8192) > 4096
    assert 0 < wave_efficiency(8192, 132, MOE) <= 1


@pytest.mark.parametrize(
    ("rows", "columns", "sms", "waves"),
    [(1536, 6144, 96, 3), (1537, 6144, 96, 4), (1, 256, 132, 1), (128, 257, 1, 2), (2048, 6144, 132, 3)],
)
def test_num_waves_by_hand(rows: int, columns: int, sms: int, waves: int) -> None:
    assert num_waves(rows, columns, sms) == waves


@pytest.mark.parametrize("sms", [16, 80, 96, 104, 128])
def test_16_rows_an_sm_fill_every_wave_of_llama_8b(sms: int) -> None:
    assert wave_efficiency(16 * sms, sms, LLAMA_8B) == 1
    assert Roofline(H200, LLAMA_8B).wave_chunk_tokens(16 * sms + 60, sms) == 16 * sms
    # Of equally good chunks the largest is taken.
    assert Roofline(H200, LLAMA_8B).wave_chunk_tokens(48 * sms, sms) == 48 * sms
    # One row more opens another row of tiles, and so a wave that is nearly empty.
    assert wave_efficiency(16 * sms + 1, sms, LLAMA_8B) < 1


@given(st.integers(64, 4096), st.integers(1, 132), st.sampled_from([LLAMA_8B, SMALL]))
def test_no_other_chunk_has_a_higher_rate(max_tokens: int, sms: int, shape: ModelConfig) -> None:
    roofline = Roofline(H200, shape)
    best = roofline.wave_chunk_tokens(max_tokens, sms)
    assert best <= max_tokens
    assert best % 64 == 0
    assert 0 < wave_efficiency(best, sms, shape) <= 1
    rates = {tokens: tokens / roofline.prefill(tokens, 0, sms).ms for tokens in range(64, max_tokens + 1, 64)}
    assert rates[best] == max(rates.values())


@pytest.mark.parametrize("batch_size", [1, 8, 64, 256])
def test_decode_on_an_h200_within_15_percent(batch_size: int) -> None:
    predicted = ESTIMATE.decode(batch_size, batch_size * 1000)
    assert predicted.ms == pytest.approx(perf_tables.decode_ms(batch_size, 1000), rel=0.15)
    assert not predicted.measured


@pytest.mark.parametrize("decode_sms", [16, 32, 48, 64, 80, 96, 112])
def test_partitions_of_an_h200_within_30_percent(decode_sms: int) -> None:
    decode_ms, prefill_ms = perf_tables.split_ms(decode_sms, 64, 1000, 2048)
    both = ESTIMATE.split(decode_sms, 64, 64_000, 2048, attention_pairs(2048))
    assert both.decode_ms == pytest.approx(decode_ms, rel=0.3)
    assert both.prefill_ms == pytest.approx(prefill_ms, rel=0.3)
    assert not both.measured


def test_prefill_and_mixed_on_an_h200() -> None:
    pairs = attention_pairs(2048)
    assert ESTIMATE.prefill(2048, pairs).ms == pytest.approx(perf_tables.prefill_ms(2048), rel=0.1)
    assert ESTIMATE.mixed(2048, pairs, 64, 64_000).ms == pytest.approx(perf_tables.mixed_ms(2048, 64, 1000), rel=0.1)


@pytest.mark.parametrize("name", ["h200_llama-3.1-8b", "h200_qwen3-8b", "h100_llama-3.1-8b"])
def test_errors_on_the_points_of_measured_tables(name: str) -> None:
    table = read_table(next(path for path in list_tables() if path.name == f"{name}_bfloat16.json"))
    gpu = gpu_spec(table.key.gpu, table.key.num_sms)
    roofline = Roofline(gpu, PRESETS[table.key.model])
    errors: dict[str, list[float]] = {}
    for point, repeats in table.points.items():
        predicted_ms, is_measured = point.predicted(roofline)
        assert not is_measured
        for lane, (predicted, measured) in enumerate(zip(predicted_ms, median_ms(repeats), strict=True)):
            kind = f"split {lane}" if point.kind == "split" else point.kind if point.sms is None else "part"
            errors.setdefault(kind, []).append(abs(predicted / measured - 1))
    medians = {kind: statistics.median(of_kind) for kind, of_kind in errors.items()}
    assert max(medians["decode"], medians["prefill"], medians["mixed"]) < 0.07
    assert max(medians["part"], medians["split 0"], medians["split 1"]) < 0.2
    # Parts of a GPU that the rates were not fitted to may be further off.
    known = errors if gpu.is_measured else {kind: errors[kind] for kind in ("decode", "prefill", "mixed")}
    assert max(map(max, known.values())) < 0.25


def test_sizes_of_the_decode_lane_leave_prefill_16_sms_and_chunks_follow_the_waves() -> None:
    # Fewer rows than a step are a chunk as they are.
    chunks = {rows: Roofline(H200, LLAMA_8B).wave_chunk_tokens(rows, 96) for rows in (10, 63, 64, 2000)}
    assert chunks == {10: 10, 63: 63, 64: 64, 2000: 1536}
    assert tuple(Roofline(H200, LLAMA_8B).decode_sms) == (16, 32, 48, 64, 80, 96, 112)
    assert Roofline(GENERIC, SMALL).decode_sms == (16, 32, 48)
    assert Roofline(gpu_spec("Small GPU", 20), SMALL).decode_sms == ()


def test_a_gpu_without_measurements_reaches_the_h200_s_shares_of_its_data_sheet() -> None:
    weights_ms = {gpu.name: Roofline(gpu, LLAMA_8B).decode(1, 1).ms for gpu in KNOWN_GPUS.values()}
    order = ["NVIDIA B200", "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "generic", "NVIDIA L40S"]
    assert sorted(weights_ms, key=weights_ms.__getitem__) == order
    a100 = KNOWN_GPUS["NVIDIA A100-SXM4-80GB"]
    assert a100.fp8_tflops == a100.tflops == pytest.approx(0.672 * 312, rel=1e-3)
    assert KNOWN_GPUS["NVIDIA B200"].fp8_tflops == pytest.approx(0.6215 * 4500, rel=1e-3)


def test_a_known_gpu_is_found_by_name_and_says_whether_it_was_measured() -> None:
    assert gpu_spec("NVIDIA H200", 132) is H200
    assert H200.is_measured
    assert gpu_spec("NVIDIA H100 80GB HBM3", 132) is H100
    assert not H100.is_measured
    for name, known in (("NVIDIA H200", H200), ("Some GPU", GENERIC)):
        spec = gpu_spec(name, 60)
        assert (spec.name, spec.num_sms, spec.tflops, spec.is_measured) == (name, 60, known.tflops, False)


@given(
    st.integers(1, 512),
    st.integers(1, 100_000),
    st.integers(1, 16384),
    st.integers(0, 32768),
    st.integers(2, 130),
    st.sampled_from([LLAMA_8B, MOE]),
)
def test_more_work_never_takes_less_time(
    batch_size: int, kv: int, tokens: int, cached: int, sms: int, shape: ModelConfig
) -> None:
    model = Roofline(H200, shape)
    pairs, more_pairs = attention_pairs(tokens, cached), attention_pairs(tokens + 1, cached)
    assert model.decode(batch_size, kv, sms).ms <= model.decode(batch_size, kv + 1, sms).ms
    assert model.decode(batch_size, kv, sms).ms <= model.decode(batch_size + 1, kv, sms).ms
    # Within a wave the products cost the same however many rows they have: equal but for rounding.
    almost = 1 + 1e-9
    assert model.prefill(tokens, pairs, sms).ms <= model.prefill(tokens + 1, more_pairs, sms).ms * almost
    assert math.isfinite(model.prefill(tokens, pairs, sms).ms)
    assert model.prefill(tokens, pairs).ms <= model.mixed(tokens, pairs, batch_size, kv).ms * almost
    assert model.decode(batch_size, kv).ms < model.decode(batch_size, kv, sms).ms


@pytest.mark.parametrize(("ranks", "sent"), [(2, 1.0), (4, 1.5)])
def test_two_sums_a_layer_over_ranks_take_their_time(ranks: int, sent: float) -> None:
    share = shard(PRESETS["llama-3.1-70b"], ranks, 0)
    free = replace(H200, rank_sum_ms=0.0, link_gb_s=math.inf)
    for rows in (1, 2048):
        each_ms = 0.006 + sent * rows * 8192 * 2 / 250e6
        decode = [Roofline(spec, share).decode(rows, 1000).ms for spec in (H200, free)]
        prefill = [Roofline(spec, share).prefill(rows, 1000).ms for spec in (H200, free)]
        assert decode[0] - decode[1] == pytest.approx(160 * each_ms)
        assert prefill[0] - prefill[1] == pytest.approx(160 * each_ms)
    whole = PRESETS["llama-3.1-70b"]
    assert Roofline(H200, whole).decode(8, 1000) == Roofline(free, whole).decode(8, 1000)


def test_one_slow_repeat_does_not_move_a_point() -> None:
    assert median_ms([(1.0, 5.0), (90.0, 4.0), (2.0, 4.5)]) == (2.0, 4.5)
