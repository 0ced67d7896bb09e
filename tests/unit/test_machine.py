"""What the doctor finds: partition back ends on a fake GPU, offsets, folders, and what torch tells."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fakes.fake_driver import CUresult, FakeDriver, MaskBackend, fake_probe
from fakes.machines import DRIVER, GPU, asked_for, complete_machine, finding, not_green

from bullet_graph.errors import PartitionError
from bullet_graph.partition import backend as backend_module
from bullet_graph.partition import offsets
from bullet_graph.partition.backend import BackendOpener, NoneBackend
from bullet_graph.partition.green import GreenBackend
from bullet_graph.partition.masks import Lane, SmPartition
from bullet_graph.partition.offsets import TrustedOffset
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.runtime import machine as machine_module
from bullet_graph.runtime.diagnose import Level, diagnose
from bullet_graph.runtime.machine import (
    CacheFolder,
    GpuPair,
    PartitionChecks,
    SeveralGpus,
    cache_folders,
    check_partitions,
    default_decode_sms,
    look_around,
    look_at_cache,
)

Check = Callable[..., PartitionChecks]
Probe = Callable[[int], SmidProbe]
Take = Callable[[Probe], None]
AUTO, CPU = asked_for(), asked_for(device="cpu")


class LeakyBackend(MaskBackend):
    """Confines decode work to 16 SMs, but not to 32."""

    name = "smctrl"

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        leaks = lane == "decode" and partition.decode_tpcs == 16
        self.planted = {"decode": frozenset(range(34))} if leaks else {}
        return super().stream(lane, partition)


OPENERS: dict[str, BackendOpener] = {"smctrl": LeakyBackend, "green": GreenBackend, "none": NoneBackend}


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Take:
    """Has this probe, and these back ends, in place of the real ones."""

    def take(probe: Probe) -> None:
        for module in (machine_module, backend_module):
            monkeypatch.setattr(module, "OPENERS", OPENERS)
            monkeypatch.setattr(module, "SmidProbe", probe)

    return take


@pytest.fixture
def check(gpu: FakeDriver, take: Take) -> Check:
    def check(name: str, decode_sms: tuple[int, ...], probe: Probe | None = None) -> PartitionChecks:
        take(probe or partial(probe_of, gpu))
        found = check_partitions(name, decode_sms, num_sms=132)
        # Everything is closed, and the page can be printed.
        assert (gpu.live, gpu.retained) == ({}, 0)
        json.dumps(dataclasses.asdict(found))
        return found

    return check


def probe_of(gpu: FakeDriver, device: int) -> SmidProbe:
    assert device == 0
    return fake_probe(gpu)


def test_masks_that_leak_and_green_contexts_that_do_not(check: Check) -> None:
    found = check("auto", ())
    smctrl, green, none = found.backends
    assert found.decode_sms == (16, 32, 64)
    assert [size.decode_sms for size in smctrl.sizes] == [None, 16, 32, 64]
    assert [size.problem is None for size in smctrl.sizes] == [True, True, False, True]
    assert smctrl.sizes[1].seen_sms == "0-15"
    assert (green.granularity_sms, green.problems) == (8, ())
    assert [size.decode_sms for size in none.sizes] == [None]
    assert found.choice == "green"
    assert found.why.startswith("green: 4 partitions verified; smctrl refused: ")

    diagnosis = diagnose(AUTO, complete_machine(partitions=found))
    assert diagnosis.works
    assert not_green(diagnosis) == {"back end smctrl": Level.YELLOW}
    line = finding(diagnosis, "back end smctrl")
    assert "the whole GPU and 16, 64 SMs for decode verified in" in line.found
    assert line.found.endswith("; 32 SMs for decode refused")
    assert "outside: 32-33" in str(line.advice)
    assert "smctrl refused" in finding(diagnosis, "--partition-backend auto").found


def test_a_named_back_end_is_checked_alone(check: Check) -> None:
    found = check("green", (16, 20, 16))
    (green,) = found.backends
    assert [size.decode_sms for size in green.sizes] == [None, 16, 20]
    (problem,) = green.problems
    assert "16 (8 TPCs) or 24 (12 TPCs)" in problem
    assert found.choice is None


def test_sizes_that_cannot_be(check: Check) -> None:
    assert (check("none", ()).choice, check("none", ()).backends[0].problems) == ("none", ())
    for name, size, message in (
        ("none", 16, "has the whole GPU only"),
        ("smctrl", 17, "choose 16 or 18"),
        *(("smctrl", size, "from 2 to 130") for size in (0, 132, -2)),
    ):
        found = check(name, (size,))
        assert (found.choice, found.decode_sms) == (None, (size,))
        (problem,) = found.backends[0].problems
        assert message in problem


def test_a_library_that_every_back_end_needs(check: Check) -> None:
    # Outside the choice of a back end, and inside: the error may not get through.
    need = "SM partitions need cuda-python 13"
    found = check("auto", (), Mock(side_effect=PartitionError(need)))
    assert [backend.problems for backend in found.backends] == [(need,)] * 3
    assert (found.choice, found.why) == (None, need)
    levels = not_green(diagnose(AUTO, complete_machine(partitions=found)))
    assert levels["back end none"] is Level.RED
    assert levels["back end smctrl"] is Level.YELLOW


def test_a_gpu_that_fails_midway_is_told(gpu: FakeDriver, take: Take) -> None:
    take(partial(probe_of, gpu))
    gpu.retained = 1  # by torch
    gpu.fail["cuStreamDestroy"] = CUresult.CUDA_ERROR_INVALID_VALUE
    found = check_partitions("none", (), num_sms=132)
    assert "cuStreamDestroy" in str(found.backends[0].problem)
    assert found.choice is None


@pytest.mark.parametrize(("num_sms", "sizes"), [(132, (16, 32, 64)), (108, (8, 24, 48)), (20, (8,)), (8, ())])
def test_default_sizes(num_sms: int, sizes: tuple[int, ...]) -> None:
    assert default_decode_sms(num_sms) == sizes


# Offsets, folders, the GPU


@pytest.fixture
def calibrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file of calibrations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return offsets.cache_file()


def test_where_the_offset_comes_from(calibrations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = dataclasses.replace(DRIVER, cuda_version=13990)
    found = []
    for driver, calibrated in ((DRIVER, None), (unknown, None), (unknown, 0x600)):
        monkeypatch.setattr(machine_module, "identify_driver", lambda driver=driver: driver)
        if calibrated is not None:
            offsets.remember(driver, calibrated)
        machine = look_around(CPU)
        assert machine.mask_offset_problem is None
        found.append(machine.mask_offset)
    assert found == [TrustedOffset(0x51C, "table"), None, TrustedOffset(0x600, "calibration")]
    calibrations.write_text("{")
    machine = look_around(CPU)
    assert machine.mask_offset is None
    assert str(calibrations) in str(machine.mask_offset_problem)


def test_cache_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(bytes(1000))
    (tmp_path / "b").write_bytes(bytes(24))
    assert look_at_cache("mine", tmp_path) == CacheFolder("mine", str(tmp_path), 1024, True)
    new = tmp_path / "x" / "y"
    assert look_at_cache("new", new) == CacheFolder("new", str(new), 0, True)
    assert not new.parent.exists()
    assert not look_at_cache("a file in its place", tmp_path / "b" / "c").is_writable
    monkeypatch.setattr("os.access", lambda *_: False)
    assert not look_at_cache("mine", tmp_path).is_writable


def test_the_libraries_own_settings_place_their_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    for name, folder in zip(names, "fitx", strict=True):
        monkeypatch.setenv(name, f"/{folder}")
    assert {name: str(path) for name, path in cache_folders().items()} == {
        "bullet_graph": "/x/bullet_graph",
        "FlashInfer": "/f/.cache/flashinfer",
        "Inductor": "/i",
        "Triton": "/t",
    }


@pytest.fixture
def torch_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees a GPU."""
    properties = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132, total_memory=9, uuid="GPU-1")
    answers = {"is_available": True, "current_device": 0, "get_device_properties": properties}
    answers |= {"mem_get_info": (5, 9), "device_count": 2, "can_device_access_peer": True}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(machine_module, "_gpu_path_problem", lambda: "ImportError: that")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))


