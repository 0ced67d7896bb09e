"""Performance tables: their numbers, their file, what they hold for, and where they are found."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.perf_tables import H200_KEY, LLAMA_8B, h200_table, interrupted_table

from bullet_graph.errors import PerfTableError, PerfTableWarning
from bullet_graph.models.config import without_wide_windows
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.sharding import shard
from bullet_graph.perf import table as tables
from bullet_graph.perf.table import (
    PerfTable,
    ProfilePoint,
    _checksum,
    for_lengths,
    format_name,
    list_tables,
    load_table,
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
    lanes = {"decode_ms": 2.0, "prefill_ms": 20.0}
    lanes |= {"decode_repeats_ms": [1.0, 3.0, 2.0], "prefill_repeats_ms": [20.0] * 3}
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
    other_driver = replace(h200_table(), provenance={"driver_version": "999"})
    require_match(other_driver, replace(H200_KEY, model="my-finetune"))


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
    mixture = shape_numbers(PRESETS["qwen3-30b-a3b"])
    assert mixture.keys() - shape_numbers(LLAMA_8B) == {
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
    by_expert = replace(H200_KEY, shape=numbers)
    with pytest.raises(PerfTableError, match="expert_parallel True required, False found; tensor_parallel_size 2"):
        require_match(h200_table(), by_expert)


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
    monkeypatch.setattr(tables, "_PACKAGE_FOLDER", package)
    assert tables.shipped_folder() == tmp_path / "capture"
    (package / "_capture").mkdir()
    assert tables.shipped_folder() == package / "_capture"


def test_every_shipped_table_can_be_read() -> None:
    for path in list_tables():
        table = read_table(path)
        dtype = format_name(table.key.dtype, table.key.shape)
        assert path.name == table_file_name(table.key.gpu, table.key.model, dtype)
        assert table.complete
