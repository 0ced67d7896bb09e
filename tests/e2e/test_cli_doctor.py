"""``bullet-graph doctor``: on this machine, on machines made up, and calibration with made-up children."""

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_runner import printed, refused, run
from fakes.machines import DRIVER, complete_machine

from bullet_graph.cli import doctor
from bullet_graph.errors import PartitionError
from bullet_graph.partition import calibrate as calibrate_module
from bullet_graph.partition.calibrate import Outcome, Verdict
from bullet_graph.partition.offsets import DriverId, remembered
from bullet_graph.partition.smctrl import identify_driver
from bullet_graph.runtime.machine import Machine


def has_driver() -> bool:
    try:
        identify_driver()
    except PartitionError:
        return False
    return True


without_gpu = pytest.mark.skipif(torch.cuda.is_available() or has_driver(), reason="needs a machine without a GPU")


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folders are left alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "bullet_graph" / "partition_offsets.json"


def page(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    result = run("doctor", "--json", *arguments)
    assert (result.exit_code, result.stderr) == (exit_code, ""), result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    assert parsed["works"] == (exit_code == 0)
    return parsed


def line(page: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (finding for finding in page["findings"] if finding["name"] == name)
    return dict(found)


# ---- this machine ----


@without_gpu
def test_a_machine_without_a_gpu() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "The engine can run as asked, on the CPU." in result.stdout
    assert result.stderr == ""
    found = page()
    assert found["device"] == "cpu"
    assert {finding["level"] for finding in found["findings"]} == {"green"}
    assert line(found, "GPU")["found"] == "no NVIDIA GPU: the engine runs on the CPU"
    assert line(found, "GPU")["found"] in result.stdout
    assert found["machine"]["gpu"] is None
    assert found["machine"]["provenance"]["versions"]["torch"] == version("torch")


def test_the_memory_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = page("--device", "cpu", "--model", "tiny")
    assert "weights" in line(found, "tiny")["found"]
    assert found["machine"]["ledger"]["kv_cache_bytes"] > 0
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=10**6, available=10**6))
    assert "short by" in line(page("--device", "cpu", "--model", "tiny", exit_code=1), "tiny")["advice"]


# ---- machines made up ----


def look_as_if(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_around(_: object) -> Machine:
        print("a library greets")
        return machine

    monkeypatch.setattr(doctor, "look_around", look_around)


def test_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    look_as_if(complete_machine(), monkeypatch)
    result = run("doctor")
    assert result.exit_code == 0
    assert "580.159.04" in result.stdout
    assert "on the GPU" in result.stdout
    assert "→" not in result.stdout
    as_json = run("doctor", "--json")
    assert as_json.stderr == "a library greets\n"
    assert json.loads(as_json.stdout)["machine"]["gpu"]["num_tpcs"] == 66
    look_as_if(complete_machine(cuda_python=None), monkeypatch)
    result = run("doctor")
    assert result.exit_code == 1
    assert "→ pip install 'bullet-graph[cuda]'" in result.stdout
    assert "cannot run as asked" in result.stdout


# ---- calibration ----


def offsets_act(monkeypatch: pytest.MonkeyPatch, *acting: int, driver: DriverId = DRIVER) -> None:
    def child(offset: int, seeds: tuple[int, ...]) -> Outcome:
        return Outcome(Verdict.HONOURED if not seeds or offset in acting else Verdict.NO_EFFECT)

    monkeypatch.setattr(calibrate_module, "run_child", child)
    monkeypatch.setattr(calibrate_module, "identify_driver", lambda: driver)


UNKNOWN = dataclasses.replace(DRIVER, cuda_version=13990)
LINE = '(13990, "x86_64"): 0x600,  # calibrated on 580.159.04'


def test_a_calibration_is_remembered_and_can_be_contributed(own_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets_act(monkeypatch, 0x600, driver=UNKNOWN)
    result = run("doctor", "--calibrate")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for words in ("580.159.04 keeps stream masks at offset 0x600: proven", str(own_caches), "To contribute it"):
        assert words in result.stdout
    assert result.stdout.endswith(f"{LINE}\n")
    assert remembered(UNKNOWN) == 0x600
    found = printed(run("doctor", "--calibrate", "--json"))
    assert found.pop("seconds") >= 0
    told = {"offset": 0x600, "table_line": LINE, "remembered_in": str(own_caches)}
    assert found == {"driver": dataclasses.asdict(UNKNOWN)} | told | {"tries": 385, "crashed": 0, "timed_out": 0}


def test_a_calibration_shows_its_progress_and_may_confirm_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = doctor.progress_bar
    monkeypatch.setattr(doctor, "progress_bar", lambda _, **settings: bar(True, **settings))
    offsets_act(monkeypatch, 0x51C)
    result = run("doctor", "--calibrate")
    assert "knows it already" in result.stdout
    assert "385/385" in result.stderr
    assert "385/385" not in result.stdout


def test_a_calibration_that_cannot_be_remembered(own_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_caches.parent.write_text("a file in the folder's place")
    offsets_act(monkeypatch, 0x600)
    assert str(own_caches) in refused(run("doctor", "--calibrate"))


@without_gpu
def test_a_calibration_without_a_driver() -> None:
    message = refused(run("doctor", "--calibrate"))
    assert message.startswith("error: ")
    assert "no driver" in message
    assert message.count("\n") == 1
