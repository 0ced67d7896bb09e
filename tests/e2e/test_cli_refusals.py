"""What the commands refuse: exit code 2 and a message, before an engine is built or a file is written."""

import shlex
from pathlib import Path

import pytest
from cli_runner import TINY, refused, run, write_trace

from bullet_graph import Engine
from bullet_graph.cli.bench import startup

COMMANDS = {
    "generate": ("generate", *TINY, "--prompt-ids", "1"),
    "empty stdin": ("generate", *TINY),
    "throughput": ("bench", "throughput", *TINY, "--json"),
    "latency": ("bench", "latency", *TINY),
    "online": ("bench", "online", *TINY, "--trace", "trace.csv"),
    "startup": ("bench", "startup", *TINY),
    "sweep": (
        *("bench", "sweep", *TINY, "--workload", "trace.csv", "--slo", "ttft:60000", "--smoke"),
        *("--policy", "serial", "--output-json", "sweep.json"),
    ),
    "simulate": ("simulate", "--gpu", "roofline:h200", "--trace", "azure:conv", "--num-prompts", "30"),
    "capture plan": ("capture", "plan", "--trace", "azure:conv", "--num-prompts", "60"),
    "doctor": ("doctor",),
    "profile": ("profile",),
    "serve": ("serve", *TINY),
}
PLAN = "--model llama-3.1-8b --request-rate 18"
TARGETS = "--goodput ttft:500 tpot:15"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("generate", "--max-tokens -1", "--max-tokens must be an integer ≥ 0, got -1"),
        ("generate", "--logprobs 21 --json", "logprobs"),
        ("generate", "--logprobs 1", "--json"),
        ("generate", "--chat", "--chat needs texts"),
        *(("generate", f"--self-check {which}", "pass --capture-cache, or leave it out") for which in ("all", "off")),
        ("empty stdin", "", "found no prompt: give --prompt, --prompt-ids, --prompt-file or text on standard input"),
        ("generate", "--policy solo", "unknown policy 'solo'"),
        ("generate", "--router-skew zipf", "--router-skew must be uniform, or zipf:S"),
        ("generate", "--router-skew zipf:1", "--router-skew zipf:1 is for random weights of a model of experts"),
        ("generate", "--prompt-ids 1,x", "32,48,64"),
        *((c, f"{o} gone.txt", "gone.txt") for c, o in (("generate", "--prompt-file"), ("serve", "--api-key-file"))),
        ("throughput", "", "--trace"),
        ("throughput", "--trace missing.csv", "missing.csv"),
        ("throughput", "--trace nonsense", "azure:conv"),
        ("throughput", "--trace azure:conv --kv-cache-bytes 8XB", "8XB"),
        ("throughput", "--trace azure:conv --output-json missing/result.json", "does not exist"),
        ("throughput", "--trace azure:conv --output-json o --trace-decisions o", "is that file; give another name"),
        ("latency", "--max-num-seqs 4", "--batch-size 8 requests run at once only if --max-num-seqs, now 4"),
        ("latency", "--input-len 500 --output-len 13", "--max-model-len 512"),
        ("online", "--request-rate nan", "--request-rate must be a number above 0"),
        ("online", "--request-rate often", "is no rate: give requests per second, inf, or trace"),
        ("online", "--request-rate 5 --time-scale 2", "--time-scale changes recorded times"),
        ("online", "--request-rate trace --burstiness 2", "burstiness is of random gaps"),
        ("sweep", f"--num-warmups {10**30}", "is not in the range 0<=x<=1048576"),
        ("serve", f"--data-parallel-size {10**30}", "is not in the range 1<=x<=1024"),
        ("online", "--goodput 500", "'500' is no latency target: write ttft:500"),
        *((command, "--save-detailed", "add --output-json or --json") for command in ("online", "simulate")),
        ("online", "--num-prompts 7", "7 requests were asked for, the file holds 2"),
        ("online", "--trace-decisions t --policy mixed --policy serial", "give one --policy"),
        ("online", "--max-model-len 8", "longer than --max-model-len 8"),
        ("online", "--trace synthetic:conv --request-rate trace", "has no arrival times"),
        *(("online", f"{o} trace.csv --overwrite", "'--trace' is") for o in ("--output-json", "--trace-decisions")),
        ("simulate", "--output-json trace.csv", "add --overwrite"),
        ("startup", "--plot start.pdf", "must end in .svg or .png"),
        ("startup", "--output-json missing/x.json", "does not exist"),
        ("startup", "--max-model-len 99999", "exceeds the model's own limit"),
        ("sweep", "--workload nonesuch", "'nonesuch' is no workload"),
        ("sweep", "--workload azure:conv=50", "requests of azure:conv are longer than --max-model-len 512"),
        ("sweep", "--first-rate 0", "--first-rate must be above 0"),
        ("sweep", "--slo ''", "a goodput needs targets"),
        ("sweep", "--perf-table x.json", "--perf-table roofline for an estimate"),
        ("sweep", "--max-runs 0", "--max-runs"),
        *(("sweep", f"{option} missing/new", "make it first") for option in ("--output-json", "--plot-dir")),
        ("sweep", f"--output-json {__file__}", "is no sweep's file"),
        ("sweep", "--image-format png", "pictures of --plot-dir"),
        ("sweep", "--plot-dir trace.csv", "this is a file"),
        ("sweep", "--plot-dir /proc", "takes no file"),
        ("sweep", "--workload trace.csv~2@ttft:9 --smoke --output-json trace.csv --overwrite", "'--workload' is"),
        ("simulate", "--policy split --decode-sms 30", "30 SMs is not in the performance table"),
        ("simulate", "--sweep", "give some"),
        *(("simulate", f"--sweep {TARGETS} {o}", "leave out") for o in ("--request-rate trace", "--max-concurrency 4")),
        ("simulate", f"--sweep {TARGETS}", "has 30 requests, but a run at 8/s needs 960: 120 s of arrivals"),
        *(("simulate", option, "add --sweep") for option in ("--plot x.svg", "--smoke", "--max-runs 3")),
        ("simulate", f"--sweep {TARGETS} --plot x.pdf", ".svg or .png"),
        ("simulate", f"--sweep {TARGETS} --plot missing/x.svg", "make it first"),
        ("simulate", f"--sweep {TARGETS} --plot o.svg --output-json o.svg", "is that file"),
        ("simulate", "--trace-decisions t --policy mixed --policy auto", "one run"),
        ("simulate", "--trace-decisions o --output-json o", "is that file"),
        *(("simulate", f"{o} {'x' * 300}", "name too long") for o in ("--output-json", "--trace-decisions", "--model")),
        ("simulate", "--model qwen3-0.6b --max-model-len 50000", "model's own limit"),
        ("simulate", "--kv-cache-bytes 1MiB", "KV cache for one sequence"),
        ("simulate", "--max-model-len 8", "are longer than --max-model-len 8"),
        ("simulate", "--gpu roofline:abacus", "abacus"),
        ("simulate", "--gpu missing.json", "missing.json"),
        ("simulate", "--host-overhead-ms 1e308", "1e+308 is not in the range"),
        ("simulate", "--gpu roofline:generic", "--kv-cache-bytes"),
        ("capture plan", f"{PLAN} --memory-gb 0.003", "the whole GPU needs a graph of --max-num-seqs 256 rows"),
        ("capture plan", f"{PLAN} --time-s 0.01", "raise --memory-gb or --time-s"),
        ("capture plan", f"{PLAN} --gpu abacus", "no performance table abacus_llama-3.1-8b_bfloat16.json"),
        ("capture plan", f"{PLAN} --model llama-3.2-1b", "no performance table h200_llama-3.2-1b"),
        ("capture plan", f"{PLAN} --output missing/plan.toml", "the folder missing does not exist"),
        *(("doctor", f"{option} mig", "mig") for option in ("--partition-backend", "--device")),
        ("doctor", "--decode-sms many", "32,48,64"),
        ("doctor", "--calibrate --device cuda", "--calibrate takes no --device"),
        ("doctor", "--calibrate --decode-sms 16", "--calibrate takes no --decode-sms"),
        ("profile", "", "Missing option '--model'"),
        ("profile", "--model tiny --decode-sms many", "no list of numbers"),
        ("profile", "--model tiny --seed -1", "--seed"),
        ("profile", "--model tiny --device cpu", "which a CPU does not need: leave out --device cpu"),
        ("profile", "--model tiny", "a profile measures a GPU"),
        # What the machine lacks comes first: no other option could mend it.
        ("profile", "--model nonesuch", "sees no CUDA device"),
        ("serve", "--port 70000", "--port must be between 0 and 65535, got 70000"),
        ("serve", "--max-body-size big", "'big' is no size"),
        ("serve", "--api-key a --api-key-file trace.csv", "give one of them"),
        ("serve", "--data-parallel-size 2 --trace-decisions t", "--trace-decisions traces one engine"),
        ("serve", "--host 256.0.0.1", "--host and --port must name an address of this machine that is free"),
    ],
)
def test_bad_options_are_refused(
    command: str, arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(Engine, "__init__", lambda *_, **__: pytest.fail("the engine was built"))
    monkeypatch.setattr(startup, "_start", lambda *_, **__: pytest.fail("a process was started"))
    trace = write_trace(tmp_path, (8, 3), (40, 3))
    before = trace.read_bytes()
    assert message in refused(run(*COMMANDS[command], *shlex.split(arguments)))
    assert list(tmp_path.iterdir()) == [trace]
    assert trace.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-ids", "1,512"), "token id 512 is outside the vocabulary of 512"),
        (("--prompt-ids", "-1"), "token id -1"),
        (("--prompt-ids", ",".join("1" * 512)), "--max-model-len 512"),
        (("--prompt", "text"), "tokenizer"),
        (("--prompt", "text", "--chat"), "tokenizer.json"),
        (("--prompt-ids", "1", "--stop", "x"), "stop strings need a tokenizer"),
        (("--prompt-ids", "1", "--kv-cache-bytes", "1kB"), "--kv-cache-bytes 1000 allows"),
        (("--prompt-ids", "1", "--capture-plan", "llama-3.1-8b_bfloat16"), "leave out --capture-plan"),
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
