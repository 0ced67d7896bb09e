"""What the doctor makes of machines that are complete, incomplete and broken."""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

import pytest
from fakes.machines import DRIVER, GPU, asked_for, complete_machine, finding, not_green

from bullet_graph.config import EngineConfig
from bullet_graph.partition.offsets import TrustedOffset
from bullet_graph.runtime.diagnose import Level, diagnose
from bullet_graph.runtime.machine import BackendCheck, CacheFolder, GpuPair, PartitionChecks, SeveralGpus, SizeCheck
from bullet_graph.runtime.resolve import FLASHINFER_RELEASE

GREEN, YELLOW, RED = Level.GREEN, Level.YELLOW, Level.RED
FOUR = asked_for(tensor_parallel_size=4)
AUTO, CPU, CUDA = asked_for(), asked_for(device="cpu"), asked_for(device="cuda")
TINY, SIZES = asked_for(model="tiny"), asked_for(decode_sms=(16,))

WITHOUT_GPU: dict[str, Any] = {"driver_problem": "no driver", "uses_gpu": False}
WITHOUT_GPU |= dict.fromkeys(("driver", "torch_cuda", "gpu", "mask_offset", "partitions"))
NO_GPU_BUT_DRIVER = WITHOUT_GPU | {"driver": DRIVER}
REFUSED = BackendCheck("smctrl", problem="no offset: run `bullet-graph doctor --calibrate`")
WHOLE_GPU_ONLY = PartitionChecks(
    (16,), (BackendCheck("none", 132, (SizeCheck(None, "0-131", 0.01),)),), None, "smctrl refused: this"
)


def gpu(**changes: Any) -> dict[str, Any]:
    return {"gpu": dataclasses.replace(GPU, **changes)}


def partitions(*backends: BackendCheck, choice: str) -> dict[str, Any]:
    good = complete_machine().partitions
    assert good is not None
    return {"partitions": dataclasses.replace(good, backends=(*backends, *good.backends[1:]), choice=choice)}


def several(link: bool | None = True, *, pcie: int = 0, nccl: str | None = "2.28.3", **changes: Any) -> dict[str, Any]:
    """Four GPUs that are linked so, but for the first pairs, which have PCIe without peer access."""
    pairs = [GpuPair(pair, link, True) for pair in itertools.combinations(range(4), 2)]
    pairs[:pcie] = [GpuPair(pair.gpus, False, False) for pair in pairs[:pcie]]
    return {"several_gpus": SeveralGpus((changes.get("first", GPU.name), *[GPU.name] * 3), tuple(pairs), nccl)}


def flashinfer(version: str | None) -> dict[str, Any]:
    provenance = complete_machine().provenance
    return {"provenance": dataclasses.replace(provenance, versions={**provenance.versions, "flashinfer": version})}


def test_a_machine_that_has_all() -> None:
    diagnosis = diagnose(AUTO, complete_machine())
    assert not_green(diagnosis) == {}
    assert (diagnosis.works, diagnosis.device) == (True, "cuda")
    assert finding(diagnosis, "NVIDIA driver").found == "580.159.04, CUDA 13.0, x86_64"
    assert "compute capability 9.0, 132 SMs (66 TPCs)" in finding(diagnosis, "GPU").found
    assert finding(diagnosis, "GPU memory").found == "130.00 GiB of 140.00 GiB free"
    assert finding(diagnosis, "stream masks").found == "offset 0x51c known for this driver"
    verified = "steps of 2 SMs; the whole GPU and 16, 32 SMs for decode verified in 0.03 s"
    assert finding(diagnosis, "back end smctrl").found == verified
    assert finding(diagnosis, "--partition-backend auto").found == "smctrl: 3 partitions verified"
    sections = [line.section for line in diagnosis.findings]
    assert list(dict.fromkeys(sections)) == ["system", "GPU", "libraries", "partitions", "caches"]
    assert sections == sorted(sections, key=list(dict.fromkeys(sections)).index)


def case(
    changes: dict[str, Any], *lines: tuple[str, Level, str], asked: EngineConfig = AUTO
) -> tuple[EngineConfig, dict[str, Any], dict[str, tuple[Level, str]]]:
    """How the machine differs from a complete one, and name, level and words of lines; all others are green."""
    return asked, changes, {name: (level, words) for name, level, words in lines}


