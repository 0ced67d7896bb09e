"""Comparisons from the command line to the table: this engine beside stand-ins of two peers."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import DEFAULT, AsyncMock

import pytest
from cli_runner import refused
from click.testing import CliRunner, Result
from peers_fakes import CompletionsServer, FakeSglang, completions_server, install_fake_sglang, install_fake_vllm

from bench.peers import comparison
from bench.peers.command import compare
from bullet_graph import EngineDeadError
from bullet_graph.cli.bench.sweep_runner import Sweep
from bullet_graph.cli.explain import explain

pytestmark = pytest.mark.timeout(180)

LENGTHS = ((20, 4), (33, 1), (7, 6), (50, 3), (12, 5))
EASY = "ttft:600000 tpot:600000"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    with completions_server() as server:
        yield server


def run(workload: object, path: Path, *options: str, systems: tuple[str, ...] = ("own:mixed:16",)) -> Result:
    named = [part for system in systems for part in ("--system", system)]
    fixed = ("--model", "tiny", "--device", "cpu", "--kv-cache-bytes", "4MiB", "--max-num-seqs", "8")
    arguments = [*fixed, *named, "--workload", str(workload), "--warmup-requests", "2", "--smoke", *options]
    return CliRunner().invoke(compare, [*arguments, "--output-json", str(path)])


def order_of_runs(result: Result) -> list[str]:
    """What was told of each run, up to its figures."""
    return [line.split(": ")[0] for line in result.stderr.splitlines() if " % met" in line]


def test_peers_cache_prefixes_where_prompts_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, (others, _) = install_fake_vllm(monkeypatch), install_fake_sglang(monkeypatch)
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [3, 4]}\n' * 2)
    path = tmp_path / "peers.json"
    result = run(f"{trace}@{EASY}", path, "--rates", "50", systems=("vllm", "sglang", "own:mixed:16"))
    assert result.exit_code == 0, result.stderr
    assert engines[0].args.enable_prefix_caching
    assert not others[0].server_args.disable_radix_cache
    runs = [run for cell in Sweep.read(path).cells for run in cell.runs]
    assert [run["shareable_prompt_tokens"] for run in runs] == [592] * 3


def test_given_rates_with_all_systems_in_turn(
    trace: Path, server: CompletionsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = install_fake_vllm(monkeypatch)
    monkeypatch.setattr("bench.peers.systems.installed_version", lambda _: "0.26.0")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "peers.json"
    systems = ("vllm:512", "own:mixed:16", "vllm", "own:serial", f"openai:{server.url}")
    for_vllm = ("--vllm-option", "max_cudagraph_capture_size=1024", "--vllm-log", str(tmp_path / "log"))
    result = run(f"{trace}@{EASY}", path, "--rates", "50,100", *for_vllm, systems=systems)
    assert result.exit_code == 0, result.stderr
    own = "bullet_graph mixed:16", "bullet_graph serial"
    labels = ["vllm 0.26.0 chunk 512", own[0], "vllm 0.26.0", own[1], server.url]
    assert [line.split(", ")[-2:] for line in order_of_runs(result)] == [
        [label, f"at {rate}/s"] for rate in (50, 100) for label in labels
    ]
    # One vLLM for both of its settings, and nothing of its chatter among the results.
    assert len(engines) == 1
    assert len(set(engines[0].request_ids)) == 2 * (2 + 2 * 5)
    assert "hello" not in result.output
    assert "hello" in (tmp_path / "log").read_text(encoding="utf-8")
    args = engines[0].args
    assert (args.max_cudagraph_capture_size, args.max_model_len) == (1024, 53)
    assert not args.enable_prefix_caching
    assert (Path(args.model) / "config.json").is_file()
    assert args.model not in path.read_text(encoding="utf-8"), "a kept result names no user"

    sweep = Sweep.read(path)
    assert sweep.finished
    cells = sweep.cells
    assert [cell.system for cell in cells] == labels
    assert {(cell.goodput_90, cell.goodput_99, cell.sustained) for cell in cells} == {(100.0, 100.0, False)}
    assert sweep.provenance["versions"].keys() >= {"bullet_graph", "vllm", "torch", "aiohttp"}
    for cell in cells:
        assert [r["request_rate"] for r in cell.runs] == [50, 100]
        for fields in cell.runs:
            assert (fields["completed"], fields["failed"], fields["slo_attainment"]) == (5, 0, 1.0)
            assert fields["total_output_tokens"] == sum(output for _, output in LENGTHS)
            assert 0 < fields["median_ttft_ms"] <= fields["p90_e2el_ms"]
            assert fields["backend"] == cell.system
            assert (fields["sustained"], fields["stable"], fields["counted"]) == (False, True, 5)
    # Every system had the same prompts in a round, and others in the next: none could come out of a cache.
    first, second = (r["prompt_seed"] for r in cells[0].runs)
    assert {tuple(r["prompt_seed"] for r in cell.runs) for cell in cells} == {(first, second)}
    assert first != second
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts) == 2 + 2 * 5
    assert {body["model"] for body in server.bodies} == {"tiny-served"}
    by_system = {cell.system: cell.runs[0] for cell in cells}
    assert by_system[server.url]["system_settings"]["version"] == "1.2.3"
    assert by_system["vllm 0.26.0"]["system_settings"]["engine_args"]["enable_prefix_caching"] is False
    assert by_system["bullet_graph serial"]["system_counters"]["policy_seconds"].keys() == {"serial", "solo"}
    for label in labels:
        assert label in result.stdout


def test_sglang_serves_the_same_requests(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, ended = install_fake_sglang(monkeypatch)
    monkeypatch.setattr("bench.peers.systems.installed_version", lambda _: "0.5.17")
    monkeypatch.setenv("HOME", str(tmp_path))
    path, log = tmp_path / "peers.json", tmp_path / "log"
    words = f"--sglang-log {log} --sglang-option cuda_graph_max_bs_decode=512 --one-at-a-time --burstiness inf"
    systems = ("sglang", "sglang:512", "sglang:pdmux", "own:mixed:16")
    result = run(f"{trace}@{EASY}", path, "--rates", "50,100", *words.split(), systems=systems)
    assert result.exit_code == 0, result.stderr
    assert "hello" not in result.output
    assert "hello" in log.read_text(encoding="utf-8")
    # An engine for each setting, and of each only its own processes are ended.
    assert [engine.server_args.chunked_prefill_size for engine in engines] == [8192, 512, -1]
    assert [engine.server_args.enable_pdmux for engine in engines] == [None, None, True]
    assert [call.args for call in ended.call_args_list] == [(4711,)] * 3
    for engine in engines:
        assert len(set(engine.rids)) == 2 + 2 * 5
        args = engine.server_args
        assert (args.max_running_requests, args.cuda_graph_max_bs_decode, args.load_format) == (8, 512, "dummy")
        assert args.disable_radix_cache
        assert (Path(args.model_path) / "config.json").is_file()
        assert args.model_path not in path.read_text(encoding="utf-8"), "a kept result names no user"
    cells = Sweep.read(path).cells
    assert [cell.system for cell in cells][1:3] == ["sglang 0.5.17 chunk 512", "sglang 0.5.17 pdmux"]
    # Every system had the same prompts; the request that SGLang gave up failed alone.
    assert len({tuple(run["prompt_seed"] for run in cell.runs) for cell in cells}) == 1
    for cell in cells[:3]:
        assert [(run["completed"], run["burstiness"]) for run in cell.runs] == [(4, "inf")] * 2
        assert cell.runs[0]["failures"] == {"SGLang ended the request: no room": 1}
        settings = cell.runs[0]["system_settings"]
        assert (settings["version"], settings["kv_cache_tokens"]) == ("0.5.17", 99)
        assert settings["engine_args"]["incremental_streaming_output"] is True
    assert cells[3].runs[0]["completed"] == 5


def test_sglang_that_dies_ends_the_comparison(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_sglang(monkeypatch)
    monkeypatch.setattr(FakeSglang, "deadly", True)
    result = run(trace, tmp_path / "p.json", "--rates", "50", systems=("sglang",))
    assert "SGLang's scheduler has died" in refused(result)


def test_searches_side_by_side_go_on_after_an_interruption(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peers.json"
    options = ("--first-rate", "40", "--step", "2", "--max-runs", "3")
    systems = ("own:mixed:16", "own:serial")

    # Two warm-ups and three runs go well.
    real = comparison.replay_async
    dies = AsyncMock(side_effect=[*[DEFAULT] * 5, EngineDeadError("the device is gone")], wraps=real)
    monkeypatch.setattr(comparison, "replay_async", dies)
    assert "the device is gone" in refused(run(f"{trace}@{EASY}", path, *options, systems=systems)).split("error: ")[1]
    before = Sweep.read(path)
    assert "sglang_options" not in before.settings  # else no file from before SGLang could go on
    cut = [cell.runs for cell in before.cells]
    assert list(map(len, cut)) == [2, 1]
    assert not before.finished

    monkeypatch.setattr(comparison, "replay_async", real)
    again = run(f"{trace}@{EASY}", path, *options, systems=systems)
    assert again.exit_code == 0, again.stderr
    assert len(order_of_runs(again)) == 3
    sweep = Sweep.read(path)
    assert [[r["request_rate"] for r in cell.runs] for cell in sweep.cells] == [[40, 80, 160]] * 2
    assert [cell.goodput_99 for cell in sweep.cells] == [160, 160]
    assert [cell.runs[: len(runs)] for cell, runs in zip(sweep.cells, cut, strict=True)] == cut
    assert "goodput_99" in again.stdout


def test_all_at_once_one_system_after_the_other(trace: Path, server: CompletionsServer, tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    systems = ("own:mixed:16", f"openai:{server.url}", "own:serial")
    result = run(trace, path, "--all-at-once", "--one-at-a-time", "--repeats", "2", systems=systems)
    assert result.exit_code == 0, result.stderr
    told = [line.split(", ")[-2] for line in order_of_runs(result)]
    assert told == ["bullet_graph mixed:16", "bullet_graph serial"] * 2 + [server.url] * 2
    assert result.stderr.count("starting ") == 2
    for cell in Sweep.read(path).cells:
        assert [run["all_at_once"] for run in cell.runs] == [True, True]
        assert (cell.goodput_90, cell.runs[0]["stable"]) == (None, None)
        assert cell.runs[0]["request_throughput"] > 0
    assert "all at once" in result.stdout


def test_decisions_of_this_engine_go_to_a_file(trace: Path, tmp_path: Path) -> None:
    path, decisions = tmp_path / "peers.json", tmp_path / "decisions.jsonl"
    options = ("--rates", "50", "--own-decisions", str(decisions))
    result = run(trace, path, *options)
    assert result.exit_code == 0, result.stderr
    explained = CliRunner().invoke(explain, [str(decisions), "--json"])
    assert explained.exit_code == 0, explained.output
    assert "own_decisions" not in Sweep.read(path).settings
    assert f"the trace file {decisions} exists" in refused(run(trace, tmp_path / "other.json", *options))


# ---- what fails ----


def test_a_server_that_does_not_tell_its_tokens(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with completions_server(in_pairs=True) as server:
        result = run(trace, path, "--rates", "50", systems=(f"openai:{server.url}",))
    assert result.exit_code == 0, result.stderr
    (cell,) = Sweep.read(path).cells
    (fields,) = cell.runs
    # Of pairs that are not told, only the request of one token can be counted.
    assert (fields["completed"], fields["failed"]) == (1, 4)
    assert all("it must give continuous_usage_stats" in reason for reason in fields["failures"])


def test_a_server_that_refuses_all(
    trace: Path, server: CompletionsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "refuse", "ignore_eos is not known")
    message = refused(run(trace, tmp_path / "p.json", "--rates", "50", systems=(f"openai:{server.url}",)))
    assert "none of the 5 requests of trace.csv could be served" in message
    assert "the server answered 400: ignore_eos is not known" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rates", "20", "--best-peer-only"), "--best-peer-only is for searches"),
        ((), "has no targets to meet"),
        (("--all-at-once", "--burstiness", "2"), "--all-at-once has neither rates nor gaps"),
        (("--rates", "20", "--max-model-len", "52"), "longest request has 53 tokens, more than"),
        (("--rates", "20", "--system", "vllm"), "vllm is not installed"),
        (("--rates", "20", "--system", "sglang:512"), "sglang is not installed in this environment: pip install"),
    ],
)
def test_bad_options(trace: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    path = tmp_path / "p.json"
    assert message in refused(run(trace, path, *options))
    assert not path.exists()


def test_errors_name_flags(trace: Path, tmp_path: Path) -> None:
    assert "--first-rate must be above 0" in refused(run(f"{trace}@ttft:9", tmp_path / "p.json", "--first-rate", "0"))


@pytest.mark.parametrize(
    ("system", "options", "message"),
    [
        ("vllm:512", ("--vllm-option", "no_such=1"), "this vLLM has no option no_such"),
        ("vllm:512", ("--gpu-memory-utilization", "0.95"), "vLLM did not start: Free memory on device"),
        ("vllm:512", ("--max-num-batched-tokens", "256"), "vllm:512 needs a larger engine"),
        ("sglang", ("--sglang-option", "no_such=1"), "this SGLang has no option no_such"),
        ("sglang", ("--sglang-option", "no_such"), "--sglang-option 'no_such': write NAME=VALUE"),
        ("sglang", ("--max-num-seqs", "9"), "SGLang did not start: Not enough memory"),
    ],
)
def test_settings_that_a_peer_refuses(
    trace: Path, tmp_path: Path, system: str, options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_vllm(monkeypatch)
    install_fake_sglang(monkeypatch)
    result = run(trace, tmp_path / "p.json", "--rates", "50", *options, systems=(system,))
    assert (result.exit_code, message in " ".join(result.stderr.split())) == (2, True), result.stderr
