"""What the doctor makes of machines that are complete, incomplete and broken."""

import dataclasses
from typing import Any

import pytest
from fakes.machines import DRIVER, GPU, complete_machine, finding, not_green

from bullet_graph.runtime.cache_folders import CacheFolder
from bullet_graph.runtime.diagnose import Level, diagnose
from bullet_graph.runtime.machine import Asked, MaskOffset
from bullet_graph.runtime.partition_checks import (
    BackendCheck,
    PartitionChecks,
    SizeCheck,
)
from bullet_graph.runtime.resolve import FLASHINFER_RELEASE

AUTO = Asked()


def without_gpu(**changes: Any) -> Any:
    return complete_machine(
        **{
            "driver": None,
            "driver_problem": "no driver",
            "torch_cuda": None,
            "uses_gpu": False,
            "gpu": None,
            "mask_offset": None,
            "partitions": None,
            **changes,
        }
    )


def test_a_machine_that_has_all() -> None:
    diagnosis = diagnose(AUTO, complete_machine())
    assert not_green(diagnosis) == {}
    assert diagnosis.works
    assert diagnosis.device == "cuda"
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


@pytest.mark.parametrize(("found", "shown"), [(None, "not installed"), ("0.6.11", "0.6.11")])
def test_flashinfer_is_missing_or_of_another_release(found: str | None, shown: str) -> None:
    machine = complete_machine(gpu_path_problem="ModuleNotFoundError: No module named 'flashinfer'")
    versions = {**machine.provenance.versions, "flashinfer": found}
    provenance = dataclasses.replace(machine.provenance, versions=versions)
    diagnosis = diagnose(AUTO, dataclasses.replace(machine, provenance=provenance))
    assert not_green(diagnosis) == {"FlashInfer": Level.RED, "GPU path": Level.RED}
    assert not diagnosis.works
    line = finding(diagnosis, "FlashInfer")
    assert line.found == shown
    assert f"pip install flashinfer-python=={FLASHINFER_RELEASE}" in str(line.advice)
    assert "No module named 'flashinfer'" in str(finding(diagnosis, "GPU path").advice)


def test_a_missing_binding_is_red() -> None:
    diagnosis = diagnose(AUTO, complete_machine(cuda_python=None))
    assert not_green(diagnosis) == {"cuda-python": Level.RED}
    assert "bullet-graph[cuda]" in str(finding(diagnosis, "cuda-python").advice)


def test_missing_compilers_are_no_obstacle() -> None:
    diagnosis = diagnose(AUTO, complete_machine(missing_compilers=("nvcc", "ninja")))
    assert not_green(diagnosis) == {"compilers": Level.YELLOW}
    assert finding(diagnosis, "compilers").found == "no nvcc, no ninja"
    assert diagnosis.works


def unknown_driver() -> Any:
    refused = BackendCheck("smctrl", problem="no offset: run `bullet-graph doctor --calibrate`")
    good = complete_machine().partitions
    assert good is not None
    return complete_machine(
        mask_offset=MaskOffset(None),
        partitions=dataclasses.replace(good, backends=(refused, *good.backends[1:]), choice="green"),
    )


def test_an_unknown_driver() -> None:
    diagnosis = diagnose(AUTO, unknown_driver())
    assert not_green(diagnosis) == {"stream masks": Level.YELLOW, "back end smctrl": Level.YELLOW}
    assert "doctor --calibrate" in str(finding(diagnosis, "stream masks").advice)
    assert finding(diagnosis, "back end smctrl").found == "cannot be opened"
    assert diagnosis.works


def test_a_named_back_end_that_fails_is_red() -> None:
    asked = Asked(partition_backend="smctrl")
    machine = unknown_driver()
    checks = dataclasses.replace(
        machine.partitions, backends=machine.partitions.backends[:1], choice=None, why="smctrl refused: no"
    )
    diagnosis = diagnose(asked, dataclasses.replace(machine, partitions=checks))
    assert not_green(diagnosis) == {
        "stream masks": Level.YELLOW,
        "back end smctrl": Level.RED,
        "--partition-backend smctrl": Level.RED,
    }
    assert not diagnosis.works


@pytest.mark.parametrize(("decode_sms", "level"), [((), Level.YELLOW), ((16,), Level.RED)])
def test_auto_needs_a_split_only_where_sizes_are_asked_for(decode_sms: tuple[int, ...], level: Level) -> None:
    none = BackendCheck("none", 132, (SizeCheck(None, "0-131", 0.01),))
    checks = PartitionChecks((16,), (none,), None, "smctrl refused: this; green refused: that")
    diagnosis = diagnose(Asked(decode_sms=decode_sms), complete_machine(partitions=checks))
    assert not_green(diagnosis) == {"--partition-backend auto": level}
    assert "smctrl refused: this" in str(finding(diagnosis, "--partition-backend auto").advice)


