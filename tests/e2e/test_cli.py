"""``bullet-graph bench throughput`` and what all commands share, end to end on the CPU."""

import json
import time
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_runner import TINY, EnergyProbe, parsed, printed, refused, run, write_trace
from click.testing import Result
from engines import Model

from bullet_graph import Engine, EngineDeadError, SamplingParams, __version__
from bullet_graph.cli.bench import replay
from bullet_graph.perf.energy import DeviceMonitor

LENGTHS = ((30, 5), (7, 12), (100, 1))


def bench(*arguments: str, trace: Path | str) -> Result:
    return run("bench", "throughput", *TINY, "--trace", str(trace), *arguments)


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
    assert figures["provenance"]["versions"]["torch"] == version("torch")
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
    trace = write_trace(tmp_path, *LENGTHS, (509, 4), (500, 12))  # the last fits exactly
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


@pytest.mark.usefixtures("no_tokenizer")
def test_conversations_are_tokenized_with_the_models_tokenizer(model: Model, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "The dog sleeps"}, {"from": "gpt", "value": "on and on"}]
    conversations = tmp_path / "sharegpt.json"
    conversations.write_text(json.dumps([{"conversations": turns}]))
    arguments = ("bench", "throughput", "--device", "cpu", "--trace", str(conversations), "--json")
    figures = json.loads(run(*arguments, "--model", str(model.folder), "--kv-cache-bytes", "4MiB").stdout)
    assert figures["load_format"] == "safetensors"
    assert figures["total_input_tokens"] > 1
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
    assert bench("--output-json", str(path), trace=trace).exit_code == 130
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


# ---- bench latency ----


def latency(*arguments: str) -> Result:
    return run("bench", "latency", *TINY, *arguments)


def test_a_rank_moves_its_own_bytes() -> None:
    short = ("--input-len", "20", "--output-len", "6", "--num-iters", "1", "--num-iters-warmup", "0", "--json")
    one, two = (parsed(latency("--tensor-parallel-size", size, *short))["decode_step_bytes"] for size in ("1", "2"))
    assert two < 0.6 * one


