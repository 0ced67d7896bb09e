"""``bullet-graph bench startup``: each start a process of its own, its phases on one clock."""

import dataclasses
import json
import pickle
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runner import TINY, parsed, run

from bullet_graph import EngineConfig
from bullet_graph.cli.bench import startup, startup_child
from bullet_graph.cli.bench.startup import StartKind, phase_names, read_run, run_starts
from bullet_graph.cli.plots import draw_starts
from bullet_graph.errors import BulletGraphError, CheckpointError, InsufficientMemoryError
from bullet_graph.perf.start_report import StartPhase, StartReport

CONFIG = EngineConfig(model="tiny", device="cpu", max_model_len=128, max_num_seqs=4)
REPORT = StartReport(
    103.0,
    4.0,
    (
        StartPhase("imports", -2.5, -0.5),
        StartPhase("weights", 1.0, 3.0),
        StartPhase("imports", 1.0, 2.0),
        StartPhase("first token", 4.5, 5.0),
    ),
)
TOLD = (REPORT, {"capture": None, "compiles": {}, "cache_use": {}, "num_missing_graphs": 7})


def test_one_cold_and_one_warm_start(tmp_path: Path) -> None:
    plot, output = tmp_path / "start.svg", tmp_path / "start.json"
    result = run(
        *("bench", "startup", *TINY, "--num-iters-cold", "1", "--num-iters-warm", "1", "--json"),
        *("--plot", str(plot), "--output-json", str(output)),
    )
    figures = parsed(result)
    assert json.loads(output.read_text()) == figures
    assert plot.read_text().startswith("<?xml")
    for policy in ("cold", "warm"):
        (start,) = figures[f"{policy}_runs"]
        assert figures[f"avg_{policy}_startup_time"] == start["startup_s"]
        assert figures[f"{policy}_startup_times"] == [start["startup_s"]]
        assert 0.2 < start["startup_s"] < start["first_token_s"] == figures[f"avg_{policy}_first_token_time"]
        phases = {phase["name"]: phase for phase in start["phases"]}
        assert phases["process"]["start_s"] == 0
        assert phases["process"]["end_s"] == phases["imports"]["start_s"]
        assert phases["imports"]["end_s"] < phases["weights"]["start_s"] < start["startup_s"]
        assert figures[f"{policy}_phases"]["imports"] > 0.1, "each start is a fresh process"
        assert (start["capture"], start["num_missing_graphs"]) == (None, 0)
    assert figures["provenance"]["device_name"] == "cpu"
    assert figures["engine"]["ready"] == "all"


def test_times_count_from_the_start_of_the_process_and_phases_stand_in_the_order_of_a_start() -> None:
    found = read_run(*TOLD, started_s=100.0)
    assert (found.startup_s, found.first_token_s, found.num_missing_graphs) == (7.0, 8.0, 7)
    assert found.seconds == {"process": 0.5, "imports": 3.0, "weights": 2.0, "first token": 0.5}
    assert list(found.seconds) == ["process", "imports", "weights", "first token"]
    # Whichever kind of start has them, and whenever they ended.
    later = StartPhase("self-check", 5, 6), StartPhase("capture cache", 6, 7)
    cached = dataclasses.replace(found, phases=(*found.phases, *later))
    names = phase_names({"warm": (found,), "cached": (cached,)})
    assert names == ["process", "imports", "capture cache", "weights", "self-check", "first token"]


class FakeChildren:
    """In the place of processes: notes where each was to keep its caches, and which settings it had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, told: object, returncode: int = 0) -> None:
        self.folders: list[Path] = []
        self.were_empty: list[bool] = []
        self.configs: list[EngineConfig] = []
        self._told = told
        self._returncode = returncode
        monkeypatch.setattr(subprocess, "run", self._run)
        monkeypatch.setattr(startup.time, "perf_counter", lambda: 100.0)

    def _run(self, command: list[str], *, input: bytes, env: dict[str, str], **_: object) -> SimpleNamespace:
        inductor = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH"):
            assert Path(env[name]).parent == inductor.parent
        self.folders.append(inductor.parent)
        self.were_empty.append(not inductor.exists())
        inductor.mkdir(exist_ok=True)
        self.configs.append(pickle.loads(input))
        if self._told:
            Path(command[-1]).write_bytes(pickle.dumps(self._told))
        return SimpleNamespace(returncode=self._returncode, stderr=b"Segmentation fault")


def test_cold_starts_have_empty_caches_and_warm_ones_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    children = FakeChildren(monkeypatch, TOLD)
    kinds = (
        StartKind("cold", CONFIG, 2, empty_caches=True),
        StartKind("warm", CONFIG, 2),
        StartKind("other", dataclasses.replace(CONFIG, ready="hot"), 1),
    )
    runs = run_starts(kinds, quiet=True)
    assert children.were_empty == [True, True, False, False, False]
    assert len(set(children.folders)) == 2
    assert children.folders[1] == children.folders[2] == children.folders[4]
    assert not any(folder.exists() for folder in children.folders), "what was compiled is removed"
    assert not list(tmp_path.iterdir())
    assert children.configs[0] == CONFIG
    assert [config.ready for config in children.configs] == ["all"] * 4 + ["hot"]
    assert {kind: len(of_kind) for kind, of_kind in runs.items()} == {"cold": 2, "warm": 2, "other": 1}
    assert runs["warm"][0].startup_s == 7.0
    first = {kind: of_kind[0] for kind, of_kind in runs.items()}
    svgs = [draw_starts("svg", first, phase_names(runs), title="t") for _ in range(2)]
    assert svgs[0] == svgs[1]
    assert draw_starts("png", first, phase_names(runs), title="t").startswith(b"\x89PNG")
    figure = draw_starts.__wrapped__(first, phase_names(runs), title="t")  # type: ignore[attr-defined]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1 < len(figure.axes), "starts can be compared"
    assert {axes.get_xscale() for axes in figure.axes} == {"linear"}, "a bar is as long as its time"


def test_starts_from_a_capture_cache_come_last_with_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    provenance = startup.collect_provenance("cpu")
    monkeypatch.setattr(startup, "collect_provenance", lambda _: provenance)
    children = FakeChildren(monkeypatch, TOLD)
    options = ("--num-iters-cold", "1", "--num-iters-warm", "2", "--capture-cache", str(tmp_path), "--json")
    figures = parsed(run("bench", "startup", *TINY, *options))
    assert [config.capture_cache for config in children.configs] == [None] * 3 + [str(tmp_path)] * 2
    assert children.were_empty == [True, False, False, True, True]
    assert figures["avg_cached_startup_time"] == 7.0


@pytest.mark.parametrize(
    ("told", "returncode", "error", "message"),
    [
        (CheckpointError("a shard is missing"), 2, CheckpointError, r"^a shard is missing$"),
        (None, -11, BulletGraphError, "exit code -11: Segmentation fault"),
    ],
)
def test_a_start_that_fails_tells_why(
    told: object, returncode: int, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeChildren(monkeypatch, told, returncode)
    with pytest.raises(error, match=message):
        run_starts([StartKind("cold", CONFIG, 1, empty_caches=True)], quiet=True)


def test_a_process_writes_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that shows only there: the ledger."""
    config = dataclasses.replace(CONFIG, kv_cache_bytes=1000)
    monkeypatch.setattr(sys, "argv", ["child", str(tmp_path / "found")])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO(pickle.dumps(config))))
    startup_child.main()
    found = pickle.loads((tmp_path / "found").read_bytes())
    assert isinstance(found, InsufficientMemoryError)
    assert "Raise kv_cache_bytes" in str(found)
