"""A goodput sweep: what it compares, from what a user types; its file; its rounds; and its pictures."""

import contextlib
import json
import math
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
    at_rate,
    make_cells,
)
from bullet_graph.cli.plots import _bar_label, draw_sweep
from bullet_graph.cli.result_file import command_line
from bullet_graph.config import Policy
from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.perf.goodput_search import FASTEST_RATE, GoodputSearch, RateRun, goodput_fields
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest

SETTINGS = {"model": "tiny", "policies": ("auto", "mixed"), "tolerance": 0.05, "engine": {"max_num_seqs": 8}}
PROVENANCE = {"date_utc": "2026-03-04T05:06:07+00:00", "git_commit": "abc"}
TASK = Task("azure:conv", 20, "ttft:500ms")
AUTO, MIXED = CellKey("bullet_graph auto", TASK), CellKey("bullet_graph mixed", TASK)


def run_at(rate: Any, attainment: Any = 1.0, **changes: Any) -> dict[str, Any]:
    told = {"request_rate": rate, "slo_attainment": attainment, "stable": True, "sustained": True}
    return told | {"median_ttft_ms": None} | changes


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
    sweep.add_run(AUTO, run_at(16, 0.2, stable=False, sustained=False))
    task = {"workload": "azure:conv", "num_prompts": 20, "slo": "ttft:500ms"}
    auto = {"goodput_90": 8, "goodput_90_below": 16, "goodput_99": 8, "goodput_99_below": 16, "sustained": False}
    auto |= {"runs": [run_at(8), run_at(16, 0.2, stable=False, sustained=False)]}
    mixed = {"goodput_90": None, "goodput_90_below": 8, "goodput_99": None, "goodput_99_below": 8}
    mixed |= {"sustained": True, "runs": [run_at(8, 0.5)]}
    assert json.loads(path.read_text()) == {
        "format": 2,
        "kind": "goodput sweep",
        "finished": False,
        "argv": command_line(),
        "settings": SETTINGS | {"policies": ["auto", "mixed"]},
        "provenance": PROVENANCE,
        "continued": [],
        "cells": [{"system": "bullet_graph auto", **task, **auto}, {"system": "bullet_graph mixed", **task, **mixed}],
    }
    sweep.finish()
    assert json.loads(path.read_text())["finished"]
    assert Sweep.read(path).fields() == sweep.fields()
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"
    with pytest.raises(ConfigError, match="finished; add --overwrite or give another name"):
        open_sweep(path)
    assert open_sweep(path, overwrite=True).cell(AUTO).runs == ()


def test_the_machine_and_code_of_each_start_are_told(path: Path) -> None:
    open_sweep(path).add_run(AUTO, run_at(1))
    later = PROVENANCE | {"date_utc": "2026-03-05T00:00:00+00:00"}
    other = later | {"git_commit": "def"}
    for rate, provenance in enumerate((later, other, other), start=2):
        Sweep.open(path, settings=SETTINGS, provenance=provenance, overwrite=False).add_run(AUTO, run_at(rate))
    sweep = Sweep.read(path)
    assert (sweep.provenance, sweep.continued) == (PROVENANCE, [other])


def test_another_sweep_is_not_gone_on_with(path: Path) -> None:
    open_sweep(path).add_run(AUTO, run_at(1))
    with pytest.raises(ConfigError, match="other settings: model is 'tiny' there and 'large' here; add"):
        open_sweep(path, model="large")
    with pytest.raises(ConfigError, match=r"engine is {'max_num_seqs': 8} there and {'max_num_seqs': 9} here"):
        open_sweep(path, engine={"max_num_seqs": 9})
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
        (b"{half a fi", "is no sweep's file of format 2, or it is damaged: .*Invalid JSON"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (b'{"results": []}', "settings: Field required"),
        (damaged(format=1), "format: Input should be 2, found 1"),
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


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("azure:conv", WorkloadSpec("azure:conv")),
        ("azure:code=400", WorkloadSpec("azure:code", 400)),
        ("synthetic:longdoc~0.5", WorkloadSpec("synthetic:longdoc", None, 0.5)),
        ("azure:code=400~10@ttft:500 tpot:8", WorkloadSpec("azure:code", 400, 10, TIGHT)),
        ("azure:code@ttft:500ms,tpot:8", WorkloadSpec("azure:code", slo=TIGHT)),
        ("traces/mine.jsonl=5", WorkloadSpec("traces/mine.jsonl", 5)),
        ("~/mine.csv", WorkloadSpec("~/mine.csv")),
    ],
)
def test_a_workload_is_read(text: str, spec: WorkloadSpec) -> None:
    assert WorkloadSpec.parse(text) == spec


