"""The device monitor over a fake NVML: arithmetic, missing figures, missing devices."""

# ruff: noqa: N802 - the fake has the names of the real module

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from bullet_graph.perf import energy


class FakeNvml(ModuleType):
    """Stands in for the ``pynvml`` module: one GPU; calls named in ``refused`` raise NVMLError.

    Its clock falls by 100 MHz a reading, its energy counter gains 2.5 J, and its second power reading fails.
    """

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.refused: tuple[str, ...] = ()
        self.num_open = 0
        self.clocks_mhz = itertools.count(1900, -100)
        self.links = iter((0, 5))
        self.energies_mj = itertools.count(5_000, 2_500)
        self.powers_mw = itertools.chain([345_678, None], itertools.repeat(345_678))
        self.second_power = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., object]:
        expected, answers = {
            "nvmlSystemGetDriverVersion": ((), itertools.repeat("580.1")),
            "nvmlDeviceGetHandleByUUID": (("GPU-ab",), itertools.repeat("gpu")),
            "nvmlDeviceGetP2PStatus": (("gpu", "gpu", self.NVML_P2P_CAPS_INDEX_NVLINK), self.links),
            "nvmlDeviceGetClockInfo": (("gpu", self.NVML_CLOCK_SM), self.clocks_mhz),
            "nvmlDeviceGetPowerUsage": (("gpu",), self.powers_mw),
            "nvmlDeviceGetTemperature": (("gpu", self.NVML_TEMPERATURE_GPU), itertools.repeat(61)),
            "nvmlDeviceGetTotalEnergyConsumption": (("gpu",), self.energies_mj),
        }[name]

        def call(*arguments: object) -> object:
            assert arguments == expected
            assert self.num_open
            answer = None if name in self.refused else next(answers)
            if answer is None:
                self.second_power.set()
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


def test_monitor_samples_in_the_background_until_the_end(nvml: FakeNvml) -> None:
    with energy.DeviceMonitor(energy.NvmlProbe.open("ab"), interval_s=0.001) as monitor:
        assert nvml.second_power.wait(timeout=10)
    seen = monitor.report.num_samples
    assert monitor.report == energy.DeviceReport(
        num_samples=seen,
        sm_clock_mhz=energy.SampleRange(2000 - 100 * seen, 1950 - 50 * seen, 1900),
        power_w=energy.SampleRange(345.678, pytest.approx(345.678), 345.678),
        temperature_c=energy.SampleRange(61, 61, 61),
        energy_joules=2.5,
    )
    assert seen >= 2
    time.sleep(0.01)
    assert next(nvml.clocks_mhz) == 1900 - 100 * seen, "nothing was read after the end"


def test_a_run_shorter_than_the_interval_is_sampled_once(nvml: FakeNvml) -> None:
    nvml.refused = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature")
    with (
        energy.DeviceMonitor(energy.NvmlProbe.open("ab"), interval_s=60) as monitor,
        pytest.raises(RuntimeError, match="has ended"),
    ):
        _ = monitor.report
    report = monitor.report
    assert (report.num_samples, report.energy_joules, report.temperature_c) == (1, None, None)


@pytest.mark.usefixtures("nvml")
def test_monitor_lets_go_of_the_device_when_the_run_fails_and_without_one_reports_none() -> None:
    with pytest.raises(KeyError), energy.DeviceMonitor(energy.NvmlProbe.open("ab"), interval_s=60):
        raise KeyError
    with energy.DeviceMonitor(None) as monitor:
        pass
    assert monitor.report == energy.DeviceReport(
        num_samples=0, sm_clock_mhz=None, power_w=None, temperature_c=None, energy_joules=None
    )


@pytest.mark.parametrize("uuid", ["ab", "GPU-ab"])
def test_probe_reads_units_of_the_report_and_leaves_out_what_the_gpu_refuses(nvml: FakeNvml, uuid: str) -> None:
    probe = energy.NvmlProbe.open(uuid)
    assert probe is not None
    assert probe.sample() == {"sm_clock_mhz": 1900, "power_w": 345.678, "temperature_c": 61}
    assert probe.total_energy_mj() == 5_000
    nvml.refused = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption")
    assert probe.sample() == {"sm_clock_mhz": 1800, "power_w": None, "temperature_c": 61}
    assert probe.total_energy_mj() is None
    probe.close()


def test_without_library_package_or_gpu_there_is_no_probe_and_no_version(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert energy.nvml_driver_version() == "580.1"
    nvml.refused = ("nvmlSystemGetDriverVersion", "nvmlDeviceGetHandleByUUID")
    assert (energy.nvml_driver_version(), energy.NvmlProbe.open("ab")) == (None, None)
    assert nvml.num_open == 0
    nvml.refused = ("nvmlInit",)
    assert (energy.nvml_driver_version(), energy.NvmlProbe.open("ab")) == (None, None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (energy.nvml_driver_version(), energy.NvmlProbe.open("ab")) == (None, None)


def test_gpus_that_are_missing_have_no_probe() -> None:
    assert energy.open_probe(torch.device("cuda", 0), torch.cuda.device_count() + 1) is None


def test_links_between_gpus(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [energy.linked_by_nvlink("ab", "GPU-ab") for _ in range(2)] == [True, False]
    nvml.refused = ("nvmlDeviceGetP2PStatus",)
    assert energy.linked_by_nvlink("ab", "ab") is None
    assert not nvml.num_open
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.linked_by_nvlink("ab", "ab") is None


def test_of_several_gpus_the_sums_and_the_slowest(nvml: FakeNvml) -> None:
    nvml.powers_mw = itertools.cycle([300_000, 250_000])
    probe = energy.NvmlProbe.open("ab", "GPU-ab")
    assert probe is not None
    assert probe.sample() == {"sm_clock_mhz": 1800, "power_w": 550.0, "temperature_c": 61}
    assert probe.total_energy_mj() == 5_000 + 7_500
    probe.close()