@pytest.mark.parametrize(
    ("offset", "level", "words"),
    [
        (
            MaskOffset("calibration", 0x600),
            Level.GREEN,
            "offset 0x600 proven on this machine",
        ),
        (MaskOffset(None, problem="delete the file"), Level.YELLOW, "delete the file"),
    ],
)
def test_mask_offsets(offset: MaskOffset, level: Level, words: str) -> None:
    line = finding(diagnose(AUTO, complete_machine(mask_offset=offset)), "stream masks")
    assert line.level is level
    assert words in f"{line.found} {line.advice}"


@pytest.mark.parametrize(
    ("changes", "name", "level", "words"),
    [
        ({"compute_capability": (7, 0)}, "GPU", Level.RED, "need compute capability 7.5"),
        ({"compute_capability": (7, 5)}, "GPU", Level.YELLOW, "--dtype float16"),
        ({"free_bytes": 60 * 1024**3}, "GPU memory", Level.YELLOW, "nvidia-smi"),
    ],
)
def test_gpus_that_are_old_or_busy(changes: dict[str, Any], name: str, level: Level, words: str) -> None:
    diagnosis = diagnose(AUTO, complete_machine(gpu=dataclasses.replace(GPU, **changes)))
    assert not_green(diagnosis) == {name: level}
    assert words in str(finding(diagnosis, name).advice)


def test_one_gpu_of_several() -> None:
    diagnosis = diagnose(AUTO, complete_machine(gpu=dataclasses.replace(GPU, num_gpus=4)))
    assert "one of 4" in finding(diagnosis, "GPU").found


def test_a_gpu_that_cannot_be_used() -> None:
    machine = complete_machine(gpu=None, gpu_problem="CUDA error: device busy", partitions=None)
    diagnosis = diagnose(AUTO, machine)
    assert not_green(diagnosis) == {"GPU": Level.RED}
    assert "device busy" in str(finding(diagnosis, "GPU").advice)


def test_a_driver_that_does_not_tell_its_release() -> None:
    machine = complete_machine(driver=None, driver_problem="use green", mask_offset=None)
    diagnosis = diagnose(AUTO, machine)
    assert not_green(diagnosis) == {"NVIDIA driver": Level.YELLOW}
    assert finding(diagnosis, "NVIDIA driver").advice == "use green"


def test_no_gpu() -> None:
    diagnosis = diagnose(AUTO, without_gpu())
    assert (diagnosis.works, diagnosis.device) == (True, "cpu")
    assert not_green(diagnosis) == {}
    assert finding(diagnosis, "GPU").found == "no NVIDIA GPU: the engine runs on the CPU"


def test_a_gpu_asked_for_where_there_is_none() -> None:
    diagnosis = diagnose(Asked(device="cuda"), without_gpu())
    assert not_green(diagnosis) == {"GPU": Level.RED}
    assert "install the NVIDIA driver" in str(finding(diagnosis, "GPU").advice)


@pytest.mark.parametrize(
    ("torch_cuda", "words"),
    [(None, "built without CUDA"), ("13.1", "for CUDA 13.0, but torch, built for 13.1")],
)
def test_a_driver_whose_gpu_torch_does_not_see(torch_cuda: str | None, words: str) -> None:
    machine = without_gpu(driver=DRIVER, torch_cuda=torch_cuda)
    for device, level in (("auto", Level.YELLOW), ("cuda", Level.RED)):
        diagnosis = diagnose(Asked(device=device), machine)  # type: ignore[arg-type]
        assert not_green(diagnosis) == {"GPU": level}
        assert words in str(finding(diagnosis, "GPU").advice)


def test_the_gpu_is_left_alone_where_the_cpu_is_asked_for() -> None:
    diagnosis = diagnose(Asked(device="cpu"), without_gpu(driver=DRIVER))
    assert diagnosis.works
    assert finding(diagnosis, "GPU").found == "not looked at: --device cpu"


@pytest.mark.parametrize(
    ("asked", "works"),
    [
        (Asked(partition_backend="none"), True),
        (Asked(partition_backend="green"), False),
        (Asked(decode_sms=(16,)), False),
    ],
)
def test_partitions_need_a_gpu(asked: Asked, works: bool) -> None:
    diagnosis = diagnose(asked, without_gpu())
    assert diagnosis.works == works
    assert not_green(diagnosis) == ({} if works else {"SM partitions": Level.RED})


def test_a_cache_that_cannot_be_written() -> None:
    caches = (CacheFolder("Triton", "/cache", 3 * 1024**2, False),)
    diagnosis = diagnose(AUTO, complete_machine(caches=caches))
    assert not_green(diagnosis) == {"cache of Triton": Level.YELLOW}
    assert finding(diagnosis, "cache of Triton").found == "/cache, 3.00 MiB"


@pytest.mark.parametrize(
    ("problem", "words"), [("short by 3 GiB", "short by 3 GiB"), (None, "red lines above")]
)
def test_a_model_that_does_not_fit(problem: str | None, words: str) -> None:
    diagnosis = diagnose(Asked(model="tiny"), complete_machine(model_problem=problem))
    assert not_green(diagnosis) == {"tiny": Level.RED}
    assert words in str(finding(diagnosis, "tiny").advice)
