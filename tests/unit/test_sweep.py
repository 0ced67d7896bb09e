"""A goodput sweep: what it compares, from what a user types; its file; its rounds; and its pictures."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from bullet_graph.cli.bench.sweep_runner import (
    Cell,
    CellKey,
    Sweep,
    SweepCell,
    SweepRunner,
    Task,
    WorkloadSpec,
    make_cells,
)
from bullet_graph.cli.plots import _bar_label, draw_sweep
from bullet_graph.cli.result_file import command_line
from bullet_graph.config import Policy
from bullet_graph.errors import ConfigError
from bullet_graph.perf.goodput_search import GoodputSearch
from bullet_graph.slo import Slo
from bullet_graph.workloads import Workload, WorkloadRequest

SETTINGS = {"model": "tiny", "policies": ("auto", "mixed"), "attainment": 0.9, "engine": {"max_num_seqs": 8}}
PROVENANCE = {"date_utc": "2026-03-04T05:06:07+00:00", "git_commit": "abc"}
TASK = Task("azure:conv", 20, "ttft:500ms")
AUTO, MIXED = CellKey("bullet_graph auto", TASK), CellKey("bullet_graph mixed", TASK)


def run_at(rate: Any, attainment: Any = 1.0, **changes: Any) -> dict[str, Any]:
    return {"request_rate": rate, "slo_attainment": attainment, "median_ttft_ms": None} | changes


def open_sweep(path: Path, *, overwrite: bool = False, **changes: Any) -> Sweep:
    return Sweep.open(path, settings=SETTINGS | changes, provenance=PROVENANCE, overwrite=overwrite)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sweep.json"


# ---- the file ----


def test_the_file_as_others_read_it(path: Path) -> None:
    sweep = open_sweep(path)
    assert not path.exists(), "nothing was run"
    sweep.add_run(AUTO, run_at(8))
    sweep.add_run(MIXED, run_at(8, 0.5))
    sweep.add_run(AUTO, run_at(16, 0.2))
    sweep.finish_cell(AUTO, 8)
    task = {"workload": "azure:conv", "num_prompts": 20, "slo": "ttft:500ms"}
    auto = {"goodput": 8, "finished": True, "runs": [run_at(8), run_at(16, 0.2)]}
    mixed = {"goodput": None, "finished": False, "runs": [run_at(8, 0.5)]}
    assert json.loads(path.read_text()) == {
        "format": 1,
        "kind": "goodput sweep",
        "finished": False,
        "argv": command_line(),
        "settings": SETTINGS | {"policies": ["auto", "mixed"]},
        "provenance": PROVENANCE,
        "continued": [],
        "cells": [
            {"system": "bullet_graph auto", **task, **auto},
            {"system": "bullet_graph mixed", **task, **mixed},
        ],
    }
    sweep.finish_cell(MIXED, None)
    sweep.finish()
    finished = json.loads(path.read_text())
    assert (finished["finished"], finished["cells"][1]["finished"]) == (True, True)
    assert Sweep.read(path).fields() == sweep.fields()
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"
    with pytest.raises(ConfigError, match="finished; add --overwrite or give another name"):
        open_sweep(path)
    assert open_sweep(path, overwrite=True).cell(AUTO).runs == ()


def test_every_run_is_there_at_once_and_the_same_sweep_goes_on(path: Path) -> None:
    for number in range(4):
        sweep = open_sweep(path, overwrite=number % 2 == 1)
        assert sweep.cell(AUTO).runs == tuple(run_at(2**i) for i in range(number))
        sweep.add_run(AUTO, run_at(2**number))
    with pytest.raises(ValueError, match="not JSON compliant"):
        sweep.add_run(AUTO, run_at(float("inf")))
    sweep.finish_cell(AUTO, 8)
    assert len(open_sweep(path).cell(AUTO).runs) == 4
    assert open_sweep(path).cell(AUTO).best == run_at(8)
    assert open_sweep(path).cell(MIXED).runs == ()


def test_the_machine_and_code_of_each_start_are_told(path: Path) -> None:
    open_sweep(path).add_run(AUTO, run_at(1))
    later = PROVENANCE | {"date_utc": "2026-03-05T00:00:00+00:00"}
    other = later | {"git_commit": "def"}
    for rate, provenance in enumerate((later, other, other), start=2):
        sweep = Sweep.open(path, settings=SETTINGS, provenance=provenance, overwrite=False)
        sweep.add_run(AUTO, run_at(rate))
    sweep = Sweep.read(path)
    assert (sweep.provenance, sweep.continued) == (PROVENANCE, [other])


def test_another_sweep_is_not_gone_on_with(path: Path) -> None:
    open_sweep(path).add_run(AUTO, run_at(1))
    with pytest.raises(ConfigError, match="other settings: model is 'tiny' there and 'large' here; add"):
        open_sweep(path, model="large")
    with pytest.raises(ConfigError, match=r"engine\.max_num_seqs is 8 there and 9 here"):
        open_sweep(path, engine={"max_num_seqs": 9})
    with pytest.raises(ConfigError, match="and 2 more"):
        open_sweep(path, **dict.fromkeys("abcdefg", 1))
    before = path.read_bytes()
    sweep = open_sweep(path, model="large", overwrite=True)
    assert path.read_bytes() == before, "kept until there is something to put in its place"
    assert sweep.cell(AUTO).runs == ()
    sweep.add_run(AUTO, run_at(5))
    assert [cell.runs for cell in Sweep.read(path).cells] == [(run_at(5),)]


def damaged(*runs: Any, **changes: Any) -> bytes:
    sweep = Sweep(settings={}, provenance={}, cells=[SweepCell(system="s", **TASK._asdict())])
    fields = json.loads(json.dumps(sweep.fields()))
    fields["cells"][0]["runs"] = runs
    return json.dumps(fields | changes).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{half a fi", "is no sweep's file of format 1, or it is damaged: .*Invalid JSON"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (b'{"results": []}', "settings: Field required"),
        (damaged(format=2), "format: Input should be 1, found 2"),
        (damaged(run_at("inf")), "request_rate of a run must be a number, got 'inf'"),
        (damaged(run_at(1, None)), "slo_attainment of a run must be a number"),
    ],
)
def test_a_file_that_is_something_else_is_kept(content: bytes, message: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_sweep(path)
    assert path.read_bytes() == content
    open_sweep(path, overwrite=True).add_run(AUTO, run_at(1))
    assert [(cell.key, cell.runs) for cell in Sweep.read(path).cells] == [(AUTO, (run_at(1),))]


# ---- the cells ----

LOOSE, TIGHT = Slo(ttft_ms=500, tpot_ms=15), Slo(ttft_ms=500, tpot_ms=8)
POLICIES = (Policy("mixed", 2048), Policy("auto"))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("conv", WorkloadSpec("azure:conv")),
        ("code=400", WorkloadSpec("azure:code", 400)),
        ("longdoc~0.5", WorkloadSpec("synthetic:longdoc", None, 0.5)),
        ("azure:code=400~10@ttft:500 tpot:8", WorkloadSpec("azure:code", 400, 10, TIGHT)),
        ("code@ttft:500ms,tpot:8", WorkloadSpec("azure:code", slo=TIGHT)),
        ("traces/mine.jsonl=5", WorkloadSpec("traces/mine.jsonl", 5)),
        ("~/mine.csv", WorkloadSpec("~/mine.csv")),
    ],
)
def test_a_workload_is_read(text: str, spec: WorkloadSpec) -> None:
    assert WorkloadSpec.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write NAME"),
        ("conv=0", "'0' is no number of prompts"),
        ("conv=", "'' is no number of prompts"),
        ("conv~0", "'0' is no rate above 0"),
        ("conv=5~", "'' is no rate above 0"),
        ("conv@", "a goodput needs targets"),
        ("conv@500", "'500' is no latency target"),
        ("conv@ttft:500@tpot:8", "write NAME"),
    ],
)
def test_a_workload_in_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadSpec.parse(text)


def load(spec: WorkloadSpec) -> Workload:
    request = WorkloadRequest(len(spec.name), 1, arrival_s=None)
    return Workload(spec.name.rpartition("/")[2], (request,) * (spec.num_prompts or 3))


def cells_of(*texts: str, slos: tuple[Slo, ...] = (LOOSE,)) -> list[Cell[Policy]]:
    return make_cells(
        [WorkloadSpec.parse(text) for text in texts],
        slos,
        {f"bullet_graph {policy}": policy for policy in POLICIES},
        first_rate=8,
        load=load,
        new_rates=lambda rate: GoodputSearch(first_rate=rate, max_runs=3),
    )


def test_cells_are_workloads_times_targets_times_policies() -> None:
    cells = cells_of("conv=5~24", "code@ttft:500 tpot:8", slos=(LOOSE, TIGHT))
    assert [(str(cell), cell.key.system) for cell in cells] == [
        (f"{workload}@ttft:500ms tpot:{tpot}ms", f"bullet_graph {policy}")
        for workload, tpot in (("azure:conv=5~24", 15), ("azure:conv=5~24", 8), ("azure:code=3~8", 8))
        for policy in ("mixed:2048", "auto")
    ]
    # What stands for a cell can be given again.
    assert {WorkloadSpec.parse(str(cell)).slo for cell in cells} == {LOOSE, TIGHT}


def test_a_cell_comes_once_and_two_cannot_have_one_name() -> None:
    assert cells_of("conv", "conv", "azure:conv@ttft:500 tpot:15") == cells_of("conv")
    with pytest.raises(ConfigError, match=r"two different ones are both called mine\.csv with 3 requests"):
        cells_of("a/mine.csv", "there/mine.csv")
    with pytest.raises(ConfigError, match="two different ones"):
        cells_of("conv~8", "conv~9")
    with pytest.raises(ConfigError, match="azure:code has no targets to meet"):
        cells_of("conv@ttft:500", "code", slos=())


# ---- the rounds ----


def test_an_interrupted_sweep_resumes_in_rounds(path: Path) -> None:
    """One run of each cell, then the next of each; nothing is run twice, and no cell is warmed up in vain."""
    warm: list[str] = []
    runs: list[tuple[str, float]] = []

    def serve(num_runs: int) -> Sweep:
        sweep = Sweep.open(path, settings={}, provenance={}, overwrite=False)
        cells = cells_of("conv~8", "code~10")
        runner = SweepRunner(cells, sweep, is_given_up=lambda cell: cell.rates.ceiling == 10, quiet=True)

        def measure(cell: Cell[Policy], rate: float, label: str | None) -> dict[str, float]:
            if len(runs) == num_runs:
                raise KeyboardInterrupt
            assert label is None
            runs.append((cell.key.system, rate))
            enough = cell.workload.name == "azure:conv" and cell.system.name == "auto"
            return {"request_rate": rate, "slo_attainment": float(enough), "output_throughput": 1.0}

        with contextlib.suppress(KeyboardInterrupt):
            runner.run(cells, warm_up=lambda cell: warm.append(cell.key.system), measure=measure)
            assert not runner.has_work(cells)
            runner.finish()
        return sweep

    assert [cell.finished for cell in serve(5).cells] == [False, False, True, True]
    sweep = serve(99)
    mixed, auto = "bullet_graph mixed:2048", "bullet_graph auto"
    assert runs == [
        *((mixed, 8.0), (auto, 8.0), (mixed, 10.0), (auto, 10.0)),
        *((mixed, 4.0), (auto, 16.0), (mixed, 2.0), (auto, 32.0)),
    ]
    assert warm == [mixed, auto] * 2 + [auto, mixed]
    assert sweep.finished
    assert [cell.goodput for cell in sweep.cells] == [None, 32.0, None, None]


# ---- the pictures ----

SYSTEMS = ("bullet_graph auto", "vllm 0.24.0 chunk 512")
TASKS = (Task("azure:conv", 600, "ttft:500ms tpot:15ms"), Task("azure:code", 600, "ttft:0.2ms/token"))
LATENCIES = [f"{label}_{name}_ms" for label in ("median", "p90", "p99") for name in ("ttft", "tpot", "itl")]


def drawn_at(rate: float, **changes: Any) -> dict[str, Any]:
    return run_at(rate, 0.95, **dict.fromkeys(LATENCIES, 10.0 * rate), output_throughput=250 * rate) | changes


def make_sweep() -> Sweep:
    runs = (drawn_at(10), drawn_at(20), drawn_at(12.5))
    cells = [
        SweepCell(system=system, **task._asdict(), goodput=12.5, finished=True, runs=runs)
        for task in TASKS
        for system in SYSTEMS
    ]
    # One that served nothing in time, one that is under way, and one that was not begun.
    nothing = drawn_at(5, **dict.fromkeys(LATENCIES), slo_attainment=0.0)
    cells[0] = cells[0].model_copy(update={"goodput": None, "runs": (nothing,)})
    cells[3] = cells[3].model_copy(update={"goodput": None, "finished": False})
    cells.append(SweepCell(system="other", workload="azure:conv", num_prompts=1, slo="tpot:9ms"))
    return Sweep(settings={"attainment": 0.9, "tolerance": 0.02}, provenance={}, cells=cells)


@pytest.mark.parametrize(("tolerance", "label"), [(0.02, "≥ 12.5"), (0.6, "12.5")])
def test_a_bar_says_that_the_search_was_not_over(tolerance: float, label: str) -> None:
    assert _bar_label(make_sweep().cells[1], tolerance) == label


def test_each_comparison_has_its_pictures_from_the_file_alone(path: Path) -> None:
    sweep = make_sweep()
    pictures = draw_sweep(sweep, "svg")
    tasks = "azure-conv-600-ttft-500ms-tpot-15ms", "azure-code-600-ttft-0.2ms-token"
    of_tasks = {f"{kind}_{task}.svg" for kind in ("rates", "throughput") for task in tasks}
    assert set(pictures) == {"goodput.svg"} | of_tasks
    assert all(picture.lstrip().startswith(b"<?xml") for picture in pictures.values())
    path.write_text(json.dumps(sweep.fields()))
    assert draw_sweep(Sweep.read(path), "svg") == pictures, "the same, byte for byte"
    one = sweep.model_copy(update={"cells": sweep.cells[1:2]})
    assert all(picture.startswith(b"\x89PNG") for picture in draw_sweep(one, "png").values())
