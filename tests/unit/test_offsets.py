"""The table of known offsets, and the file of those proven on this machine."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.errors import PartitionError
from bullet_graph.partition.calibrate import CANDIDATES
from bullet_graph.partition.offsets import KNOWN_OFFSETS, DriverId, cache_file, lookup, remember, remembered

DRIVER = DriverId(13000, "580.159.04", "x86_64")
KNOWN = 0x51C
ENTRY = asdict(DRIVER) | {"offset": KNOWN}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "partition_offsets.json"


def test_the_table() -> None:
    for cuda_version, machine, offset in (
        *((12000, "x86_64", 0x4CC), (12040, "x86_64", 0x4AC), (13000, "x86_64", KNOWN)),
        *((13010, "x86_64", None), (13000, "aarch64", None)),
    ):
        assert lookup(DriverId(cuda_version, "any", machine)) == offset
    assert set(KNOWN_OFFSETS.values()) <= set(CANDIDATES), "a calibration could find them"


def test_an_offset_is_remembered_for_exactly_its_driver(path: Path) -> None:
    assert remembered(DRIVER, path) is None
    remember(DRIVER, 0x600, path)
    assert remember(DRIVER, KNOWN, path) == path
    assert remembered(DRIVER, path) == KNOWN, "a newer calibration replaces the older"
    for change in ({"cuda_version": 13010}, {"release": "580.159.05"}, {"machine": "aarch64"}):
        assert remembered(replace(DRIVER, **change), path) is None  # type: ignore[arg-type]
    assert os.listdir(path.parent) == [path.name]


@given(
    entries=st.dictionaries(
        st.builds(DriverId, st.integers(11000, 99990), st.text(max_size=9), st.text(max_size=9)),
        st.integers(0, 1000).map(lambda words: 4 * words),
        max_size=4,
    )
)
def test_every_driver_has_its_own_entry(tmp_path_factory: pytest.TempPathFactory, entries: dict[DriverId, int]) -> None:
    path = tmp_path_factory.mktemp("cache") / "offsets.json"
    for driver, known in entries.items():
        remember(driver, known, path)
    assert {driver: remembered(driver, path) for driver in entries} == entries
    assert remembered(DriverId(1, "none", "none"), path) is None


def test_the_file_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "bullet_graph" / "partition_offsets.json"
    assert remember(DRIVER, KNOWN) == cache_file()
    assert remembered(DRIVER) == KNOWN


WRONG_FIELDS = [{"cuda_version": "13000"}, {"release": 580}, {"machine": None}]
WRONG_FIELDS += [{"offset": offset} for offset in ("0x51c", 1308.0, True, 0x51D, -4)]


@pytest.mark.parametrize(
    "text",
    [
        *("", b"\xff\xfe\x00", '[{"cuda_ver', "{}", "null", "[5]"),
        *(json.dumps([{k: v for k, v in ENTRY.items() if k != name}]) for name in ENTRY),
        *(json.dumps([ENTRY | wrong]) for wrong in WRONG_FIELDS),
    ],
)
def test_a_corrupt_file_is_never_trusted(path: Path, text: str | bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    for access in (lambda: remembered(DRIVER, path), lambda: remember(DRIVER, KNOWN, path)):
        with pytest.raises(PartitionError, match="delete it and run `bullet-graph doctor --calibrate`") as error:
            access()
        assert str(path) in str(error.value)
    assert path.read_bytes() == before


def test_files_of_earlier_releases_have_a_layout(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps([ENTRY | {"layout": 128}]), encoding="utf-8")
    assert remembered(DRIVER, path) == KNOWN


def test_files_that_cannot_be_read_or_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(parents=True)
    with pytest.raises(PartitionError, match="cannot be used"):
        remembered(DRIVER, path)
    path.rmdir()
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(PartitionError, match=rf"{path}.*No space left.*make the folder writable"):
        remember(DRIVER, KNOWN, path)
    assert os.listdir(path.parent) == []
