"""Pieces of the command line that need no engine."""

import dataclasses
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import cli_runner
import click
import pytest
from cli_runner import run
from click.testing import CliRunner, Result
from traces import HEADER, RUN, request, write

from bullet_graph.cli.bench.latency import decode_gaps_ms, prefill_ms
from bullet_graph.cli.engine_run import config_for
from bullet_graph.cli.generate import OrderedPrinter
from bullet_graph.cli.main import main, with_flags
from bullet_graph.cli.options import engine_options, fit_max_num_seqs
from bullet_graph.cli.result_file import check_result_file, to_json, write_result_file
from bullet_graph.cli.tables import print_line
from bullet_graph.config import SETTINGS, EngineConfig, Policy
from bullet_graph.errors import ConfigError
from bullet_graph.perf.explain import Window, summarize_trace, to_chrome_trace
from bullet_graph.perf.metrics import RequestMetrics
from bullet_graph.perf.trace import read_trace
from bullet_graph.slo import Slo


def parse_options(*arguments: str, max_num_seqs: int = 100) -> EngineConfig:
    """The config that a command with the engine's options receives."""
    received: list[EngineConfig] = []

    @click.command()
    @engine_options(max_num_seqs=max_num_seqs)
    def command(config: EngineConfig, trace_decisions: Path | None) -> None:
        assert trace_decisions is None
        received.append(fit_max_num_seqs(config, 7))

    result = CliRunner().invoke(command, ["--model", "m", *arguments], catch_exceptions=False)
    if result.exit_code:
        raise click.ClickException(result.stderr)
    return received[0]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_model_len=9 is more than 8, lower it", "--max-model-len 9 is more than 8, lower it"),
        ("raise max_num_seqs.", "raise --max-num-seqs."),
        ("perf_table='my table.json' is none", "--perf-table my table.json is none"),
        ("leave out compile=True and cuda_graphs=False", "leave out --compile and --no-cuda-graphs"),
        ("dtype must be bfloat16, pass device=cpu", "--dtype must be bfloat16, pass --device cpu"),
        ("the device and its dtype have a model", "the device and its dtype have a model"),
        ("/tmp/max_model_len/seed.json 'max_model_len' x-max_model_len", None),
        ("trace_decisions_of a_table nonesuch=5", None),
    ],
)
def test_messages_name_flags(message: str, shown: str | None) -> None:
    @click.command()
    @engine_options(max_num_seqs=1)
    def command(**_: object) -> None: ...

    assert with_flags(message, command) == (message if shown is None else shown)


def test_keys_of_files_are_not_taken_for_settings(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('format = "bullet_graph capture plan"\nversion = 1\nmodel = "tiny"\ndtype = "int3"\nnum_sms = 4\n')
    result = run("simulate", "--trace", "synthetic:conv", "--capture-plan", str(plan))
    assert result.exit_code == 2
    assert "--" not in result.stderr.replace("--capture-plan", "")


def test_options_default_to_the_engines_own_settings() -> None:
    assert parse_options() == EngineConfig(model="m", max_num_seqs=7)
    assert parse_options(max_num_seqs=3).max_num_seqs == 3, "not raised to the number of sequences"


def test_every_option_reaches_its_setting() -> None:
    config = EngineConfig(
        model="m",
        load_format="dummy",
        dtype="float16",
        device="cpu",
        policy=Policy("mixed", 64),
        prompt_order="longest-output",
        slo=Slo(ttft_ms=500),
        perf_table="roofline",
        capture_cache="folder",
        self_check="all",
        ready="hot",
        max_num_seqs=9,
        max_num_batched_tokens=128,
        max_model_len=99,
        seed=5,
        gpu_memory_utilization=0.5,
        kv_cache_bytes=2 * 1024**2,
        partition_backend="green",
        decode_sms=(32, 48),
    )
    given = {
        name: value
        for name, value in config.values().items()
        if value != SETTINGS[name].default and name not in ("model", "decode_sms")
    }
    options = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert parse_options(*options, "--decode-sms", "32,48") == config
    assert parse_options("--capture-plan", "plan.toml").capture_plan == "plan.toml"
    assert not parse_options("--no-cuda-graphs").cuda_graphs
    assert parse_options("--compile").compile
    assert parse_options("--capture-cache", "off").capture_cache is None


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("8GiB", 8 * 1024**3), ("1.5 kb", 1500), ("2TB", 2 * 10**12), ("512mib", 512 * 1024**2)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_options("--kv-cache-bytes", text).kv_cache_bytes == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8 G", "8GiBs", "-1", "1e9", "nan"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(click.ClickException, match="8GiB"):
        parse_options("--kv-cache-bytes", text)


@pytest.mark.parametrize(
    ("program", "module", "shown"),
    [
        ("/home/somebody/.venv/bin/bullet-graph", None, ["bullet-graph"]),
        ("/somewhere/bullet_graph/__main__.py", "bullet_graph.__main__", ["bullet-graph"]),
        ("/somewhere/bench/peers/__main__.py", "bench.peers.__main__", ["python", "-m", "bench.peers"]),
        ("bench/tool.py", None, ["python", "bench/tool.py"]),
    ],
)
def test_a_result_holds_its_command_line(
    program: str, module: str | None, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without secrets, and without the folders of who ran it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None if module is None else ModuleSpec(module, None))
    arguments = ["bench", "--api-key", "secret", "--api-key=other", "--model", f"{tmp_path}/m", "http://me:p@ss@a/@b"]
    monkeypatch.setattr(sys, "argv", [program, *arguments, "--trace=/home/somebody/t.csv"])
    argv = json.loads(to_json({"figure": 1.5}))["argv"]
    told = ["bench", "--api-key", "***", "--api-key=***", "--model", "m", "http://***@a/@b", "--trace=~/t.csv"]
    assert argv == [*shown, *told]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_told_in_a_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "bullet_graph", "capture", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device; free some space\n")


def test_result_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    write_result_file(path, "{}\udcff")
    assert path.read_text() == "{}?\n"
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(ConfigError, match=r"result.json cannot be written \(disk full\); what it would hold"):
        write_result_file(path, "other")
    with pytest.raises(ConfigError, match=r"\(disk full\)$"):
        write_result_file(path, b"a picture")
    assert capsys.readouterr().out == "other\n"
    assert path.read_text() == "{}?\n"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="JSON"):
        to_json({"figure": float("nan")})


