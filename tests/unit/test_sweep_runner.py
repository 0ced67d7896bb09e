"""What a sweep compares, from what a user types."""

import contextlib
from pathlib import Path

import pytest

from bullet_graph.cli.bench.sweep_file import SweepFile
from bullet_graph.cli.bench.sweep_runner import Cell, SweepRunner, WorkloadSpec, make_cells, parse_targets
from bullet_graph.config import Policy
from bullet_graph.errors import ConfigError
from bullet_graph.perf.goodput_search import GoodputSearch
from bullet_graph.slo import Slo
from bullet_graph.workloads import Workload, WorkloadRequest

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
        ("synthetic:conv", WorkloadSpec("synthetic:conv")),
    ],
)
def test_a_workload_is_read(text: str, spec: WorkloadSpec) -> None:
    assert WorkloadSpec.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write NAME"),
        ("=5", "write NAME"),
        ("conv=0", "'0' is no number of prompts"),
        ("conv=many", "'many' is no number of prompts"),
        ("conv=", "'' is no number of prompts"),
        ("conv~0", "'0' is no rate above 0"),
        ("conv~inf", "'inf' is no rate above 0"),
        ("conv=5~", "'' is no rate above 0"),
        ("conv@", "a goodput needs targets"),
        ("conv@500", "'500' is no latency target"),
        ("conv@ttft:500@tpot:8", "write NAME"),
    ],
)
def test_a_workload_in_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadSpec.parse(text)


def test_no_targets_are_none() -> None:
    assert parse_targets("ttft:500, tpot:15") == LOOSE
    with pytest.raises(ConfigError, match="got none"):
        parse_targets(" ")


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


def test_the_same_cell_comes_once() -> None:
    again = cells_of("conv", "conv", "azure:conv@ttft:500 tpot:15")
    assert again == cells_of("conv")


def test_two_workloads_cannot_have_one_name() -> None:
    with pytest.raises(ConfigError, match=r"two different ones are both called mine\.csv with 3 requests"):
        cells_of("a/mine.csv", "there/mine.csv")
    with pytest.raises(ConfigError, match="two different ones"):
        cells_of("conv~8", "conv~9")


def test_a_workload_needs_targets() -> None:
    with pytest.raises(ConfigError, match="azure:code has no targets to meet"):
        cells_of("conv@ttft:500", "code", slos=())


def test_an_interrupted_sweep_resumes_in_rounds(tmp_path: Path) -> None:
    """One run of each cell, then the next of each; nothing is run twice, and no cell is warmed up in vain."""
    warm: list[str] = []
    runs: list[tuple[str, float]] = []

    def serve(num_runs: int) -> SweepFile:
        file = SweepFile.open(tmp_path / "sweep.json", settings={}, provenance={}, overwrite=False)
        cells = cells_of("conv~8", "code~10")
        runner = SweepRunner(cells, file, is_given_up=lambda cell: cell.rates.ceiling == 10, quiet=True)

        def measure(cell: Cell[Policy], rate: float) -> dict[str, float]:
            if len(runs) == num_runs:
                raise KeyboardInterrupt
            runs.append((cell.key.system, rate))
            enough = cell.key.workload == "azure:conv" and cell.system.name == "auto"
            return {"request_rate": rate, "slo_attainment": float(enough), "output_throughput": 1.0}

        with contextlib.suppress(KeyboardInterrupt):
            runner.run(cells, warm_up=lambda cell: warm.append(cell.key.system), measure=measure)
            assert not runner.has_work(cells)
            runner.finish()
        return file

    assert [cell.finished for cell in serve(5).sweep.cells] == [False, False, True, True]
    sweep = serve(99).sweep
    mixed, auto = "bullet_graph mixed:2048", "bullet_graph auto"
    assert runs == [
        *((mixed, 8.0), (auto, 8.0), (mixed, 10.0), (auto, 10.0)),
        *((mixed, 4.0), (auto, 16.0), (mixed, 2.0), (auto, 32.0)),
    ]
    assert warm == [mixed, auto] * 2 + [auto, mixed]
    assert sweep.finished
    assert [cell.goodput for cell in sweep.cells] == [None, 32.0, None, None]