WRONG = [
    ("", "write NAME"), ("conv=0", "'0' is no number of prompts"), ("conv=", "'' is no number of prompts"),
    ("conv~0", "'0' is no rate above 0"), ("conv=5~", "'' is no rate above 0"), ("conv@", "a goodput needs targets"),
    ("conv@500", "'500' is no latency target"), ("conv@ttft:500@tpot:8", "write NAME"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_workload_in_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadSpec.parse(text)


def load(spec: WorkloadSpec) -> Workload:
    """The given number of requests, or as many as are wanted."""
    requests = (WorkloadRequest(len(spec.name), 1, arrival_s=None),) * 10**4
    name = spec.name.rpartition("/")[2]
    if spec.num_prompts is not None:
        return Workload(name, requests[: spec.num_prompts])
    return Workload(name, requests[:3], longer=lambda count: Workload(name, requests[:count]))


def cells_of(*texts: str, slos: tuple[Slo, ...] = (LOOSE,), smoke: bool = True) -> list[Cell[Policy]]:
    return make_cells(
        [WorkloadSpec.parse(text) for text in texts],
        slos,
        {f"bullet_graph {policy}": policy for policy in (Policy("mixed", 2048), Policy("auto"))},
        search=GoodputSearch(first_rate=8, max_runs=3),
        load=load,
        smoke=smoke,
    )


def test_cells_are_workloads_times_targets_times_policies() -> None:
    cells = cells_of("conv=5~24", "code@ttft:500 tpot:8", slos=(LOOSE, TIGHT))
    assert [(str(cell), cell.key.system) for cell in cells] == [
        (f"{workload}@ttft:500ms tpot:{tpot}ms", f"bullet_graph {policy}")
        for workload, tpot in (("conv=5~24", 15), ("conv=5~24", 8), ("code~8", 8))
        for policy in ("mixed:2048", "auto")
    ]
    # What stands for a cell can be given again.
    assert {WorkloadSpec.parse(str(cell)).slo for cell in cells} == {LOOSE, TIGHT}


def test_a_cell_comes_once_and_two_cannot_have_one_name() -> None:
    assert cells_of("conv", "conv", "conv@ttft:500 tpot:15") == cells_of("conv")
    with pytest.raises(ConfigError, match=r"two different ones are both called mine\.csv, 3 requests"):
        cells_of("a/mine.csv=3", "there/mine.csv=3")
    with pytest.raises(ConfigError, match="two different ones"):
        cells_of("conv~8", "conv~9")
    with pytest.raises(ConfigError, match="code has no targets to meet"):
        cells_of("conv@ttft:500", "code", slos=())


@pytest.mark.parametrize(("rate", "needed"), [(20, 2400), (1, 300)])
def test_a_run_at_a_rate_is_sustained_or_says_that_it_is_not(rate: float, needed: int) -> None:
    given = Arrivals(request_rate=None, seed=3)
    endless, enough, short = (load(WorkloadSpec("w", count)) for count in (None, 5000, needed - 1))
    for workload in (endless, enough):
        run, arrivals = at_rate(workload, given, rate, smoke=False)
        assert len(run.requests) == needed
        assert arrivals == Arrivals(request_rate=rate, seed=3, uncounted_s=10)
        assert arrivals.times(run)[-1] >= 120
    told = f"has {needed - 1:,} requests, but a run at {rate}/s needs {needed:,}: 120"
    with pytest.raises(WorkloadError, match=told):
        at_rate(short, given, rate, smoke=False)
    run, arrivals = at_rate(short, given, rate, smoke=True)
    assert (len(run.requests), arrivals.uncounted_s) == (needed - 1, 0), "in a short run, all requests count"
    assert at_rate(short, given, FASTEST_RATE, smoke=False) == (short, Arrivals(request_rate=math.inf, seed=3))


def test_a_trace_is_served_at_rates_for_which_it_suffices() -> None:
    with pytest.raises(WorkloadError, match="or add --smoke"):
        cells_of("trace=1000~9", smoke=False)
    cell = cells_of("trace=1200~8", smoke=False)[0]
    assert cell.search.next_rate([RateRun(8, 1.0, True), RateRun(8.5, 1.0, True)]) == 10


# ---- the rounds ----


def test_an_interrupted_sweep_resumes_in_rounds(path: Path) -> None:
    """One run of each cell, then the next of each; nothing is run twice, and no cell is warmed up in vain."""
    warm: list[str] = []
    runs: list[tuple[str, float]] = []

    def serve(num_runs: int) -> Sweep:
        sweep = Sweep.open(path, settings={}, provenance={}, overwrite=False)
        cells = cells_of("conv~8", "code~10")
        runner = SweepRunner(sweep, is_given_up=lambda cell: sweep.cell(cell.key).goodput_90_below == 10, quiet=True)

        def measure(cell: Cell[Policy], rate: float, label: str | None) -> dict[str, float]:
            if len(runs) == num_runs:
                raise KeyboardInterrupt
            assert label is None
            runs.append((cell.key.system, rate))
            enough = cell.workload.name == "conv" and cell.system.name == "auto"
            return run_at(rate, float(enough), output_throughput=1.0)

        with contextlib.suppress(KeyboardInterrupt):
            runner.run(cells, warm_up=lambda cell: warm.append(cell.key.system), measure=measure)
            assert not runner.has_work(cells)
            sweep.finish()
        return sweep

    serve(5)
    sweep = serve(99)
    mixed, auto = "bullet_graph mixed:2048", "bullet_graph auto"
    assert runs == [
        *((mixed, 8.0), (auto, 8.0), (mixed, 10.0), (auto, 10.0)),
        *((mixed, 6.4), (auto, 10.0), (mixed, 5.12), (auto, 12.5)),
    ]
    assert warm == [mixed, auto] * 2 + [auto, mixed]
    assert sweep.finished
    assert [cell.goodput_90 for cell in sweep.cells] == [None, 12.5, None, None]


@pytest.mark.parametrize(("workload", "minutes"), [("conv~8", 6), ("conv=640~8", 4)])
def test_the_time_is_told_before(workload: str, minutes: int, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, cells = open_sweep(path), cells_of(workload)[:1]

    def measure(_: Cell[Policy], rate: float, __: str | None) -> dict[str, Any]:
        return run_at(rate, stable=rate < 12, output_throughput=1.0)

    SweepRunner(sweep).run(cells, warm_up=lambda _: None, measure=measure)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"at most 3 runs, with {minutes} minutes of arrivals"
    assert [line.endswith(", unstable") for line in lines[1:]] == [False, False, True]


# ---- the pictures ----

LATENCIES = [f"{label}_{name}_ms" for label in ("median", "p90", "p99") for name in ("ttft", "tpot", "itl")]


def drawn_at(rate: float, **changes: Any) -> dict[str, Any]:
    return run_at(rate, 0.95, **dict.fromkeys(LATENCIES, 10.0 * rate), output_throughput=250 * rate) | changes


def make_sweep() -> Sweep:
    runs = (drawn_at(10), drawn_at(20, stable=False), drawn_at(12.5))
    code = Task("azure:code", 600, "ttft:0.2ms/token")
    cells = [
        SweepCell(system=system, **task._asdict(), runs=runs, **goodput_fields(runs))
        for task in (Task("azure:conv", 600, "ttft:500ms tpot:15ms"), code, code._replace(workload="azure-code"))
        for system in ("bullet_graph auto", "vllm 0.24.0 chunk 512")
    ]
    # One that served nothing in time, and one that was not begun.
    nothing = drawn_at(5, **dict.fromkeys(LATENCIES), slo_attainment=0.0)
    cells[0] = cells[0].model_copy(update={"runs": (nothing,), **goodput_fields([nothing])})
    cells.append(SweepCell(system="other", workload="azure:conv", num_prompts=None, slo="tpot:9ms"))
    return Sweep(settings={"tolerance": 0.02}, provenance={}, cells=cells)


@pytest.mark.parametrize(("tolerance", "label"), [(0.02, "≥ 12.5"), (0.6, "12.5")])
def test_a_bar_says_that_the_search_was_not_over(tolerance: float, label: str) -> None:
    nothing, cell, *_ = make_sweep().cells
    assert _bar_label(cell, tolerance) == label
    assert _bar_label(nothing, tolerance) == "< 5"
    assert _bar_label(cell.model_copy(update={"sustained": False}), tolerance) == f"{label}\nnot sustained"


def test_each_comparison_has_its_pictures_from_the_file_alone(path: Path) -> None:
    sweep = make_sweep()
    pictures = draw_sweep(sweep, "svg")
    code = "rates_azure-code-600-requests-ttft-0.2ms-token"
    names = "goodput", "rates_azure-conv-600-requests-ttft-500ms-tpot-15ms", code, f"{code}-2"
    assert set(pictures) == {f"{name}.svg" for name in names}
    assert all(picture.lstrip().startswith(b"<?xml") for picture in pictures.values())
    path.write_text(json.dumps(sweep.fields()))
    assert draw_sweep(Sweep.read(path), "svg") == pictures, "the same, byte for byte"
    one = sweep.model_copy(update={"cells": sweep.cells[1:2]})
    assert all(picture.startswith(b"\x89PNG") for picture in draw_sweep(one, "png").values())
