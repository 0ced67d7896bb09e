"""``bullet-graph bench sweep``, end to end on the CPU: what it finds, what it writes, and going on after Ctrl-C."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runner import TINY, refused, run
from click.testing import Result

import bullet_graph.cli.bench.sweep as sweep_module
from bullet_graph.cli.bench.sweep_runner import Sweep
from bullet_graph.cli.tables import ReplayRun
from bullet_graph.workloads import Arrivals, Workload

POLICIES = ("serial", "mixed:64")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where two short traces are."""
    for name, prompt in (("short", 8), ("long", 40)):
        row = {"timestamp": 0, "input_length": prompt, "output_length": 3}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    return tmp_path


def sweep(folder: Path, *arguments: str, slo: str = "ttft:60000 tpot:60000", output: str = "sweep.json") -> Result:
    workloads = ("--workload", f"{folder / 'short.jsonl'}", "--workload", f"{folder / 'long.jsonl'}=3~200")
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    return run(
        *("bench", "sweep", *TINY, *workloads, *policies, "--max-num-seqs", "4", "--num-warmups", "1"),
        *(*(("--slo", slo) if slo else ()), "--first-rate", "100", "--max-runs", "3", "--step", "2"),
        *("--smoke", "--output-json", str(folder / output), *arguments),
    )


def rates(path: Path) -> list[tuple[str, str, float | None, list[float]]]:
    return [
        (cell.system, cell.workload, cell.goodput_90, [run["request_rate"] for run in cell.runs])
        for cell in Sweep.read(path).cells
    ]


class Served:
    """Counts the runs, and interrupts one of them as Ctrl-C does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[str, str, float | None]] = []
        self.interrupt_at: int | None = None
        real = sweep_module.measure

        def counted(client: Any, workload: Workload, arrivals: Arrivals, **others: Any) -> ReplayRun:
            if len(self.runs) == self.interrupt_at:
                raise KeyboardInterrupt
            measured = real(client, workload, arrivals, **others)
            self.runs.append((measured.usage["policy"], workload.name, arrivals.request_rate))
            return measured

        monkeypatch.setattr(sweep_module, "measure", counted)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def test_a_sweep_serves_every_cell_in_turn(folder: Path, served: Served) -> None:
    result = sweep(folder, "--plot-dir", str(folder / "plots"))
    assert result.exit_code == 0, result.output
    path = folder / "sweep.json"
    # Every run serves enough, so the rates double.
    assert rates(path) == [
        (f"bullet_graph {policy}", workload, 4 * first, [first, 2 * first, 4 * first])
        for workload, first in (("short.jsonl", 100), ("long.jsonl", 200))
        for policy in POLICIES
    ]
    first_round = [(policy, w) for w in ("short.jsonl", "long.jsonl") for policy in POLICIES]
    assert [(policy, workload) for policy, workload, _ in served.runs] == 3 * first_round
    found = Sweep.read(path)
    assert (found.finished, found.settings["device_name"]) == (True, "cpu")
    best = found.cells[0].runs[-1]
    assert (best["sustained"], best["stable"], best["counted"]) == (False, True, 4)
    assert (found.cells[0].goodput_99, found.cells[0].sustained) == (400, False)
    assert "Not sustained: runs of less than 120 s" in " ".join(result.stdout.split())
    assert (best["completed"], best["slo_attainment"], best["policy"]) == (4, 1.0, "serial")
    assert best["slo"] == "ttft:60000ms tpot:60000ms"
    assert "mixed:64" in result.stdout
    assert "≥ 400.00" in result.stdout, "the search ended before a rate was too high"
    assert len(list((folder / "plots").iterdir())) == 3
    assert "finished" in refused(sweep(folder))
    assert "--plot-dir" in refused(sweep(folder, "--plot-dir", str(folder / "plots"), output="other.json"))
    assert len(served.runs) == 12


def test_an_interrupted_sweep_goes_on(folder: Path, served: Served) -> None:
    assert sweep(folder, "--json", output="whole.json").exit_code == 0
    whole, served.runs = served.runs, []
    path = folder / "sweep.json"
    served.interrupt_at = 5
    result = sweep(folder)
    assert result.exit_code == 130
    assert "has all runs so far (5); the same command resumes it" in result.stderr
    assert (Sweep.read(path).num_runs, Sweep.read(path).finished) == (5, False)
    assert "tolerance is 0.05 there and 0.5 here" in refused(sweep(folder, "--tolerance", "0.5"))
    served.interrupt_at = None
    result = sweep(folder, "--json", "--overwrite")
    assert result.exit_code == 0, result.output
    assert served.runs == whole, "no run is repeated, none is left out"
    assert rates(path) == rates(folder / "whole.json")
    assert json.loads(result.stdout) == json.loads(path.read_text())


def test_pictures_need_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'bullet-graph[bench]'" in refused(sweep(folder, "--plot-dir", str(folder / "plots")))