@pytest.mark.usefixtures("torch_gpu")
def test_looking_at_a_gpu(gpu: FakeDriver, take: Take) -> None:
    take(partial(probe_of, gpu))
    asked = asked_for(decode_sms=(16,), model="tiny")
    machine = look_around(asked)
    assert machine.uses_gpu
    assert machine.gpu == dataclasses.replace(GPU, name="H200", total_bytes=9, free_bytes=5, num_gpus=2)
    # Without NVML.
    assert machine.several_gpus == SeveralGpus(("H200", "H200"), (GpuPair((0, 1), None, True),), "2.28.3")
    assert machine.gpu_path_problem == "ImportError: that"
    assert machine.ledger is None
    assert machine.partitions is not None
    assert machine.partitions.choice == "smctrl"
    assert machine.provenance.device_name == "H200"
    assert not diagnose(asked, machine).works


@pytest.mark.usefixtures("torch_gpu")
def test_a_gpu_that_fails_and_one_that_is_left_alone(monkeypatch: pytest.MonkeyPatch, take: Take) -> None:
    take(lambda _: pytest.fail("the GPU was used"))
    problem = "CUDA error: all devices are busy"
    ask = Mock(side_effect=RuntimeError(problem))
    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    machine = look_around(AUTO)
    assert (machine.gpu, machine.gpu_problem) == (None, problem)
    assert not diagnose(AUTO, machine).works
    ask.reset_mock()
    machine = look_around(CPU)
    assert (machine.uses_gpu, machine.gpu, machine.gpu_path_problem) == (False, None, None)
    ask.assert_not_called()
