"""``bullet-graph bench throughput`` and what all commands share, end to end on the CPU."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cli_runner import TINY, EnergyProbe, printed, refused, run, write_trace
from click.testing import Result
from engines import Model

from bullet_graph import Engine, EngineDeadError
from bullet_graph.cli.bench import replay
from bullet_graph.perf.energy import DeviceMonitor

LENGTHS = ((30, 5), (7, 12), (100, 1))


def bench(*arguments: str, trace: Path | str) -> Result:
    return run("bench", "throughput", *TINY, "--trace", str(trace), *arguments)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path, *LENGTHS)


# ---- bench throughput ----


def test_throughput_counts_what_it_served(trace: Path) -> None:
    options = ("--policy", "serial:64", "--seed", "3", "--prompt-order", "longest-output")
    figures = printed(bench("--json", *options, trace=trace))
    counts = {"num_requests": 3, "num_failed": 0, "num_preemptions": 0}
    counts |= {"total_input_tokens": 137, "total_output_tokens": 18, "total_num_tokens": 155}
    told = {"model": "tiny", "load_format": "dummy", "dtype": "float32", "policy": "serial:64", "seed": 3}
    assert (counts | told | {"trace": "trace.csv"}).items() <= figures.items()
    elapsed = figures["elapsed_time"]
    assert figures["requests_per_second"] == pytest.approx(3 / elapsed)
    assert figures["tokens_per_second"] == pytest.approx(155 / elapsed)
    assert figures["output_tokens_per_second"] == pytest.approx(18 / elapsed)
    # 137 prompt tokens in forwards of at most 64, then 11 decode steps for the longest output.
    assert figures["num_steps"] == 3 + 11
    assert 0 < figures["kv_blocks_peak"] <= figures["kv_blocks_total"]
    assert 0 < figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p99"] <= elapsed * 1e3
    engine = {"max_num_seqs": 1024, "max_model_len": 512, "prompt_order": "longest-output"}
    assert engine.items() <= figures["engine"].items()
    assert figures["provenance"]["device_name"] == "cpu"
    assert figures["provenance"]["versions"]["torch"] == torch.__version__
    assert figures["device"].pop("num_samples") == 0
    energies = [figures[name] for name in ("energy_joules", "joules_per_token", "joules_per_output_token")]
    assert {*figures["device"].values(), *energies} == {None}, "without NVML none is made up"


def test_energy_is_that_of_the_run(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "watch_device", lambda _: DeviceMonitor(EnergyProbe()))
    figures = json.loads(bench("--json", trace=trace).stdout)
    assert figures["energy_joules"] == 31
    assert figures["joules_per_token"] == pytest.approx(31 / 155)
    assert figures["joules_per_output_token"] == pytest.approx(31 / 18)
    assert figures["device"]["power_w"] == {"min": 650.0, "mean": 650.0, "max": 650.0}
    table = bench(trace=trace).stdout
    for text in ("energy, J", "31", "power, mean, W", "650"):
        assert text in table


def test_a_request_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    fits_exactly = (500, 12)
    trace = write_trace(tmp_path, *LENGTHS, (509, 4), fits_exactly)
    figures = json.loads(bench("--json", trace=trace).stdout)
    assert (figures["num_requests"], figures["num_failed"], figures["total_output_tokens"]) == (4, 1, 18 + 12)
    (failure,) = figures["failures"]
    assert failure["index"] == 3
    assert "509 + 4" in failure["reason"]
    assert "max_model_len=512" in failure["reason"]
    result = bench("--no-warmup", trace=trace)
    for text in ("4 / 1", "637 / 30", "request 3 failed"):
        assert text in result.stdout
    assert "Memory ledger" in result.stderr
    assert "KV cache" in result.stderr


def test_no_request_served_is_an_error(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, (600, 2), (700, 2))
    assert "2 of the 2 requests of trace.csv are longer" in refused(bench("--json", trace=trace))


def test_conversations_are_tokenized_with_the_models_tokenizer(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"from": "human", "value": "The dog sleeps"}, {"from": "gpt", "value": "on and on"}]
    conversations = tmp_path / "sharegpt.json"
    conversations.write_text(json.dumps([{"conversations": turns}]))
    arguments = ("bench", "throughput", "--device", "cpu", "--trace", str(conversations), "--json")
    figures = json.loads(run(*arguments, "--model", str(model.folder), "--kv-cache-bytes", "4MiB").stdout)
    assert figures["load_format"] == "safetensors"
    assert figures["total_input_tokens"] > 1
    monkeypatch.setattr("bullet_graph.runtime.resolve.PRESETS_OF_BYTES", frozenset())
    assert "tokenizer" in refused(run(*arguments, "--model", "tiny"))


def test_a_result_file_is_overwritten_when_asked(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    replaced = bench("--json", "--output-json", str(path), "--overwrite", trace=trace)
    assert json.loads(path.read_text()) == json.loads(replaced.stdout)


@pytest.mark.parametrize("command", ["throughput", "latency", "generate"])
def test_every_decision_can_be_written(command: str, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    arguments = {
        "throughput": ("bench", "throughput", "--trace", str(trace), "--no-warmup"),
        "latency": ("bench", "latency", "--batch-size", "3", "--num-iters", "1", "--num-iters-warmup", "0"),
        "generate": ("generate", *(word for ids in "123" for word in ("--prompt-ids", ids))),
    }[command]
    arguments = (*arguments, *TINY, "--json", "--trace-decisions", str(path))
    assert run(*arguments).exit_code == 0
    assert json.loads(run("explain", str(path), "--json").stdout)["requests"]["completed"] == 3

    path.write_text("precious")
    assert "exists" in refused(run(*arguments))
    assert path.read_text() == "precious"
    if command != "generate":
        assert run(*arguments, "--overwrite").exit_code == 0
        assert run("explain", str(path)).exit_code == 0


# ---- interruptions and failures ----


def test_ctrl_c_shuts_the_engine_down(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shut_down: list[Engine] = []
    shutdown = Engine.shutdown

    def record_shutdown(engine: Engine) -> None:
        shut_down.append(engine)
        shutdown(engine)

    monkeypatch.setattr(Engine, "step", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(Engine, "shutdown", record_shutdown)
    path = tmp_path / "result.json"
    result = bench("--output-json", str(path), trace=trace)
    assert result.exit_code == 130
    assert len(shut_down) == 1
    assert not path.exists()


def test_a_failing_engine_shows_where(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = EngineDeadError("the engine failed: boom")
    error.__cause__ = RuntimeError("boom")
    monkeypatch.setattr(Engine, "step", Mock(side_effect=error))
    message = refused(bench("--json", trace=trace))
    assert "RuntimeError: boom" in message
    assert message.endswith("error: the engine failed: boom\n")


def test_an_unexpected_exception_keeps_its_traceback(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "step", Mock(side_effect=ZeroDivisionError))
    result = bench("--json", trace=trace)
    assert (result.exit_code, type(result.exception)) == (1, ZeroDivisionError)
