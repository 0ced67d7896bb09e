"""Parts of a comparison: model folder, vLLM's budget, SGLang's memory, counting tokens, the host, rates, its runs."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from bench.peers import comparison
from bench.peers.budget import CONFIG_KEY, BudgetedSchedule, TokenBudget
from bench.peers.comparison import Comparison, FixedRates
from bench.peers.host import HostClock
from bench.peers.model_folder import write_model_folder, write_weights
from bench.peers.residents import group, peer_folder, require_memory
from bench.peers.sglang_system import static_fraction
from bench.peers.systems import Candidate
from bullet_graph import ConfigError, Engine, RequestError, SamplingParams
from bullet_graph.cli.bench.sweep_runner import Sweep, WorkloadSpec, make_cells
from bullet_graph.engine.replay import Replay, TimedRequest
from bullet_graph.errors import DeviceError
from bullet_graph.models.presets import PRESETS, load_model_config
from bullet_graph.perf.goodput_search import GoodputSearch, RateRun
from bullet_graph.perf.metrics import RequestMetrics, ServedRequest
from bullet_graph.perf.roofline import Fp8Weights
from bullet_graph.serve.client import new_tokens
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest

# ---- systems ----


def test_comparisons_on_two_gpus_share_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for gpus in ("", "0", "0,1", "GPU-5"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        folders.add(peer_folder("org/llama"))
    assert len(folders) == 4
    assert {folder.name for folder in folders} == {"llama"}


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("own:mixed:2048", "bullet_graph mixed:2048"),
        ("own:auto/longest-output", "bullet_graph auto/longest-output"),
        ("own:serial/arrival", "bullet_graph serial"),
        ("vllm", "vllm 9.9"),
        ("vllm:512", "vllm 9.9 chunk 512"),
        ("sglang", "sglang 9.9"),
        ("sglang:512", "sglang 9.9 chunk 512"),
        ("sglang:pdmux", "sglang 9.9 pdmux"),
        ("openai:http://h:80/v1/", "http://h:80/v1"),
    ],
)
def test_systems_by_name(text: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.systems.installed_version", lambda _: "9.9")
    assert Candidate.parse(text).label == label


@pytest.mark.parametrize(
    "text", ["own", "own:fast", "own:auto/shortest", "vllm:0", "vllm:pdmux", "sglang:-1", "openai:host", "trt"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write own:POLICY|unknown policy 'fast'|write arrival or longest"):
        Candidate.parse(text)


def test_candidates_share_what_is_up() -> None:
    texts = ("own:auto", "vllm:512", "own:serial", "openai:http://a", "vllm", "openai:http://b")
    own, v512, serial, a, v, b = candidates = [Candidate.parse(text) for text in texts]
    assert group(candidates, one_at_a_time=False) == [candidates]
    assert group(candidates, one_at_a_time=True) == [[own, serial], [v512, v], [a], [b]]
    # SGLang cannot change its chunks while it runs, but they are settings of one peer.
    s512, mux = Candidate.parse("sglang:512"), Candidate.parse("sglang:pdmux")
    assert group([s512, mux, s512], one_at_a_time=True) == [[s512, s512], [mux]]
    assert s512.peer == mux.peer


OWN, URL = Candidate("own", "auto"), Candidate("openai", url="http://a")
BOTH = [OWN, Candidate("own", "serial"), Candidate("vllm", "512"), Candidate("vllm", "2048"), URL]


def test_memory_that_comes_free_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    free = iter((40, 89, 90))
    pauses: list[float] = []
    require_memory(BOTH, 0.45, lambda: (next(free), 100), pause=pauses.append)
    assert pauses == [1.0, 1.0]
    assert capsys.readouterr().err.count("\n") == 1
    # For a server at a URL, the GPU is not even asked; one system alone needs no more than its own share.
    require_memory([URL], 0.9, lambda: pytest.fail("the question itself takes memory"))
    require_memory([OWN], 0.45, lambda: (45, 100))


def test_memory_that_others_keep_is_an_error() -> None:
    pauses: list[float] = []
    with pytest.raises(DeviceError, match=r"fill 90% of the GPU's 140\.00 GiB, but only 56\.00 GiB are free"):
        require_memory([OWN], 0.9, lambda: (56 << 30, 140 << 30), pause=pauses.append)
    assert 30 <= sum(pauses) <= 90
    with pytest.raises(ConfigError, match=r"2 systems with 90% .* --one-at-a-time"):
        require_memory(BOTH, 0.9, lambda: (100, 100))


def test_sglang_gets_the_share_or_what_its_reserve_leaves() -> None:
    # Alone, with a share that leaves less than SGLang would: what SGLang would take by itself.
    assert static_fraction(0.9, 0.875, 80 << 30, 80 << 30) == 0.875
    # Beside an engine that has 45 %: 45 % of the whole are 45/55 of what is free.
    assert static_fraction(0.45, 0.93, 55, 100) == 0.818
    assert static_fraction(0.3, 0.875, 80, 80) == 0.3
    with pytest.raises(ValueError, match="reserves 20% of the GPU's memory, and only 15% are free"):
        static_fraction(0.1, 0.8, 15, 100)


# ---- the peers' model folder ----


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_folder_holds_its_shape_for_transformers_too(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    folder = write_model_folder(tmp_path / "a" / "b", preset)
    # vLLM gets the format as one that the checkpoint has.
    stored = None if preset.fp8 is None else replace(preset.fp8, is_stored=True)
    assert load_model_config(folder) == replace(preset, fp8=stored)
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == [preset.architecture]
    sizes = preset.hidden_size, preset.num_layers, preset.vocab_size
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == sizes
    assert (config.head_dim, config.num_key_value_heads) == (preset.head_dim, preset.num_kv_heads)
    assert config.rope_parameters["rope_theta"] == preset.rope.theta
    assert config.rope_parameters.get("factor") == getattr(preset.rope.scaling, "factor", None)
    assert str(config.dtype) == f"torch.{preset.dtype}"
    assert isinstance(config.dtype, torch.dtype)


def test_weights_in_fp8_are_the_engine_s_own(tmp_path: Path) -> None:
    model = replace(PRESETS["tiny"], fp8=Fp8Weights(blocks=False))
    write_weights(write_model_folder(tmp_path, model), model, seed=0, device="cpu")
    outputs = []
    for source, formats in ((str(tmp_path), {}), ("tiny", {"quantization": "fp8"})):
        with Engine(source, device="cpu", max_model_len=64, **formats) as engine:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            outputs.append(engine.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]


# ---- vLLM's budget ----


class StubScheduler:
    """Takes from a queue as vLLM's scheduler does: so many tokens a step, so many sequences at once."""

    max_num_scheduled_tokens = 8192
    max_num_running_reqs = 1024

    def __init__(self, vllm_config: Any, *, block_size: int) -> None:
        self.vllm_config = vllm_config
        self.block_size = block_size

    def schedule(self, throttle_prefills: bool = False) -> tuple[int, int, bool]:
        return self.max_num_scheduled_tokens, self.max_num_running_reqs, throttle_prefills


