"""The tools of bench/: campaigns, single measurements, and the command lines that campaigns and pages give."""

import importlib
import json
import os
import re
import shlex
import signal
import threading
import time
from pathlib import Path

import click
import psutil
import pytest
from cli_runner import find, parsed, run
from click.testing import CliRunner

from bench import server_overhead
from bench.campaign import Campaign, Job, main, read_campaign
from bench.fleet.command import fleet
from bench.peers.command import compare as compare_peers
from bullet_graph.errors import ConfigError

BENCH = Path(__file__).parents[2] / "bench"
APPEND = "python -c \"import os; open('{results}/out','a').write(os.environ.get('CUDA_VISIBLE_DEVICES','-')+' %s;')\""
SLEEP = 'python -c "import time; time.sleep(90)"'


def states(jobs: list[Job], results: Path, gpus: list[str | None], *, time_limit_s: float = 60) -> list[str]:
    return [o.state for o in Campaign(jobs, gpus, results, time_limit_s=time_limit_s).run()]


def test_commands_of_a_job_run_in_order_on_its_gpu_and_not_again(tmp_path: Path) -> None:
    job = Job("one", (APPEND % "a", APPEND % "b"))
    assert states([job], tmp_path, ["3"]) == ["done", "done"]
    assert (tmp_path / "out").read_text() == "3 a;3 b;"
    assert states([job], tmp_path, ["3"]) == ["done before", "done before"]
    assert (tmp_path / "out").read_text() == "3 a;3 b;"


def test_jobs_share_no_gpu(tmp_path: Path) -> None:
    # A second mkdir of the same GPU's folder would fail.
    (tmp_path / "nap.py").write_text(
        "import os, time\n"
        f"folder = {str(tmp_path)!r} + '/gpu' + os.environ['CUDA_VISIBLE_DEVICES']\n"
        "os.mkdir(folder)\n"
        "time.sleep(0.3)\n"
        "os.rmdir(folder)\n"
    )
    jobs = [Job(f"job{i}", (f"python {{results}}/nap.py {i}",)) for i in range(4)]
    assert states(jobs, tmp_path, ["0,1", "2"]) == ["done"] * 4


def test_a_failure_ends_its_job_alone(tmp_path: Path) -> None:
    (results := tmp_path / "two words").mkdir()
    firsts = {"bad": 'python -c "import sys; sys.exit(3)"', "absent": "no-program"}
    jobs = [Job(name, (first, APPEND % "never")) for name, first in firsts.items()]
    bad, rest, absent, *others = states([*jobs, Job("good", (APPEND % "{1: 2}",))], results, [None])
    assert (bad, rest, absent[-13:], *others) == ("failed (3)", "not begun", "'no-program')", "not begun", "done")
    assert (results / "out").read_text().endswith(" {1: 2};")


def test_the_time_limit_interrupts_and_the_next_start_goes_on(tmp_path: Path) -> None:
    job = Job("slow", (APPEND % "first", SLEEP, APPEND % "last"))
    start_s = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    assert states([job], tmp_path, [None], time_limit_s=2) == ["done", "stopped", "not begun"]
    assert time.monotonic() - start_s < 20
    assert states([Job("slow", (APPEND % "first", APPEND % "last"))], tmp_path, [None]) == ["done before", "done"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_what_runs_and_begins_nothing(how: signal.Signals, tmp_path: Path) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), how)).start()
    with pytest.raises(KeyboardInterrupt):
        states([Job("slow", (SLEEP, APPEND % "last"))], tmp_path, [None])
    assert not [each for each in psutil.Process().children() if "time.sleep(90)" in " ".join(each.cmdline())]
    assert not (tmp_path / "out").exists()


