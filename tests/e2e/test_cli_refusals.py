"""What the commands refuse: exit code 2 and a message, before an engine is built."""

import shlex
from pathlib import Path

import pytest
import torch
from cli_runner import TINY, refused, run

from bullet_graph import Engine

COMMANDS = {
    "generate": ("generate", *TINY, "--prompt-ids", "1"),
    "throughput": ("bench", "throughput", *TINY, "--json"),
    "latency": ("bench", "latency", *TINY),
    "simulate": ("simulate", "--gpu", "roofline:h200", "--trace", "azure:conv", "--num-prompts", "30"),
    "capture plan": ("capture", "plan", "--trace", "azure:conv", "--num-prompts", "60"),
    "doctor": ("doctor",),
    "profile": ("profile",),
}
PLAN = "--model llama-3.1-8b --request-rate 18"
TARGETS = "--goodput ttft:500 tpot:15"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("generate", "--max-tokens 0", "max_tokens must be an integer ≥ 1, got 0"),
        ("generate", "--temperature nan", "temperature must be in [0, 1e+06], got nan"),
        ("generate", "--top-p 0", "top_p"),
        ("generate", "--min-p 2", "min_p"),
        ("generate", "--n 0", "n must be"),
        ("generate", "--logprobs 21 --json", "logprobs"),
        ("generate", "--logprobs 1", "--json"),
        ("generate", "--stop ''", "stop"),
        ("generate", "--chat", "--chat needs texts"),
        ("generate", "--policy solo", "unknown policy 'solo'"),
        ("generate", "--prompt-ids 1,x", "1,2,3"),
        ("generate", "--prompt-file missing.txt", "missing.txt"),
        ("throughput", "", "--trace"),
        ("throughput", "--trace missing.csv", "missing.csv"),
        ("throughput", "--trace nonsense", "azure:conv"),
        ("throughput", "--trace synthetic:nonsense", "nonsense"),
        ("throughput", "--trace azure:conv --policy mixed:0", "unknown policy 'mixed:0'"),
        ("throughput", "--trace azure:conv --max-num-seqs 0", "0 is not in the range x>=1"),
        ("throughput", "--trace azure:conv --gpu-memory-utilization nan", "gpu_memory_utilization"),
        ("throughput", "--trace azure:conv --kv-cache-bytes 8XB", "8XB"),
        ("throughput", "--trace azure:conv --num-prompts 0", "--num-prompts"),
        ("throughput", "--trace azure:conv --output-json missing/result.json", "does not exist"),
        ("throughput", "--trace azure:conv --output-json o --trace-decisions o", "give another name"),
        ("latency", "--output-json missing/result.json", "does not exist"),
        ("latency", "--batch-size 8 --max-num-seqs 4", "batch_size=8"),
        ("latency", "--input-len 500 --output-len 13", "max_model_len=512"),
        ("latency", "--batch-size 0", "--batch-size"),
        ("latency", "--num-iters 0", "--num-iters"),
        ("latency", "--output-len 0", "--output-len"),
        ("simulate", "--request-rate 0", "request_rate must be a number above 0"),
        ("simulate", "--policy split:50", "50"),
        ("simulate", "--policy split --decode-sms 30", "30 SMs is not in the performance table"),
        ("simulate", "--sweep", "give some"),
        ("simulate", f"--sweep {TARGETS} --request-rate trace", "leave out"),
        ("simulate", "--plot x.svg", "add --sweep"),
        ("simulate", f"--sweep {TARGETS} --plot x.pdf", ".svg or .png"),
        ("simulate", f"--sweep {TARGETS} --plot missing/x.svg", "make it first"),
        ("simulate", "--trace-decisions t --policy mixed --policy auto", "one run"),
        ("simulate", "--model qwen3-0.6b --max-model-len 50000", "model's own limit"),
        ("simulate", "--kv-cache-bytes 1MiB", "KV cache for one sequence"),
        ("simulate", "--output-json missing/r.json", "does not exist"),
        ("simulate", "--gpu roofline:abacus", "abacus"),
        ("simulate", "--gpu abacus", "abacus"),
        ("simulate", "--gpu missing.json", "missing.json"),
        ("simulate", "--gpu roofline:generic", "--kv-cache-bytes"),
        ("capture plan", f"{PLAN} --memory-gb 0.005", "the whole GPU needs a graph of max_num_seqs=256 rows"),
        ("capture plan", f"{PLAN} --time-s 0.01", "raise --memory-gb or --time-s"),
        ("capture plan", f"{PLAN} --time-s 0", "0.0 is not in the range"),
        ("capture plan", f"{PLAN} --gpu abacus", "no performance table abacus_llama-3.1-8b_bfloat16.json"),
        ("capture plan", f"{PLAN} --model llama-3.2-1b", "no performance table h200_llama-3.2-1b"),
        ("capture plan", f"{PLAN} --model gpt-9", "unknown model 'gpt-9'"),
        ("capture plan", f"{PLAN} --slo soon", "is no latency target"),
        ("capture plan", f"{PLAN} --request-rate often", "is no rate"),
        ("capture plan", f"{PLAN} --trace azure:none", "unknown excerpt"),
        ("capture plan", f"{PLAN} --output missing/plan.toml", "the folder missing does not exist"),
        ("doctor", "--partition-backend mig", "mig"),
        ("doctor", "--decode-sms many", "32,48,64"),
        ("doctor", "--device tpu", "tpu"),
        ("doctor", "--calibrate --device cuda", "--calibrate takes no --device"),
        ("doctor", "--calibrate --decode-sms 16", "--calibrate takes no --decode-sms"),
        ("profile", "", "Missing option '--model'"),
        ("profile", "--model tiny --decode-sms many", "no list of numbers"),
        ("profile", "--model tiny --time-budget-s 0", "--time-budget-s"),
        ("profile", "--model tiny --seed -1", "--seed"),
        ("profile", "--model tiny", "a profile measures a GPU"),
        # What the machine lacks comes first: no other option could mend it.
        ("profile", "--model nonesuch", "sees no CUDA device"),
    ],
)
def test_bad_options_are_refused(
    command: str, arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(Engine, "__init__", lambda *_, **__: pytest.fail("the engine was built"))
    assert message in refused(run(*COMMANDS[command], *shlex.split(arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-ids", ""), "the prompt is empty"),
        (("--prompt-ids", "1,512"), "token id 512 is outside the vocabulary of 512"),
        (("--prompt-ids", "-1"), "token id -1"),
        (("--prompt-ids", ",".join("1" * 512)), "max_model_len=512"),
        (("--prompt", "text"), "tokenizer"),
        (("--prompt", "text", "--chat"), "tokenizer.json"),
        (("--prompt-ids", "1", "--stop", "x"), "stop strings need a tokenizer"),
        (("--prompt-ids", "1", "--kv-cache-bytes", "1kB"), "kv_cache_bytes"),
        (("--prompt-ids", "1", "--capture-plan", "llama-3.1-8b_bfloat16"), "leave out capture_plan"),
    ],
)
@pytest.mark.usefixtures("no_tokenizer")
def test_the_engine_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(run("generate", *TINY, *arguments))


def test_prompts_that_are_no_text(tmp_path: Path) -> None:
    path, latin1 = tmp_path / "prompts.txt", "Grüße".encode("latin-1")
    assert "UTF-8" in refused(run("generate", *TINY, stdin=latin1))
    for content, message in ((latin1, "UTF-8"), (b"\n \n", "found none")):
        path.write_bytes(content)
        assert message in refused(run("generate", *TINY, "--prompt-file", str(path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    "command",
    ["bench throughput --trace azure:conv", "bench latency", "generate --prompt-ids 1"],
)
def test_a_gpu_asked_for_where_there_is_none(command: str) -> None:
    assert "no CUDA device" in refused(run(*command.split(), "--model", "tiny", "--device", "cuda"))
