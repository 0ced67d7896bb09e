"""What a sweep compares, from what a user types."""

import pytest

from bullet_graph.cli.bench.sweep_runner import Cell, WorkloadSpec, make_cells, parse_targets
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