class Budgeted(BudgetedSchedule, StubScheduler):
    pass


def test_each_step_has_the_budget_of_the_moment(tmp_path: Path) -> None:
    budget = TokenBudget.create(tmp_path / "budget", 8192)
    scheduler = Budgeted(SimpleNamespace(additional_config={CONFIG_KEY: str(tmp_path / "budget")}), block_size=16)
    assert scheduler.schedule() == (8192, 1024, False)
    budget.num_tokens = 512
    assert scheduler.schedule(True) == (512, 512, True)
    budget.num_tokens = 2048
    assert scheduler.schedule(throttle_prefills=True) == (2048, 1024, True)
    # Never more than the engine was started with.
    budget.num_tokens = 100_000
    assert scheduler.schedule() == (8192, 1024, False)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        budget.num_tokens = 0


def test_another_process_sees_the_budget(tmp_path: Path) -> None:
    budget = TokenBudget.create(tmp_path / "budget", 1)
    code = (
        "import sys; from bench.peers.budget import TokenBudget; b = TokenBudget(sys.argv[1]); "
        "print(b.num_tokens, flush=True); input(); print(b.num_tokens)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "budget")]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        budget.num_tokens = 777
        assert child.communicate("\n")[0] == "777\n"


# ---- counting a stream's tokens ----


def chunk(text: str = "x", usage: int | None = None, finish: str | None = None) -> dict[str, Any]:
    told = None if usage is None else {"completion_tokens": usage}
    return {"choices": [{"text": text, "finish_reason": finish}], "usage": told}


def counted(chunks: Sequence[dict[str, Any]]) -> list[int]:
    counts: list[int] = []
    for each in chunks:
        counts.append(new_tokens(json.loads(json.dumps(each)), sum(counts)))
    return counts


def end(usage: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": usage}}


@given(st.lists(st.integers(0, 9), max_size=20))
def test_a_server_that_tells_is_believed(tokens: list[int]) -> None:
    totals = [sum(tokens[: i + 1]) for i in range(len(tokens))]
    assert counted([*(chunk("", total) for total in totals), end(sum(tokens))]) == [*tokens, 0]


def test_otherwise_a_chunk_is_a_token() -> None:
    # A token that is half a character has no text yet; the closing chunk has a token, or none.
    assert counted([chunk(), chunk(""), chunk("x", finish="length"), end(3)]) == [1, 1, 1, 0]
    assert counted([chunk(), chunk("", finish="length"), end(1)]) == [1, 0, 0]
    assert counted([chunk(), {"choices": []}]) == [1, 0]


def test_streams_that_cannot_be_counted() -> None:
    with pytest.raises(RequestError, match="held 4 tokens, and 2 were counted: it must give continuous_usage"):
        counted([chunk("xx"), chunk("xx"), end(4)])
    with pytest.raises(RequestError, match=r"broke off: .*out of memory"):
        counted([{"error": {"message": "out of memory"}}])


# ---- rates ----


def test_given_rates_come_in_rounds_and_runs_of_before_are_not_run_again() -> None:
    rates = FixedRates(first_rate=1.0, rates=(8.0, 4.0, 2.0), repeats=2)
    runs = [RateRun(rate, 1.0, stable=True) for rate in (4.0, 16.0)]
    while (rate := rates.next_rate(runs)) is not None:
        runs.append(RateRun(rate, 1.0, stable=True))
    assert [run.rate for run in runs[2:]] == [8.0, 2.0, 8.0, 4.0, 2.0]


# ---- the host's processors ----


def count(stat: Path, *seconds: int) -> None:
    stat.write_text(f"cpu  {' '.join(str(100 * value) for value in seconds)} 0 0\ncpu0 1 2 3\n", encoding="ascii")


@pytest.mark.skipif(not psutil.LINUX, reason="of the kernel's counters, which tests can fake")
def test_shares_of_the_time_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    assert HostClock().use() is None, "nothing is made up"
    #                      user nice system idle iowait irq softirq steal
    count(tmp_path / "stat", 100, 0, 50, 1000, 10, 0, 0, 5)
    clock = HostClock()
    assert clock.use() is None
    count(tmp_path / "stat", 130, 2, 60, 1130, 16, 1, 1, 25)
    use = clock.use()
    assert use is not None
    # 200 s: 44 busy (30 + 2 + 10 + 1 + 1), 136 idle, 20 stolen.
    assert (use.num_cpus, use.busy_cpus, use.stolen_cpus) == (8, 8 * 44 / 200, 8 * 20 / 200)


# ---- which runs a comparison asks for ----

TPOT_MS = 10.0
GOODPUTS = {"auto": 30.0, "512": 11.0, "1024": 19.0, "2048": 17.0}
"""Rates up to which a setting meets the targets."""


class Served(AsyncMock):
    """A system that is as fast as its setting says."""

    settings: Mapping[str, Any] = {}
    setting = ""

    async def configure(self, setting: str, slo: Slo) -> None:  # noqa: ARG002
        self.setting = setting

    def counters(self) -> Mapping[str, Any]:
        return {}

    def generate(self) -> None:
        """Never called."""


async def open_served(_: Sequence[Candidate]) -> Any:
    return Served()


async def replayed(generate: Any, requests: Sequence[TimedRequest], **_: Any) -> Replay:
    """All in time, or none."""
    rate = len(requests) / requests[-1].arrival_s
    tpot_ms = TPOT_MS if rate < GOODPUTS[generate.__self__.setting] else 2 * TPOT_MS
    served = tuple(
        ServedRequest(1, 2, RequestMetrics(r.arrival_s, 0.0, (r.arrival_s, r.arrival_s + tpot_ms / 1001)), slo=r.slo)
        for r in requests
    )
    return Replay(served, 0.0)


def compare(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, best_peer_only: bool
) -> dict[str, tuple[float | None, list[float]]]:
    """Goodput (of both shares) and rates of the runs, by setting."""
    monkeypatch.setattr(comparison, "replay_async", replayed)
    # Between real runs all objects of the process are collected, which would take longer than these runs.
    monkeypatch.setattr(comparison, "collect_garbage", lambda: None)
    request = WorkloadRequest(prompt_tokens=1, output_tokens=2, arrival_s=None)
    file = Sweep.open(path, settings={}, provenance={}, overwrite=False)
    candidates = [Candidate("own", "auto"), *(Candidate("vllm", chunk) for chunk in ("512", "1024", "2048"))]
    planned = make_cells(
        [WorkloadSpec("flat", slo=Slo(tpot_ms=TPOT_MS))],
        (),
        {candidate.label: candidate for candidate in candidates},
        search=GoodputSearch(first_rate=16.0, max_runs=4),
        load=lambda spec: Workload(spec.name, (request,) * 40),
        smoke=True,
    )
    with asyncio.Runner() as runner:
        Comparison(
            [candidates],
            planned,
            open_served,
            file,
            runner,
            model="none",
            vocab_size=100,
            arrivals=Arrivals(request_rate=1.0),
            num_warmups=0,
            smoke=True,
            best_peer_only=best_peer_only,
            probe=lambda: None,
        ).run()
    cells = file.cells
    assert file.finished
    return {cell.system.split()[-1]: (cell.goodput_90, [run["request_rate"] for run in cell.runs]) for cell in cells}


def test_every_setting_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = compare(tmp_path / "peers.json", monkeypatch, best_peer_only=False)
    assert cells["512"] == (pytest.approx(10.368), [16.0, 12.8, 10.24, 11.52])


def test_a_peers_setting_is_given_up_when_another_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 fails where 1,024 serves enough; 2,048 fails a step later; this engine's search goes on."""
    cells = compare(tmp_path / "peers.json", monkeypatch, best_peer_only=True)
    assert cells["512"] == (None, [16.0])
    assert cells["2048"][1] == [16.0, 20.0, 18.0]
    assert cells["1024"] == (pytest.approx(18.1), [16.0, 20.0, 18.0, 19.0])
    assert len(cells["auto"][1]) == 4
