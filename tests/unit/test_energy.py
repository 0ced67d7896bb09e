"""The device monitor over a fake NVML: arithmetic, missing figures, missing devices."""

# ruff: noqa: N802 - the fake has the names of the real module

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import ClassVar

import pytest

from bullet_graph.perf.energy import (
    DeviceMonitor,
    DeviceReport,
    DeviceSample,
    NvmlProbe,
    SampleRange,
    nvml_driver_version,
)


class FakeNvml(ModuleType):
    """Stands in for the ``pynvml`` module: one GPU; calls named in ``refused`` raise NVMLError."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    ANSWERS: ClassVar[dict[str, tuple[tuple[object, ...], object]]] = {
        "nvmlSystemGetDriverVersion": ((), "580.1"),
        "nvmlDeviceGetHandleByUUID": (("GPU-ab",), "gpu"),
        "nvmlDeviceGetClockInfo": (("gpu", NVML_CLOCK_SM), 1980),
        "nvmlDeviceGetPowerUsage": (("gpu",), 345_678),
        "nvmlDeviceGetTemperature": (("gpu", NVML_TEMPERATURE_GPU), 61),
        "nvmlDeviceGetTotalEnergyConsumption": (("gpu",), 5_000),
    }

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.refused: tuple[str, ...] = ()
        self.num_open = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        expected, answer = self.ANSWERS[name]

        def call(*arguments: object) -> object:
            assert arguments == expected
            if name in self.refused:
                raise self.NVMLError(name)
            return answer

        return call

    def nvmlInit(self) -> None:
        if "nvmlInit" in self.refused:
            raise self.NVMLError
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    yield nvml
    assert nvml.num_open == 0


class FakeProbe:
    """A device whose clock falls by 100 MHz a sample and whose energy counter gains 2.5 J a reading."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.energy_mj: int | None = 1_000_000
        self.closed = False
        self.sampled_twice = threading.Event()

    def sample(self) -> DeviceSample:
        assert not self.closed
        self.num_samples += 1
        if self.num_samples >= 2:
            self.sampled_twice.set()
        return DeviceSample(2000 - 100 * self.num_samples, None if self.num_samples == 2 else 300.0, None)

    def total_energy_mj(self) -> int | None:
        assert not self.closed
        if self.energy_mj is not None:
            self.energy_mj += 2_500
        return self.energy_mj

    def close(self) -> None:
        self.closed = True


def test_monitor_samples_in_the_background_until_the_end() -> None:
    probe = FakeProbe()
    with DeviceMonitor(probe, interval_s=0.001) as monitor:
        assert probe.sampled_twice.wait(timeout=10)
    seen = probe.num_samples
    assert monitor.report == DeviceReport(
        num_samples=seen,
        sm_clock_mhz=SampleRange(2000 - 100 * seen, 1950 - 50 * seen, 1900),
        power_w=SampleRange(300.0, 300.0, 300.0),
        temperature_c=None,
        energy_joules=2.5,
    )
    assert seen >= 2
    assert probe.closed
    time.sleep(0.01)
    assert probe.num_samples == seen


def test_a_run_shorter_than_the_interval_is_sampled_once() -> None:
    probe = FakeProbe()
    probe.energy_mj = None
    with DeviceMonitor(probe, interval_s=60) as monitor, pytest.raises(RuntimeError, match="has ended"):
        _ = monitor.report
    assert (monitor.report.num_samples, monitor.report.energy_joules) == (1, None)


def test_monitor_lets_go_of_the_device_when_the_run_fails() -> None:
    probe = FakeProbe()
    with pytest.raises(KeyError), DeviceMonitor(probe, interval_s=60):
        raise KeyError
    assert probe.closed


def test_monitor_without_a_device_reports_none() -> None:
    with DeviceMonitor.for_gpu(None) as monitor:
        pass
    assert monitor.report == DeviceReport(
        num_samples=0, sm_clock_mhz=None, power_w=None, temperature_c=None, energy_joules=None
    )


@pytest.mark.parametrize("uuid", ["ab", "GPU-ab"])
def test_probe_reads_units_of_the_report_and_leaves_out_what_the_gpu_refuses(
    nvml: FakeNvml, uuid: str
) -> None:
    probe = NvmlProbe.open(uuid)
    assert probe is not None
    assert probe.sample() == DeviceSample(1980, 345.678, 61)
    assert probe.total_energy_mj() == 5_000
    nvml.refused = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption")
    assert probe.sample() == DeviceSample(1980, None, 61)
    assert probe.total_energy_mj() is None
    probe.close()


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_no_library_or_no_such_gpu_gives_no_probe(nvml: FakeNvml, refused: str) -> None:
    nvml.refused = (refused,)
    assert NvmlProbe.open("ab") is None


def test_no_python_package_gives_no_probe_and_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlProbe.open("ab") is None
    assert nvml_driver_version() is None


def test_driver_version(nvml: FakeNvml) -> None:
    assert nvml_driver_version() == "580.1"
    nvml.refused = ("nvmlSystemGetDriverVersion",)
    assert nvml_driver_version() is None
