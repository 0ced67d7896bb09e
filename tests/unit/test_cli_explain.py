"""``bullet-graph explain``: tables, JSON, pictures and refusals."""

import dataclasses
import json
import sys
from pathlib import Path

import cli_runner
import pytest
from cli_runner import run
from click.testing import Result
from traces import HEADER, RUN, request, write

from bullet_graph.perf.explain import Window, summarize_trace, to_chrome_trace
from bullet_graph.perf.trace import read_trace


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write(tmp_path / "run.jsonl", RUN)


def invoke(*arguments: str | Path) -> Result:
    return run("explain", *map(str, arguments))


def refused(*arguments: str | Path) -> str:
    return cli_runner.refused(invoke(*arguments))


@pytest.fixture
def missed_file(tmp_path: Path) -> Path:
    late = request("[bold]late", [300.0], first_scheduled_s=100.225, ttft_limit_ms=100.0)
    slow = [request(f"slow {i}", [0.0, 50.0, 350.0], tpot_limit_ms=60.0) for i in range(12)]
    return write(tmp_path / "missed.jsonl", [*RUN, late, *slow])


def test_tables(missed_file: Path) -> None:
    result = invoke(missed_file)
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "tiny on H200, policy auto, ttft:500ms tpot:15ms" in words
    assert "│ both lanes busy │ 25.0 % │" in words
    assert "│ split │ 2 │ 66.7 % │ 50.0 % │" in words
    assert "│ tpot │ 4 │ 66.7 % │" in words
    assert "│ split, prefill lane │ 1 │ 20.0 % │ 20.0 % │ +20.0 % │" in words
    assert "│ tpot: split │ 12 │" in words
    assert "│ [bold]late │ TTFT │ 300.0 │ 100.0 │ queued 75.0 %, prefill 25.0 % │" in words
    assert "… and 3 more (all are in the JSON)" in words


def test_notes_are_shown(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "cut.jsonl").write_bytes(run_file.read_bytes()[:-5])
    assert "note: line 13, the last, was cut short" in invoke(tmp_path / "cut.jsonl").stdout


def test_json(missed_file: Path) -> None:
    summary = json.loads(invoke(missed_file, "--json").stdout)
    assert summary == json.loads(json.dumps(dataclasses.asdict(summarize_trace(read_trace(missed_file)))))
    assert len(summary["misses"]) == 13


def test_json_of_a_part(run_file: Path) -> None:
    summary = json.loads(invoke(run_file, "--json", "--from", "0.3", "--to", "99").stdout)
    assert summary["duration_s"] == pytest.approx(0.1)
    assert summary["num_launches"] == 2
    assert json.loads(invoke(run_file, "--json", "--to", "0.12").stdout)["bounds"] == {"nothing": 1}


def test_chrome_trace_file(tmp_path: Path, run_file: Path) -> None:
    target = tmp_path / "chrome.json"
    assert invoke(run_file, "--chrome-trace", target).stdout.endswith(f"wrote {target}\n")
    whole = to_chrome_trace(read_trace(run_file), Window(0.0, 1e6))
    assert json.loads(target.read_text(encoding="utf-8")) == whole
    assert "the file exists; add --overwrite" in refused(run_file, "--chrome-trace", target)
    assert invoke(run_file, "--chrome-trace", target, "--overwrite").exit_code == 0


def test_timeline_files(tmp_path: Path, missed_file: Path) -> None:
    for name, begins in (("t.svg", b"<?xml"), ("t.PNG", b"\x89PNG")):
        assert invoke(missed_file, "--timeline", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(begins)
    # The same picture from the same trace.
    assert invoke(missed_file, "--timeline", tmp_path / "again.svg").exit_code == 0
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "t.svg").read_bytes()


def test_a_timeline_of_a_device_without_sms_and_of_no_launches(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [HEADER | {"num_sms": None}, *RUN[1:]])
    assert invoke(path, "--timeline", tmp_path / "cpu.svg").exit_code == 0
    path = write(tmp_path / "u.jsonl", [HEADER, request("r", [5.0], reason="abort")])
    assert invoke(path, "--timeline", tmp_path / "none.svg").exit_code == 0
    assert "this one has none" in refused(write(tmp_path / "v.jsonl", [HEADER]), "--timeline", tmp_path / "v.svg")


def test_a_timeline_needs_matplotlib(tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "bullet_graph.cli.timeline", raising=False)
    message = refused(run_file, "--timeline", tmp_path / "t.svg")
    assert "pip install 'bullet-graph[bench]'" in message
    assert not (tmp_path / "t.svg").exists()


def test_outputs_that_cannot_be(tmp_path: Path, run_file: Path) -> None:
    assert "must end in .svg or .png" in refused(run_file, "--timeline", tmp_path / "t.pdf")
    assert "this is the trace itself" in refused(run_file, "--chrome-trace", run_file, "--overwrite")
    assert "does not exist; make it first" in refused(run_file, "--chrome-trace", tmp_path / "no" / "t.json")
    assert "this is a folder" in refused(run_file, "--chrome-trace", tmp_path)
    assert run_file.read_text(encoding="utf-8").startswith('{"type": "header"')


@pytest.mark.parametrize(
    "part", [("--from", "2"), ("--from", "-1"), ("--from", "0.2", "--to", "0.1"), ("--from", "nan")]
)
def test_parts_that_cannot_be(run_file: Path, part: tuple[str, ...]) -> None:
    assert "the trace is" in refused(run_file, *part)