def test_latency_figures() -> None:
    start_s = time.perf_counter()
    result = latency(
        *("--batch-size", "3", "--input-len", "20", "--output-len", "6", "--num-iters", "4"),
        *("--num-iters-warmup", "1", "--json"),
    )
    wall_s = time.perf_counter() - start_s
    figures = parsed(result)
    latencies = figures["latencies"]
    assert len(latencies) == figures["num_iters"] == 4
    assert figures["avg_latency"] == pytest.approx(sum(latencies) / 4)
    assert list(figures["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(latencies) <= figures["percentiles"]["10"] <= figures["percentiles"]["99"] <= max(latencies)
    assert sum(latencies) < wall_s
    # A prefill and five decode steps an iteration.
    assert figures["num_steps"] == 4 * 6
    mean_batch_ms = figures["prefill_ms"]["mean"] + 5 * figures["decode_step_ms"]["mean"]
    assert mean_batch_ms == pytest.approx(figures["avg_latency"] * 1e3, rel=0.2)
    # tiny in float32: four layers of 128×(128 + 2×64) + 128×128 + 3×128×384 + 2×128, a norm, a head of 512
    # rows and three embedding rows; then 3 sequences × (23 + 1) tokens × 2 × 4 layers × 64 channels.
    weights = 4 * (128 * 256 + 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128 + 512 * 128 + 3 * 128
    assert figures["decode_step_bytes"] == 4 * (weights + 3 * 24 * 2 * 4 * 64)
    achieved = figures["decode_step_bytes"] / figures["decode_step_ms"]["p50"] / 1e6
    assert figures["achieved_gb_per_s"] == pytest.approx(achieved)
    assert figures["copy_gb_per_s"] > 0
    assert figures["share_of_copy_percent"] == pytest.approx(100 * achieved / figures["copy_gb_per_s"])
    assert figures["engine"]["max_num_seqs"] == 3
    assert figures["provenance"]["device_name"] == "cpu"


def test_latency_table_has_ms_beside_bandwidth() -> None:
    result = latency("--batch-size", "1", "--output-len", "3", "--num-iters", "1", "--num-iters-warmup", "0")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "decode step, median" in line)
    assert " ms · " in line
    assert " GB/s" in line


def test_latency_of_one_token_has_no_decode_step() -> None:
    one = ("--batch-size", "1", "--output-len", "1", "--num-iters", "1", "--num-iters-warmup", "0")
    figures = parsed(latency(*one, "--json"))
    assert figures["decode_step_ms"] is None
    assert figures["achieved_gb_per_s"] is None
    assert figures["prefill_ms"]["p50"] > 0
    assert latency(*one).exit_code == 0


# ---- generate and the console script's front door ----


def generate(*arguments: str, stdin: bytes | None = None) -> Result:
    return run("generate", *TINY, *arguments, stdin=stdin)


def of_model(model: Model, *arguments: str, stdin: bytes | None = None) -> Result:
    sampling = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")
    return run("generate", "--model", str(model.folder), "--device", "cpu", *sampling, *arguments, stdin=stdin)


@pytest.fixture(scope="module")
def expected_text(model: Model) -> str:
    """What the engine itself makes of one prompt."""
    with Engine(str(model.folder), device="cpu") as engine:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = engine.generate("The dog", params, use_tqdm=False)
    return output.outputs[0].text


# ---- what is printed ----


@pytest.mark.usefixtures("no_tokenizer")
def test_ids_are_streamed_where_there_is_no_tokenizer() -> None:
    result = generate("--prompt-ids", "1,2,3", "--max-tokens", "5", "--temperature", "0")
    assert result.exit_code == 0, result.output
    with Engine("tiny", device="cpu", max_model_len=512) as engine:
        (output,) = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert tuple(map(int, result.stdout.split())) == output.outputs[0].token_ids
    assert "Memory ledger" in result.stderr
    assert result.stderr.endswith("tiny: the weights are random, so its text means nothing\n")


def test_text_from_every_source(model: Model, expected_text: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\nThe dog\n   \n", encoding="utf-8-sig")
    for result in (
        of_model(model, "--prompt", "The dog"),
        of_model(model, "--prompt-file", str(prompts)),
        of_model(model, stdin=b"\xef\xbb\xbfThe dog\n"),
    ):
        assert result.exit_code == 0, result.output
        assert result.stdout == f"{expected_text}\n"
    prompts.write_text("one\u2028prompt\r\n", encoding="utf-8")
    assert "===" not in of_model(model, "--prompt-file", str(prompts)).stdout


def test_several_prompts_are_labelled_and_in_order(model: Model, expected_text: str) -> None:
    parts = of_model(model, "--prompt", "The dog", "--prompt", "Another prompt", "--n", "2").stdout.split("=== ")
    assert [part.splitlines()[0] for part in parts[1:]] == [
        "prompt 1, output 1 of 2: The dog",
        "prompt 1, output 2 of 2: The dog",
        "prompt 2, output 1 of 2: Another prompt",
        "prompt 2, output 2 of 2: Another prompt",
    ]
    assert parts[1].endswith(f"The dog\n{expected_text}\n")
    assert parts[2].endswith(f"The dog\n{expected_text}\n")


def test_json_lines(model: Model, expected_text: str) -> None:
    result = of_model(model, "--json", "--logprobs", "2", "--prompt", "The dog", "--prompt-ids", "5,6")
    assert result.stderr == ""
    records = {r["request_id"]: r for r in map(json.loads, result.stdout.splitlines())}
    assert set(records) == {"0", "1"}
    record = records["0"]
    assert record["prompt"] == "The dog"
    assert record["error"] is None
    (output,) = record["outputs"]
    assert output["text"] == expected_text
    assert output["finish_reason"] == "length"
    assert len(output["token_ids"]) == len(output["logprobs"]) == 12
    assert len(output["logprobs"][0]["top"]) == 2
    assert 0 < record["metrics"]["ttft_ms"] <= record["metrics"]["e2e_ms"]
    assert records["1"]["prompt"] is None
    assert records["1"]["prompt_token_ids"] == [5, 6]


def test_chat_uses_the_models_template(model: Model) -> None:
    variables = ("--chat-template-kwargs", '{"speaker": "dog"}')
    result = of_model(model, "--chat", *variables, "--json", "--prompt", "Hello")
    (record,) = map(json.loads, result.stdout.splitlines())
    with Engine(str(model.folder), device="cpu") as engine:
        assert engine.tokenizer is not None
        text = engine.tokenizer.decode(record["prompt_token_ids"], skip_special_tokens=False)
    assert text == "<|bos|>[user] Hello<|eos|>\n[dog] "
    assert record["prompt"] == "Hello"


def test_sampling_follows_the_seed() -> None:
    def ids(seed: str, *others: str) -> str:
        arguments = ("--prompt-ids", "1,2,3", *others, "--seed", seed, "--max-tokens", "8", "--json")
        records = [json.loads(line) for line in generate(*arguments).stdout.splitlines()]
        return next(r["outputs"][0]["token_ids"] for r in records if r["request_id"] == "0")

    assert ids("1") == ids("1", "--prompt-ids", "4,5")
    assert ids("1") != ids("2")


@pytest.mark.usefixtures("no_tokenizer")
@pytest.mark.parametrize("as_json", [False, True])
def test_in_a_batch_the_bad_prompt_fails_alone(as_json: bool) -> None:
    arguments = ("--prompt-ids", "1,2", "--prompt-ids", "999", "--max-tokens", "4")
    result = generate(*arguments, *(["--json"] if as_json else []))
    assert result.exit_code == 2
    assert "error: prompt 2: token id 999" in result.stderr
    if as_json:
        records = {r["request_id"]: r for r in map(json.loads, result.stdout.splitlines())}
        assert "999" in records["1"]["error"]
        assert len(records["0"]["outputs"][0]["token_ids"]) == 4
    else:
        assert len(result.stdout.split()) == 4


# ---- the front door ----


def test_version() -> None:
    assert run("--version").stdout == f"bullet-graph, version {__version__}\n"


def test_help_shows_examples_a_line_each() -> None:
    result = run("generate", "--help")
    assert result.exit_code == 0
    assert "Examples:\n    bullet-graph" in result.stdout