def test_streams_that_run_together_are_printed_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    printer = OrderedPrinter(["first", "second", "third"])
    printer.push(1, "b1 ")
    printer.push(0, "a1 ")
    printer.push(2, "c1 ")
    assert capsys.readouterr().out == "=== first\na1 "
    printer.push(2, "c2")
    printer.end(2)
    printer.push(0, "a2")
    printer.end(0)
    assert capsys.readouterr().out == "a2\n=== second\nb1 "
    printer.push(1, "b2")
    printer.end(1)
    printer.end(1)
    assert capsys.readouterr().out == "b2\n=== third\nc1 c2\n"


def test_decode_gaps_are_of_the_whole_batch_only() -> None:
    # The second request starts at 2.0, when the first has been decoding since 1.0; the first ends at 5.0.
    first = RequestMetrics(0.0, 0.5, (1.0, 1.5, 2.0, 3.0, 5.0))
    second = RequestMetrics(0.25, 0.5, (2.0, 3.0, 5.0, 9.0))
    assert decode_gaps_ms([first, second]) == [1000.0, 2000.0]
    assert prefill_ms([first, second]) == 2000.0
    assert decode_gaps_ms([RequestMetrics(0.0, 0.0, (1.0,))]) == []


@pytest.mark.parametrize(
    ("policies", "engine_policy", "decode_sms"),
    [
        ("mixed:64", "mixed:64", ()),
        ("split:48", "split:48", (48,)),
        ("serial mixed", "mixed", ()),
        ("serial mixed:64", "serial", ()),
        ("mixed:64 mixed:2048", "mixed:2048", ()),
        ("mixed auto", "auto", ()),
        ("mixed split:48 split:64", "split", (48, 64)),
        # Preparing the one named would leave auto and split no other to choose.
        ("auto split:48", "split", ()),
        ("split split:48", "split", ()),
    ],
)
def test_the_engine_can_serve_as_each_policy(policies: str, engine_policy: str, decode_sms: tuple[int, ...]) -> None:
    parsed = tuple(Policy.parse(policy) for policy in policies.split())
    slo = Slo(tpot_ms=15)
    config = config_for(EngineConfig(model="tiny", seed=3), parsed, slo)
    assert (str(config.policy), config.decode_sms, config.slo, config.seed) == (engine_policy, decode_sms, slo, 3)
    own = config_for(EngineConfig(model="tiny", decode_sms=(48, 32)), parsed, slo)
    assert own.decode_sms[:2] == (48, 32)
    assert len(set(own.decode_sms)) == len(own.decode_sms)


# ---- explain: tables, JSON, pictures and refusals ----


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
    assert "│ split, prefill lane, up to 512 rows │ 1 │ 20.0 % │ 20.0 % │ +20.0 % │" in words
    assert "│ tpot: split │ 12 │" in words
    assert "│ [bold]late │ TTFT │ 300.0 │ 100.0 │ queued 75.0 %, prefill 25.0 % │" in words
    assert "… and 3 more (all are in the JSON)" in words
    assert "? and 3 more" in CliRunner(charset="latin-1").invoke(main, ["explain", str(missed_file)]).stdout


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
    assert json.loads(target.read_text(encoding="utf-8")) == to_chrome_trace(read_trace(run_file), Window(0.0, 1e6))
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
    monkeypatch.delitem(sys.modules, "bullet_graph.cli.plots", raising=False)
    assert "pip install 'bullet-graph[bench]'" in refused(run_file, "--timeline", tmp_path / "t.svg")
    assert not (tmp_path / "t.svg").exists()


def test_outputs_that_cannot_be(tmp_path: Path, run_file: Path) -> None:
    assert "must end in .svg or .png" in refused(run_file, "--timeline", tmp_path / "t.pdf")
    assert "'FILE' is that file" in refused(run_file, "--chrome-trace", run_file, "--overwrite")
    assert "does not exist; make it first" in refused(run_file, "--chrome-trace", tmp_path / "no" / "t.json")
    assert "this is a folder" in refused(run_file, "--chrome-trace", tmp_path)
    with pytest.raises(ConfigError, match="the file exists; give another name"):
        check_result_file(run_file, overwrite=None)
    with pytest.raises(ConfigError, match="a folder or a device"):
        check_result_file(Path("/dev/null"), overwrite=True)
    assert run_file.read_text(encoding="utf-8").startswith('{"type": "header"')


@pytest.mark.parametrize(
    "part", [("--from", "2", "--to", "3"), ("--from", "-1"), ("--from", "0.2", "--to", "0.1"), ("--from", "nan")]
)
def test_parts_that_cannot_be(run_file: Path, part: tuple[str, ...]) -> None:
    assert "the trace is" in refused(run_file, *part)


def test_a_line_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a:100:b [red]c")
    assert capsys.readouterr().out == "a:100:b [red]c\n"
