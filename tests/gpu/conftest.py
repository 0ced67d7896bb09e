"""Tests that need an NVIDIA GPU: not even imported where there is none.

``--gpu-report FILE`` writes what they showed as JSON: outcomes, recorded figures, and where they ran.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bullet_graph.perf.energy import DeviceMonitor, open_probe
from bullet_graph.perf.provenance import collect_provenance

if torch.cuda.is_available():
    import noise

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Called for the tests of this folder alone."""
    item.add_marker("gpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> "noise.Checkpoint":
    """A random Qwen3; files that need another have their own."""
    return noise.qwen3_checkpoint(tmp_path_factory.mktemp("qwen3"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, help="write outcomes and figures to this JSON file")
    parser.addoption("--steps", type=int, default=2000, help="decode steps of ranks that are late at random")


class GpuReport:
    """Collects outcomes while the device is watched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: list[dict[str, object]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        with DeviceMonitor(open_probe(torch.device("cuda"))) as monitor:
            outcome = yield
        report = {
            "argv": ["pytest", *session.config.invocation_params.args],
            "tests": self.tests,
            "device": dataclasses.asdict(monitor.report),
            "provenance": dataclasses.asdict(collect_provenance("cuda")),
        }
        self.path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.tests.append(
                {
                    "test": report.nodeid,
                    "outcome": report.outcome,
                    "seconds": round(report.duration, 3),
                    **dict(report.user_properties),
                }
            )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-report")
    if path is not None and torch.cuda.is_available():
        config.pluginmanager.register(GpuReport(path))
