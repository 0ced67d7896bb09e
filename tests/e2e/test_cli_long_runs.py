"""What long commands owe who waits for them: progress bars, and a result that is never lost."""

import errno
import json
import shutil
from pathlib import Path

import click.testing
import pytest
from cli_runner import TINY, run, write_trace
from click.testing import CliRunner, Result

from bench.peers.command import compare
from bullet_graph.cli import result_file
from bullet_graph.cli.simulate import Simulator

EASY = "ttft:600000 tpot:600000"
SIMULATE = ("simulate", "--trace", "azure:conv", "--num-prompts", "8")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path, (8, 3), (20, 4), (12, 2)))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is a terminal of 100 columns."""
    monkeypatch.setattr(click.testing._NamedTextIOWrapper, "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", "100")


def compare_peers(trace: str, path: Path) -> Result:
    fixed = ("--model", "tiny", "--device", "cpu", "--kv-cache-bytes", "4MiB", "--max-num-seqs", "4")
    rates = ("--rates", "100", "--smoke", "--warmup-requests", "0", "--output-json", str(path))
    return CliRunner().invoke(compare, [*fixed, "--system", "own:serial", "--workload", f"{trace}@{EASY}", *rates])


@pytest.mark.parametrize("command", ["throughput", "sweep", "peers", "simulate", "simulate --sweep"])
@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_a_bar(command: str, trace: str, tmp_path: Path) -> None:
    output = ("--output-json", str(tmp_path / "result.json"))
    if command == "throughput":
        result, bar, total = run("bench", "throughput", *TINY, "--trace", trace), "mixed", 3
    elif command == "sweep":
        searched = ("--workload", f"{trace}@{EASY}", "--max-runs", "1", "--policy", "serial", "--smoke")
        result, bar, total = run("bench", "sweep", *TINY, *searched, *output), "run 1, trace.csv", 3
    elif command == "peers":
        result, bar, total = compare_peers(trace, tmp_path / "peers.json"), "run 1, trace.csv", 3
    elif command == "simulate":
        result, bar, total = run(*SIMULATE), "", 8
    else:
        result, bar, total = run(*SIMULATE, "--sweep", "--smoke", "--goodput", *EASY.split()), "run 2, auto, 10/s", 8
    assert result.exit_code == 0, result.output
    bars = [line for line in result.stderr.replace("\r", "\n").splitlines() if line.startswith(bar)]
    assert any(f" 0/{total} " in line for line in bars), result.stderr


def test_a_file_gets_no_bar(trace: str) -> None:
    assert "req/s" not in run("bench", "throughput", *TINY, "--trace", trace).stderr


def test_a_result_whose_folder_is_removed_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, simulate = tmp_path / "results", Simulator.run
    folder.mkdir()

    def remove_first(*arguments: object, **more: object) -> object:
        shutil.rmtree(folder)
        return simulate(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Simulator, "run", remove_first)
    result = run(*SIMULATE, "--output-json", str(folder / "result.json"))
    assert result.exit_code == 2
    assert json.loads(result.stdout)["completed"] == 8
    assert "result.json cannot be written (No such file or directory); what it would hold is on" in result.stderr


def test_a_sweep_is_printed_when_the_disk_is_full(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.suffix != ".tmp":
            return write(path, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = compare_peers(trace, tmp_path / "peers.json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["cells"][0]["runs"][0]["completed"] == 3
    assert "cannot be written (No space left on device)" in result.stderr


def test_the_folder_is_tried_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, **_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(result_file.tempfile, "TemporaryFile", Full)
    monkeypatch.setattr(Simulator, "run", lambda *_, **__: pytest.fail("it ran"))
    result = run(*SIMULATE, "--output-json", str(tmp_path / "result.json"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path} takes no file (No space left on device)" in result.stderr
