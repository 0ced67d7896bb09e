"""The file of a goodput sweep: whole after every run, gone on with only by the same sweep."""

import json
from pathlib import Path
from typing import Any

import pytest

from bullet_graph.cli.bench.sweep_file import CellKey, SweepCell, SweepFile, read_sweep
from bullet_graph.cli.result_file import command_line
from bullet_graph.errors import ConfigError

SETTINGS = {"model": "tiny", "policies": ("auto", "mixed"), "attainment": 0.9, "engine": {"max_num_seqs": 8}}
PROVENANCE = {"date_utc": "2026-03-04T05:06:07+00:00", "git_commit": "abc"}
AUTO = CellKey("bullet_graph auto", "azure:conv", 20, "ttft:500ms")
MIXED = CellKey("bullet_graph mixed", "azure:conv", 20, "ttft:500ms")


def run_at(rate: float, attainment: float = 1.0) -> dict[str, Any]:
    return {"request_rate": rate, "slo_attainment": attainment, "median_ttft_ms": None}


def open_sweep(path: Path, *, overwrite: bool = False, **changes: Any) -> SweepFile:
    return SweepFile.open(path, settings=SETTINGS | changes, provenance=PROVENANCE, overwrite=overwrite)


def test_the_file_as_others_read_it(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    file = open_sweep(path)
    assert not path.exists(), "nothing was run"
    file.add_run(AUTO, run_at(8))
    file.add_run(MIXED, run_at(8, 0.5))
    file.add_run(AUTO, run_at(16, 0.2))
    file.finish_cell(AUTO, 8)
    cell = {"workload": "azure:conv", "num_prompts": 20, "slo": "ttft:500ms"}
    expected = {
        "format": 1,
        "kind": "goodput sweep",
        "finished": False,
        "argv": command_line(),
        "settings": SETTINGS | {"policies": ["auto", "mixed"]},
        "provenance": PROVENANCE,
        "continued": [],
        "cells": [
            {
                "system": "bullet_graph auto",
                **cell,
                "goodput": 8,
                "finished": True,
                "runs": [run_at(8), run_at(16, 0.2)],
            },
            {
                "system": "bullet_graph mixed",
                **cell,
                "goodput": None,
                "finished": False,
                "runs": [run_at(8, 0.5)],
            },
        ],
    }
    assert json.loads(path.read_text()) == expected
    file.finish_cell(MIXED, None)
    file.finish()
    finished = json.loads(path.read_text())
    assert (finished["finished"], finished["cells"][1]["finished"]) == (True, True)
    assert read_sweep(path) == file.sweep
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_every_run_is_there_at_once_and_the_same_sweep_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    for number in range(4):
        file = open_sweep(path, overwrite=number % 2 == 1)
        assert file.cell(AUTO).runs == tuple(run_at(2**i) for i in range(number))
        file.add_run(AUTO, run_at(2**number))
    file.finish_cell(AUTO, 8)
    assert open_sweep(path).cell(AUTO).best == run_at(8)
    assert open_sweep(path).cell(MIXED).runs == ()


def test_the_machine_and_code_of_each_start_are_told(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    open_sweep(path).add_run(AUTO, run_at(1))
    later = PROVENANCE | {"date_utc": "2026-03-05T00:00:00+00:00"}
    other = later | {"git_commit": "def"}
    for rate, provenance in enumerate((later, other, other), start=2):
        file = SweepFile.open(path, settings=SETTINGS, provenance=provenance, overwrite=False)
        file.add_run(AUTO, run_at(rate))
    sweep = read_sweep(path)
    assert sweep.provenance == PROVENANCE
    assert sweep.continued == (other,)


def test_another_sweep_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    open_sweep(path).add_run(AUTO, run_at(1))
    with pytest.raises(ConfigError, match="other settings: model is 'tiny' there and 'large' here; add"):
        open_sweep(path, model="large")
    with pytest.raises(ConfigError, match=r"engine\.max_num_seqs is 8 there and 9 here"):
        open_sweep(path, engine={"max_num_seqs": 9})
    with pytest.raises(ConfigError, match="and 2 more"):
        open_sweep(path, **dict.fromkeys("abcdefg", 1))
    before = path.read_bytes()
    file = open_sweep(path, model="large", overwrite=True)
    assert path.read_bytes() == before, "kept until there is something to put in its place"
    assert file.cell(AUTO).runs == ()
    file.add_run(AUTO, run_at(5))
    assert [cell.runs for cell in read_sweep(path).cells] == [(run_at(5),)]


def test_a_finished_sweep_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    file = open_sweep(path)
    file.add_run(AUTO, run_at(1))
    file.finish_cell(AUTO, 1)
    file.finish()
    with pytest.raises(ConfigError, match="finished; add --overwrite or give another name"):
        open_sweep(path)
    assert open_sweep(path, overwrite=True).cell(AUTO).runs == ()


def damaged(**changes: Any) -> str:
    run = {"request_rate": 1, "slo_attainment": 1}
    cell = {"system": "s", "workload": "w", "num_prompts": 1, "slo": "x", "goodput": 1, "finished": True}
    whole = {"format": 1, "kind": "goodput sweep", "finished": False, "settings": {}, "provenance": {}}
    return json.dumps(whole | {"continued": [], "cells": [cell | {"runs": [run | changes]}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{half a fi", "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("[]", "no sweep's file"),
        ('{"results": []}', "no sweep's file: it must have kind 'goodput sweep' and format 1, got None"),
        ('{"kind": "goodput sweep", "format": 2}', "got 'goodput sweep' and 2"),
        ('{"kind": "goodput sweep", "format": 1}', "damaged sweep's file: KeyError: 'settings'"),
        (damaged(request_rate="inf"), "request_rate of a run must be a number, got 'inf'"),
        (damaged(slo_attainment=None), "slo_attainment of a run must be a number"),
    ],
)
def test_a_file_that_is_something_else_is_kept(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_sweep(path)
    assert path.read_text() == text
    open_sweep(path, overwrite=True).add_run(AUTO, run_at(1))
    assert read_sweep(path).cells == (SweepCell(AUTO, runs=(run_at(1),)),)


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make it first"):
        open_sweep(tmp_path / "missing" / "sweep.json")
    with pytest.raises(ConfigError, match="this is a folder"):
        open_sweep(tmp_path, overwrite=True)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        open_sweep(tmp_path / "bytes")


def test_a_figure_that_json_has_no_number_for_is_a_bug(tmp_path: Path) -> None:
    file = open_sweep(tmp_path / "sweep.json")
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.add_run(AUTO, run_at(float("inf")))
    assert file.cell(AUTO).runs == ()