BUSY = {"gpu": None, "gpu_problem": "CUDA error: device busy", "partitions": None}
NO_RELEASE = {"driver": None, "driver_problem": "use green", "mask_offset": None}
DAMAGED = {"mask_offset": None, "mask_offset_problem": "delete the file"}
CASES = {
    "FlashInfer is missing": case(
        flashinfer(None) | {"gpu_path_problem": "ModuleNotFoundError: No module named 'flashinfer'"},
        ("FlashInfer", RED, f"not installed release .*pip install flashinfer-python=={FLASHINFER_RELEASE}"),
        ("GPU path", RED, "No module named 'flashinfer'"),
    ),
    "another FlashInfer": case(flashinfer("0.6.11"), ("FlashInfer", RED, "0.6.11 release")),
    "no bindings": case({"cuda_python": None}, ("cuda-python", RED, r"graph\[cuda\]")),
    "no compilers": case({"missing_compilers": ("nvcc", "ninja")}, ("compilers", YELLOW, "^no nvcc, no ninja")),
    "an unknown driver": case(
        {"mask_offset": None} | partitions(REFUSED, choice="green"),
        ("stream masks", YELLOW, "doctor --calibrate"),
        ("back end smctrl", YELLOW, "^cannot be opened"),
    ),
    "a named back end fails": case(
        {"partitions": PartitionChecks((), (REFUSED,), None, "smctrl refused: no")},
        ("back end smctrl", RED, ""),
        ("--partition-backend smctrl", RED, "smctrl refused: no"),
        asked=asked_for(partition_backend="smctrl"),
    ),
    "auto can do without a split": case(
        {"partitions": WHOLE_GPU_ONLY}, ("--partition-backend auto", YELLOW, "refused")
    ),
    "auto cannot where sizes are asked for": case(
        {"partitions": WHOLE_GPU_ONLY}, ("--partition-backend auto", RED, "refused: this"), asked=SIZES
    ),
    "a calibrated offset": case(
        {"mask_offset": TrustedOffset(0x600, "calibration")}, ("stream masks", GREEN, "offset 0x600 proven")
    ),
    "a damaged calibration": case(DAMAGED, ("stream masks", YELLOW, "delete the file")),
    "an old GPU": case(gpu(compute_capability=(7, 0)), ("GPU", RED, "need compute capability 7.5")),
    "no bfloat16": case(gpu(compute_capability=(7, 5)), ("GPU", YELLOW, "--dtype float16")),
    "a busy GPU": case(gpu(free_bytes=60 * 1024**3), ("GPU memory", YELLOW, "nvidia-smi")),
    "one GPU of several": case(gpu(num_gpus=4), ("GPU", GREEN, "one of 4")),
    "several GPUs": case(
        several(),
        ("links", GREEN, "^NVLink between all 4 GPUs$"),
        ("peer access", GREEN, "^between all 4 GPUs$"),
        ("NCCL", GREEN, "^2.28.3$"),
        ("tensor parallelism", GREEN, "can work, with up to 4 ranks"),
        asked=FOUR,
    ),
    "some GPUs without NVLink": case(
        several(pcie=2),
        ("links", YELLOW, "^NVLink between 0-3, 1-2, 1-3, 2-3; PCIe between 0-1, 0-2 sums"),
        ("peer access", YELLOW, "^not between 0-1, 0-2 NCCL goes through"),
        asked=FOUR,
    ),
    "links unknown": case(several(None), ("links", YELLOW, "^unknown between all 4 GPUs NVML does not tell")),
    "no NCCL": case(
        several(nccl=None), ("NCCL", YELLOW, "^none this torch"), ("tensor parallelism", YELLOW, "^cannot work")
    ),
    "no NCCL, but ranks asked for": case(
        several(nccl=None), ("NCCL", RED, ""), ("tensor parallelism", RED, ""), asked=FOUR
    ),
    "GPUs of two kinds": case(several(first="NVIDIA H100"), ("kinds", YELLOW, "^NVIDIA H100 and NVIDIA H200 ranks")),
    "too few GPUs": case({}, ("--tensor-parallel-size 4", RED, "torch sees 1$"), asked=FOUR),
    "a GPU that cannot be used": case(BUSY, ("GPU", RED, "device busy")),
    "a driver without a release": case(NO_RELEASE, ("NVIDIA driver", YELLOW, "use green$")),
    "no GPU": case(WITHOUT_GPU, ("GPU", GREEN, "no NVIDIA GPU: the engine runs on the CPU")),
    "no GPU, but asked for": case(WITHOUT_GPU, ("GPU", RED, "install the NVIDIA driver"), asked=CUDA),
    "torch without CUDA": case(NO_GPU_BUT_DRIVER, ("GPU", YELLOW, "built without CUDA")),
    "torch sees no GPU": case(NO_GPU_BUT_DRIVER | {"torch_cuda": "13.1"}, ("GPU", RED, "built for 13.1"), asked=CUDA),
    "the CPU asked for": case(NO_GPU_BUT_DRIVER, ("GPU", GREEN, "not looked at: --device cpu"), asked=CPU),
    "no partitions on the CPU": case(WITHOUT_GPU, asked=asked_for(partition_backend="none")),
    "a back end on the CPU": case(WITHOUT_GPU, ("SM partitions", RED, ""), asked=asked_for(partition_backend="green")),
    "sizes on the CPU": case(WITHOUT_GPU, ("SM partitions", RED, ""), asked=SIZES),
    "a cache that cannot be written": case(
        {"caches": (CacheFolder("Triton", "/cache", 3 * 1024**2, False),)}, ("cache of Triton", YELLOW, "^/cache, 3.00")
    ),
    "a model that does not fit": case({"model_problem": "short by 3 GiB"}, ("tiny", RED, "short by 3 GiB"), asked=TINY),
    "a model that was not looked at": case({}, ("tiny", RED, "red lines above"), asked=TINY),
}


@pytest.mark.parametrize(("asked", "changes", "lines"), CASES.values(), ids=CASES)
def test_machines(asked: EngineConfig, changes: dict[str, Any], lines: Mapping[str, tuple[Level, str]]) -> None:
    machine = complete_machine(**changes)
    diagnosis = diagnose(asked, machine)
    bad = {name: level for name, (level, _) in lines.items() if level is not GREEN}
    assert not_green(diagnosis) == bad
    assert diagnosis.works == (RED not in bad.values())
    assert diagnosis.device == ("cuda" if machine.uses_gpu else "cpu")
    for name, (_, pattern) in lines.items():
        line = finding(diagnosis, name)
        assert re.search(pattern, f"{line.found} {line.advice or ''}".rstrip()), name