def test_a_campaign_of_a_file_is_run_and_told(tmp_path: Path) -> None:
    path, job = tmp_path / "campaign.toml", "[[job]]\nname='a'\ncommands=['%s']\n"
    path.write_text(job % "python -V")
    result = CliRunner().invoke(main, [str(path), "--results", str(tmp_path / "r"), "--gpus", "cpu"])
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "r" / "campaign.json").read_text())) == 1
    for text, told in ((job % "x" + job % "y", "different names"), (job % 'echo "', "No closing quotation")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_campaign(path)


def written_commands() -> list[str]:
    """Commands of the campaigns, of bench/README.md, and of each tool's help."""
    lines = [
        command.format(results="r")
        for path in (BENCH / "campaigns").glob("*.toml")
        for job in read_campaign(path)
        for command in job.commands
    ]
    text = "\n".join(page.read_text(encoding="utf-8") for page in [BENCH / "README.md", *BENCH.rglob("*.py")])
    return lines + re.findall(r"^ *(python -m .*)", re.sub(r"\\+\n\s*", "", text), flags=re.MULTILINE)


@pytest.mark.parametrize("line", written_commands())
def test_commands_that_are_written_down_are_accepted(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *__: Path(value))
    _, first, *arguments = shlex.split(line, comments=True)
    module = arguments.pop(0) if first == "-m" else first.removesuffix(".py").replace("/", ".")
    command: click.Command
    if module == "pytest":
        return
    if module == "bullet_graph":
        command, arguments = find(arguments)
        assert not isinstance(command, click.Group), line
    else:
        packages = {"bench.fleet": fleet, "bench.peers": compare_peers}
        command = packages.get(module) or importlib.import_module(module).main
    command.make_context(line, arguments)


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("fit_workloads", "README.md README.md", "'README.md' is no workload"),
        ("two_trees", "--tree old=absent --tree new=.", "--tree absent: a source tree has a folder bullet_graph"),
        ("two_trees", "--tree same=. --tree same=.", "with a name of its own"),
        ("two_trees", "--tree old=. --tree new", "with a name of its own"),
        ("two_trees", "--tree old=. --tree new=. --rate azure:conv", "--rate are TRACE=COUNT"),
        ("two_trees", "--tree old=. --tree new=. --output-json missing/o", "make it first"),
        ("campaign", "pyproject.toml --results {tmp}", "pyproject.toml is no campaign"),
        ("server_overhead", "--model tiny --trace nope --output-json {tmp}/o", "--trace nope --num-prompts 600"),
        ("server_overhead", "--model tiny --engine-options '\"' --output-json {tmp}/o", "No closing quotation"),
        ("soak", "--server-options '\"--model'", "No closing quotation"),
        *(("soak", f"--minutes {minutes}", "at least 0.05, got") for minutes in ("nan", "inf", "0.01")),
        *((tool, "--output-json missing/o", "make it first") for tool in ("soak", "fuzz", "simulator_error")),
    ],
)
def test_what_a_tool_cannot_use_is_refused_in_a_line(
    tool: str, arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BENCH.parent)
    command = importlib.import_module(f"bench.{tool}").main
    result = CliRunner().invoke(command, shlex.split(arguments.format(tmp=tmp_path)))
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


# ---- single measurements, on the tiny model ----


def test_the_server_is_compared_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not in a process of its own: the server alone has one.
    monkeypatch.setattr(server_overhead, "measure", lambda *arguments: parsed(run(*arguments, "--json")))
    path = tmp_path / "overhead.json"
    engine = "--device cpu --max-num-seqs 8 --max-model-len 512 --kv-cache-bytes 4MiB"
    load = ("--trace", "synthetic:conv", "--num-prompts", "3", "--request-rate", "inf")
    options = ("--model", "tiny", "--engine-options", engine, "--repeats", "1", "--limit-percent", "1e9")
    result = CliRunner().invoke(server_overhead.main, [*load, *options, "--output-json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    (both,) = found["runs"]
    assert both["engine"]["total_input_tokens"] == both["server"]["total_input_tokens"] > 0
    assert both["server"]["completed"] == both["engine"]["completed"] > 0
    assert found["comparison"].keys() >= set(server_overhead.COMPARED)


def test_the_medians_of_the_repeats_are_compared() -> None:
    none = dict.fromkeys(("p90_ttft_ms", "p90_tpot_ms", "median_itl_ms", "p99_itl_ms", "output_throughput"))

    def measured(**ttft_ms: float) -> dict[str, dict[str, object]]:
        return {kind: none | {"median_ttft_ms": ms, "median_tpot_ms": 8.0} for kind, ms in ttft_ms.items()}

    pairs = (10, 11), (20, 21), (90, 500)
    comparison = server_overhead.compare([measured(engine=engine, server=server) for engine, server in pairs])
    assert comparison["median_ttft_ms"] == {"engine": 20, "server": 21, "percent": 100 * (21 / 20 - 1)}
    assert comparison["median_tpot_ms"]["percent"] == 0
    assert comparison["p99_itl_ms"] == {"engine": None, "server": None, "percent": None}
