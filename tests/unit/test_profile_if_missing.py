"""A missing performance table is measured if the user asks for it: when, and with which command."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.perf_tables import LLAMA_8B
from filelock import FileLock

from bullet_graph.config import EngineConfig
from bullet_graph.errors import PerfTableError
from bullet_graph.hardware import L40S
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime import performance
from bullet_graph.runtime.performance import find_performance, measure_if_missing, user_table_file

RUNTIME: Any = SimpleNamespace(
    device=torch.device("cuda", 0),
    gpu=L40S,
    name="llama-3.1-8b",
    model=LLAMA_8B,
    dtype=torch.bfloat16,
    dtype_name="bfloat16",
    max_model_len=8192,
)


@pytest.fixture
def gpus() -> list[str]:
    """Those that each command saw."""
    return []


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: list[str]) -> list[list[str]]:
    """The commands that were run; the user has no tables."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        assert options["stdout"] == 2
        gpus.append(options["env"]["CUDA_VISIBLE_DEVICES"])
        commands.append(command[command.index("bullet_graph") + 1 :])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(performance, "user_data_path", lambda _: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return commands


def measure(config: EngineConfig, runtime: Any = RUNTIME, cached: Any = None) -> StartClock:
    clock = StartClock()
    measure_if_missing(config, runtime, lambda: cached, clock)
    return clock


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.of("llama-3.1-8b", load_format="dummy", policy="auto", profile_if_missing=True, **settings)


def test_the_command_measures_what_the_engine_will_run(ran: list[list[str]]) -> None:
    clock = measure(config(quantization="fp8", tensor_parallel_size=2, expert_parallel=True))
    options = ["--model=llama-3.1-8b", "--load-format=dummy", "--quantization=fp8", "--tensor-parallel-size=2"]
    brief = ["--expert-parallel", "--time-budget-s", "0", "--partition-backend", "none"]
    assert ran == [["profile", *options, *brief]]
    assert [phase.name for phase in clock.report().phases] == ["profile"]


def test_it_runs_on_the_engine_s_gpus(ran: list[list[str]], gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    second = SimpleNamespace(**{**vars(RUNTIME), "device": torch.device("cuda", 1)})
    measure(config(tensor_parallel_size=2), second)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6")
    measure(config(tensor_parallel_size=2), second)
    measure(config())
    assert gpus == ["1,2", "GPU-5,6", "4"]
    assert len(ran) == 3


def test_an_engine_that_waited_for_another_finds_the_table(ran: list[list[str]]) -> None:
    file = user_table_file(performance.table_key(RUNTIME))
    file.parent.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with FileLock(f"{file}.lock"):
            started = pool.submit(measure, config())
            time.sleep(0.2)
            file.touch()
        started.result()
    assert ran == []


def test_split_needs_partitions(ran: list[list[str]]) -> None:
    measure(EngineConfig.of("llama-3.1-8b", policy="split", profile_if_missing=True))
    assert ran == [["profile", "--model=llama-3.1-8b", "--time-budget-s", "0"]]


def test_nothing_is_measured_that_is_there_or_that_nobody_asked_for(ran: list[list[str]]) -> None:
    measure(EngineConfig.of("llama-3.1-8b", policy="auto"))
    measure(EngineConfig.of("llama-3.1-8b", policy="serial", profile_if_missing=True))
    measure(config(perf_table="roofline"))
    measure(config(), SimpleNamespace(**{**vars(RUNTIME), "device": torch.device("cpu")}))
    measure(config(), cached=object())
    file = user_table_file(performance.table_key(RUNTIME))
    file.parent.mkdir()
    file.touch()
    measure(config())
    assert ran == []


@pytest.mark.usefixtures("ran")
def test_a_failed_measurement_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2))
    with pytest.raises(PerfTableError, match=r"`bullet-graph profile --model=llama-3.1-8b .*` ended with 2"):
        measure(config())
    monkeypatch.setattr(performance, "user_data_path", lambda _: Path(__file__))
    with pytest.raises(PerfTableError, match=r"profile_if_missing must be able to write .* Not a directory"):
        measure(config())


@pytest.mark.usefixtures("ran")
def test_the_message_of_a_missing_table_names_the_command_for_the_formats_in_use() -> None:
    asked = EngineConfig.of("llama-3.1-8b", policy="split", quantization="fp8", kv_cache_dtype="fp8")
    with pytest.raises(PerfTableError) as caught:
        find_performance(asked, RUNTIME)
    command = "`bullet-graph profile --model=llama-3.1-8b --quantization=fp8 --kv-cache-dtype=fp8`"
    assert f"run {command} once, let profile_if_missing do it" in str(caught.value)
