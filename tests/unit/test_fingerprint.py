"""This machine's side of a capture cache's fingerprint."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from caches import FINGERPRINT
from torch._inductor import cpp_builder

from bullet_graph.errors import DeviceError
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.rope import Rope
from bullet_graph.models.sharding import shard
from bullet_graph.runtime import fingerprint as runtime_fingerprint
from bullet_graph.runtime.fingerprint import SOURCES, code_digest, machine_components, model_components, on_this_machine

CPU = torch.device("cpu")


def test_this_machine_without_a_gpu() -> None:
    components = machine_components(CPU)
    assert components["torch"] == torch.__version__
    assert components["device"] == "cpu"
    assert {"host_cpu", "cpu_threads", "cxx_compiler"} <= components.keys()
    assert "gpu" not in components


def test_without_a_compiler_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    assert machine_components(CPU)["cxx_compiler"] == "none"


def test_the_compiler_is_the_one_that_inductor_takes() -> None:
    found, _, version = machine_components(CPU)["cxx_compiler"].partition(": ")
    assert found == os.path.basename(cpp_builder.get_cpp_compiler())
    assert version


def test_this_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "NVIDIA H200"
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(runtime_fingerprint, "nvml_driver_version", lambda: "580.1")
    components = machine_components(torch.device("cuda", 0))
    assert (components["gpu"], components["num_sms"], components["driver"]) == ("NVIDIA H200", "132", "580.1")
    assert "host_cpu" not in components
    assert components["host_isa"] == torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(runtime_fingerprint, "nvml_driver_version", lambda: None)
    with pytest.raises(DeviceError, match="NVML"):
        machine_components(torch.device("cuda", 0))


def test_a_cache_of_a_gpu_does_not_fit_a_machine_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = on_this_machine(FINGERPRINT)
    assert here["device"] == "cpu"
    assert here["model"] == FINGERPRINT["model"]


def test_the_model_is_its_shape_alone() -> None:
    tiny = PRESETS["tiny"]
    components = model_components(tiny, "bfloat16")
    assert components["dtype"] == "bfloat16"
    same = dataclasses.replace(tiny, eos_token_ids=(1,), dtype=torch.float16)
    assert model_components(same, "bfloat16") == components
    assert model_components(dataclasses.replace(tiny, rope=Rope(5.0)), "bfloat16")["model"] != components["model"]
    assert "rank" not in components
    for by_expert, rank in ((False, "1 of 2"), (True, "1 of 2, with whole experts")):
        of_rank = shard(PRESETS["tiny-moe"], 2, 1, expert_parallel=by_expert)
        assert model_components(of_rank, "bfloat16")["rank"] == rank


def test_sources_are_there_and_change_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runtime_fingerprint.PACKAGE_FOLDER
    for pattern in SOURCES:
        assert list(folder.glob(pattern)), pattern
    for name in runtime_fingerprint._NO_KERNELS:
        assert (folder / name).is_file()
    monkeypatch.setattr(runtime_fingerprint, "PACKAGE_FOLDER", tmp_path)
    for name in ("models/layers.py", "models/families/llama.py", "models/tokenizer.py", "cli/main.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    seen = {code_digest()}
    for name, counts in (("families/llama", True), ("layers", True), ("tokenizer", False)):
        (tmp_path / "models" / f"{name}.py").write_text("2")
        assert (code_digest() not in seen) == counts, name
        seen.add(code_digest())
