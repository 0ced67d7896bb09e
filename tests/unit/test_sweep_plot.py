"""Pictures of a sweep, from its file alone."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bullet_graph.cli.bench.sweep_file import CellKey, Sweep, SweepCell, read_sweep
from bullet_graph.cli.plots import draw_sweep, plot_names

SYSTEMS = ("bullet_graph auto", "vllm 0.24.0 chunk 512")
TASKS = (("azure:conv", "ttft:500ms tpot:15ms"), ("azure:code", "ttft:0.2ms/token"))


def run_at(rate: float, **changes: Any) -> dict[str, Any]:
    latencies = {
        f"{label}_{name}_ms": 10.0 * rate
        for label in ("median", "p90", "p99")
        for name in ("ttft", "tpot", "itl")
    }
    return (
        {"request_rate": rate, "slo_attainment": 0.95, "output_throughput": 250 * rate} | latencies | changes
    )


def make_sweep() -> Sweep:
    cells = [
        SweepCell(CellKey(system, workload, 600, slo), 12.5, True, (run_at(10), run_at(20), run_at(12.5)))
        for workload, slo in TASKS
        for system in SYSTEMS
    ]
    # One that served nothing in time, one that is under way, and one that was not begun.
    nothing = run_at(5, **{name: None for name in run_at(5) if name.endswith("_ms")}, slo_attainment=0.0)
    cells[0] = dataclasses.replace(cells[0], goodput=None, runs=(nothing,))
    cells[3] = dataclasses.replace(cells[3], goodput=None, finished=False)
    idle = SweepCell(CellKey("other", "azure:conv", 1, "tpot:9ms"))
    return Sweep(settings={"attainment": 0.9}, provenance={}, cells=(*cells, idle))


@pytest.fixture(scope="module")
def pictures() -> dict[str, bytes]:
    return draw_sweep(make_sweep(), "svg")


def test_each_comparison_has_its_pictures(pictures: dict[str, bytes]) -> None:
    keys = [cell.key for cell in make_sweep().cells if cell.runs]
    assert sorted(pictures) == sorted(plot_names(keys, "svg"))
    assert set(pictures) == {
        "goodput.svg",
        *(
            f"{kind}_{task}.svg"
            for kind in ("rates", "throughput")
            for task in ("azure-conv-600-ttft-500ms-tpot-15ms", "azure-code-600-ttft-0.2ms-token")
        ),
    }
    assert all(picture.lstrip().startswith(b"<?xml") for picture in pictures.values())


def test_pictures_come_from_the_file_alone_and_are_the_same(
    pictures: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(make_sweep().fields()))
    assert draw_sweep(read_sweep(path), "svg") == pictures


def test_a_picture_may_be_a_png() -> None:
    one = dataclasses.replace(make_sweep(), cells=make_sweep().cells[1:2], settings={"attainment": 0.5})
    for name, picture in draw_sweep(one, "png").items():
        assert name.endswith(".png")
        assert picture.startswith(b"\x89PNG")
