"""Which runs a comparison asks for."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from bench.peers import comparison
from bench.peers.comparison import Comparison
from bench.peers.systems import Candidate
from bullet_graph.cli.bench.sweep_runner import Sweep, WorkloadSpec, make_cells
from bullet_graph.engine.replay import Replay, TimedRequest
from bullet_graph.perf.goodput_search import GoodputSearch
from bullet_graph.perf.metrics import RequestMetrics, ServedRequest
from bullet_graph.slo import Slo
from bullet_graph.workloads import Workload
from bullet_graph.workloads.workload import WorkloadRequest

NUM_REQUESTS = 40
TPOT_MS = 10.0
GOODPUTS = {"auto": 30.0, "512": 11.0, "1024": 19.0, "2048": 17.0}
"""Rates up to which a setting meets the targets."""


class Served(AsyncMock):
    """A system that is as fast as its setting says."""

    settings: Mapping[str, Any] = {}
    setting = ""

    async def configure(self, setting: str, slo: Slo) -> None:  # noqa: ARG002
        self.setting = setting

    def counters(self) -> Mapping[str, Any]:
        return {}


async def open_served(_: Sequence[Candidate]) -> Any:
    return Served()


async def replayed(system: Served, requests: Sequence[TimedRequest], **_: Any) -> Replay:
    """All in time, or none."""
    rate = NUM_REQUESTS / requests[-1].arrival_s
    tpot_ms = TPOT_MS if rate < GOODPUTS[system.setting] else 2 * TPOT_MS
    metrics = RequestMetrics(0.0, 0.0, (0.0, tpot_ms / 1e3))
    served = tuple(ServedRequest(1, 2, metrics, slo=request.slo) for request in requests)
    return Replay(served, 0.0)


def compare(path: Path, *, best_peer_only: bool) -> dict[str, tuple[float | None, list[float]]]:
    """Goodput and rates of the runs, by setting."""
    request = WorkloadRequest(prompt_tokens=1, output_tokens=2, arrival_s=None)
    file = Sweep.open(path, settings={}, provenance={}, overwrite=False)
    candidates = [Candidate("own", "auto"), *(Candidate("vllm", chunk) for chunk in ("512", "1024", "2048"))]
    planned = make_cells(
        [WorkloadSpec("flat", slo=Slo(tpot_ms=TPOT_MS))],
        (),
        {candidate.label: candidate for candidate in candidates},
        first_rate=16.0,
        load=lambda spec: Workload(spec.name, (request,) * NUM_REQUESTS),
        new_rates=lambda rate: GoodputSearch(first_rate=rate, step=1.25, max_runs=4),
    )
    with asyncio.Runner() as runner:
        Comparison(
            [candidates],
            planned,
            open_served,
            file,
            runner,
            model="none",
            vocab_size=100,
            seed=0,
            num_warmups=0,
            best_peer_only=best_peer_only,
            device_uuid=None,
        ).run()
    cells = file.cells
    assert all(cell.finished for cell in cells)
    return {
        cell.system.split()[-1]: (cell.goodput, [run["request_rate"] for run in cell.runs]) for cell in cells
    }


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "replay_async", replayed)
    # Between real runs all objects of the process are collected, which would take longer than these runs.
    monkeypatch.setattr(comparison, "collect_garbage", lambda: None)


def test_every_setting_is_searched(tmp_path: Path) -> None:
    cells = compare(tmp_path / "peers.json", best_peer_only=False)
    assert cells["512"] == (pytest.approx(10.496), [16.0, 12.8, pytest.approx(8.192), pytest.approx(10.496)])


def test_a_setting_of_a_peer_is_given_up_when_another_is_better(tmp_path: Path) -> None:
    """512 fails where 1,024 serves enough; 2,048 fails a step later; this engine's search goes on."""
    cells = compare(tmp_path / "peers.json", best_peer_only=True)
    assert cells["512"] == (None, [16.0])
    assert cells["2048"][1] == [16.0, 20.0, 18.0]
    assert cells["1024"] == (18.0, [16.0, 20.0, 18.0, 19.0])
    assert len(cells["auto"][1]) == 4
