"""``bullet-graph simulate``, end to end; no GPU and no engine on a device is needed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runner import parsed, refused, run
from click.testing import Result
from fakes.perf_tables import H200_KEY, h200_table, interrupted_table
from programs import printed_by

from bullet_graph.cli.replay_options import spread_targets
from bullet_graph.models.config import GPU_HEAD_DIMS, with_padded_heads
from bullet_graph.models.presets import load_model_config
from bullet_graph.perf.table import shape_numbers, write_table
from bullet_graph.perf.trace import read_trace

TARGETS = ("--goodput", "ttft:500", "tpot:15")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "h200.json"
    write_table(h200_table(), path)
    return path


def simulate(*arguments: str, trace: str = "azure:conv", gpu: object = "roofline:h200") -> Result:
    return run("simulate", "--gpu", str(gpu), "--trace", trace, "--num-prompts", "30", *arguments)


def test_one_policy_has_the_flat_fields_of_vllms_serving_benchmark(table: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    result = simulate(
        *("--request-rate", "20", *TARGETS, "--policy", "auto", "--output-json", str(output), "--json"), gpu=table
    )
    flat = parsed(result)
    assert json.loads(output.read_text()) == flat
    assert isinstance(flat["argv"], list)
    served = {"num_prompts": 30, "completed": 30, "failed": 0}
    assert {"backend": "bullet-graph simulate", "model_id": "llama-3.1-8b", **served}.items() <= flat.items()
    assert (flat["request_rate"], flat["burstiness"], flat["max_concurrency"]) == (20, 1, None)
    assert flat["request_throughput"] == pytest.approx(30 / flat["duration"])
    assert 0 < flat["request_goodput"] <= flat["request_throughput"]
    assert 0 < flat["median_tpot_ms"] < flat["median_ttft_ms"] < flat["median_e2el_ms"]
    assert {"policy": "auto", "slo": "ttft:500ms tpot:15ms", "performance": "measured table"}.items() <= flat.items()
    assert flat["prompt_order"] == "arrival"
    assert sum(flat["policy_shares"].values()) == pytest.approx(1)
    assert "ttfts" not in flat
    # Of the H200's memory, as an engine there would have it; buffers of piecewise graphs take 1,200.
    assert flat["kv_cache_tokens"] == pytest.approx(851_800, abs=300)


def test_the_same_arguments_give_the_same_figures() -> None:
    arguments = ("--request-rate", "20", "--policy", "auto", *TARGETS, "--save-detailed", "--json")
    first, again, other = (parsed(simulate(*arguments, "--seed", seed)) | {"date": None} for seed in ("0", "0", "1"))
    assert first == again
    assert first["start_times"] != other["start_times"]
    assert len(first["ttfts"]) == len(first["itls"]) == 30
    assert sum(first["output_lens"]) == first["total_output_tokens"]


def test_recorded_arrivals_and_failed_requests() -> None:
    flat = parsed(simulate("--request-rate", "trace", "--time-scale", "0.1", "--max-model-len", "1500", "--json"))
    assert (flat["request_rate"], flat["burstiness"]) == ("trace", None)
    assert flat["failed"] > 0
    assert flat["completed"] + flat["failed"] == 30
    assert (flat["request_goodput"], flat["slo_attainment"]) == (None, None)
    assert "more than max_model_len=1500" in simulate("--request-rate", "trace", "--max-model-len", "1500").stdout


@pytest.mark.parametrize(
    "targets",
    [
        *("--goodput ttft:500 tpot:15", "--goodput ttft:500,tpot:15", "--goodput=ttft:500 tpot:15"),
        "--goodput tpot:15ms --goodput ttft:500ms",
    ],
)
def test_targets_can_be_written_in_several_ways(targets: str) -> None:
    assert parsed(simulate(*targets.split(), "--num-prompts", "2", "--json"))["slo"] == "ttft:500ms tpot:15ms"


def test_only_targets_follow_the_option() -> None:
    assert spread_targets(["--goodput", "ttft:1", "tpot:2", "--policy", "mixed:8", "x:1"]) == [
        *("--goodput", "ttft:1", "--goodput", "tpot:2", "--policy", "mixed:8", "x:1")
    ]
    for unchanged in (["--policy", "mixed:8"], ["--goodput", "--goodput"], ["--goodput"]):
        assert spread_targets(unchanged) == unchanged


def test_decisions_are_traced(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    flat = parsed(simulate("--request-rate", "20", *TARGETS, "--trace-decisions", str(path), "--json"))
    trace = read_trace(path)
    assert (trace.header.policy, trace.header.num_sms) == ("auto", 132)
    assert len(trace.requests) == 30
    assert {request.tpot_limit_ms for request in trace.requests} == {15}
    assert trace.end_s == pytest.approx(flat["duration"])
    assert "exists" in refused(simulate("--trace-decisions", str(path)))


def test_a_sweep_finds_each_policies_goodput_and_draws_it(table: Path, tmp_path: Path) -> None:
    plot, output = tmp_path / "sweep.svg", tmp_path / "sweep.json"
    result = simulate(
        *(*TARGETS, "--sweep", "--smoke", "--policy", "mixed:2048", "--policy", "auto"),
        *("--first-rate", "30", "--decode-sms", "48,32", "--plot", str(plot), "--output-json", str(output)),
        gpu=table,
    )
    assert result.exit_code == 0, result.output
    assert "mixed:2048" in result.stdout
    assert "Not sustained: runs of less than 120 s or 300 requests" in " ".join(result.stdout.split())
    assert plot.read_text().lstrip().startswith("<?xml")
    for policy in json.loads(output.read_text())["policies"].values():
        rates = [flat["request_rate"] for flat in policy["results"]]
        assert rates == sorted(rates)
        assert policy["goodput_99"] < policy["goodput_90"]
        shares = [f["slo_attainment"] for f in policy["results"] if f["request_rate"] <= policy["goodput_90"]]
        assert shares[-1] >= 0.9
        assert not policy["sustained"]
        assert {(flat["sustained"], flat["counted"]) for flat in policy["results"]} == {(False, 30)}
    assert "the file exists" in refused(simulate(*TARGETS, "--sweep", "--plot", str(plot)))


def test_a_sustained_sweep_ends_where_the_trace_does(tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    targets = ("--goodput", "ttft:2000", "tpot:15")  # prompts are long, outputs short
    options = ("--num-prompts", "300", "--sweep", *targets, "--policy", "mixed", "--first-rate", "2.5")
    assert "≥ 2.50" in simulate(*options, "--output-json", str(output), trace="azure:code").stdout
    found = json.loads(output.read_text())["policies"]["mixed"]
    (only,) = found.pop("results")
    assert found == {
        "goodput_90": 2.5,
        "goodput_90_below": None,
        "goodput_99": 2.5,
        "goodput_99_below": None,
        "sustained": True,
    }
    assert (only["sustained"], only["stable"], only["slo_attainment"]) == (True, True, 1)
    # About 25 arrive in the first 10 s.
    assert 260 < only["counted"] < 290
    assert only["p99_ttft_ms"] <= only["max_ttft_ms"]
    assert only["waiting_tokens_end"] <= only["waiting_tokens_half"] + 2 * only["prefill_tokens_per_s"]


def test_a_sweep_that_holds_nowhere_says_so(tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    options = ("--goodput", "ttft:0.001", "--sweep", "--smoke", "--policy", "mixed", "--first-rate", "4")
    result = simulate(*options, "--output-json", str(output), trace="azure:code")
    assert result.exit_code == 0, result.output
    assert "< 0.41" in result.stdout
    assert json.loads(output.read_text())["policies"]["mixed"]["goodput_90"] is None


def test_a_table_that_does_not_fit_is_refused(table: Path, tmp_path: Path) -> None:
    assert "another model" in refused(simulate("--model", "qwen3-8b", gpu=table))
    unfinished = tmp_path / "unfinished.json"
    write_table(interrupted_table(), unfinished)
    assert "interrupted" in refused(simulate(gpu=unfinished))
    edited = tmp_path / "edited.json"
    edited.write_text(table.read_text().replace('"ms": ', '"ms": 1', 1))
    assert "edited" in refused(simulate(gpu=edited))


@pytest.mark.parametrize("lengths", [(), ("--max-model-len", "4096")], ids=["windows", "without windows"])
def test_the_table_of_a_model_with_padded_heads_and_windows(lengths: tuple[str, ...], tmp_path: Path) -> None:
    published = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
    shape = {"hidden_size": 960, "num_attention_heads": 12, "num_hidden_layers": 4, "sliding_window": 4096}
    more = {"vocab_size": 1000, "intermediate_size": 2048, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(published | shape | more), encoding="utf-8")
    model = with_padded_heads(load_model_config(tmp_path), GPU_HEAD_DIMS)
    assert (model.head_dim, model.windows) == (128, (4096,) * 4)
    write_table(h200_table(key=replace(H200_KEY, shape=shape_numbers(model))), file := tmp_path / "table.json")
    found = parsed(simulate("--model", str(tmp_path), "--max-num-seqs", "1", "--json", *lengths, gpu=file))
    assert (found["performance"], found["prefix_cache_queries"] > 0) == ("measured table", len(lengths) > 0)


def test_several_ranks(table: Path) -> None:
    ranks = ("--tensor-parallel-size", "2")
    assert "no performance table h200_llama-3.1-8b_bfloat16-tp2.json is known" in refused(simulate(*ranks, gpu="h200"))
    message = refused(simulate(*ranks, gpu=table))
    assert "--tensor-parallel-size 2 required, 1 found. Take the table h200_llama-3.1-8b_bfloat16-tp2.json" in message
    assert "must divide what the ranks share" in refused(simulate("--tensor-parallel-size", "5", gpu=table))
    alone, two = (parsed(simulate(*some, "--json", gpu="roofline:h200")) for some in ((), ranks))
    assert (alone["tensor_parallel_size"], two["tensor_parallel_size"]) == (1, 2)
    # A rank's half of the weights takes half the time to read, and leaves more room for keys and values.
    assert two["median_tpot_ms"] < 0.8 * alone["median_tpot_ms"]
    assert two["kv_cache_tokens"] > 2 * alone["kv_cache_tokens"]


def test_a_gpu_of_unknown_memory_needs_the_caches_size() -> None:
    flat = parsed(simulate("--kv-cache-bytes", "20GiB", "--json", gpu="roofline:generic"))
    # 2 MiB a block of 16 tokens, one of them padding.
    assert flat["kv_cache_tokens"] == (20 * 512 - 1) * 16
    assert flat["performance"] == "roofline of an unmeasured GPU"


def test_no_torch_is_imported() -> None:
    command = ("simulate", "--trace", "azure:conv", "--num-prompts", "20", "--sweep", "--smoke", *TARGETS)
    code = (
        "import sys\n"
        "from bullet_graph.cli.main import main\n"
        "main(('simulate', '--help'), standalone_mode=False)\n"
        f"main({command!r}, standalone_mode=False)\n"
        "assert not {'torch', 'triton', 'flashinfer'} & set(sys.modules)\n"
    )
    printed = printed_by(code)
    assert "--goodput" in printed
    assert "goodput_90" in printed


def test_a_model_of_experts_by_arithmetic() -> None:
    arguments = ("--request-rate", "10", "--policy", "auto", "--policy", "mixed", *TARGETS, "--json")
    for flat in parsed(simulate(*arguments, "--model", "qwen3-30b-a3b"))["results"]:
        assert flat["completed"] == 30
        # One row reads 6 GB, as many as touch every expert 60 GB: 1.7 to 17 ms at 3.6 TB/s.
        assert 2 < flat["median_tpot_ms"] < 20
