"""Clocks, power, temperature and energy of GPUs while something runs, read through NVML.

NVML is optional: without its Python package, its library or a device of the given UUID, every figure is None.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

SAMPLING_INTERVAL_S = 0.1

_SAMPLED = ("sm_clock_mhz", "power_w", "temperature_c")


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Least, mean and greatest value over the samples."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """The device while it was watched; None where NVML has no figure.

    Of several GPUs: the lowest clock, the highest temperature, and the sums of power and energy. ``energy_joules`` is
    the difference of the boards' energy counters. The driver refreshes them about every 100 ms, so figures of much
    shorter runs mean little.
    """

    num_samples: int
    sm_clock_mhz: SampleRange | None
    power_w: SampleRange | None
    temperature_c: SampleRange | None
    energy_joules: float | None


@dataclass(frozen=True, slots=True)
class NvmlProbe:
    """One GPU or several together, through the ``pynvml`` module."""

    _nvml: Any
    _handles: Sequence[Any]

    @classmethod
    def open(cls, *device_uuids: str) -> "NvmlProbe | None":
        """Find GPUs by their UUIDs, with or without the ``GPU-`` prefix; None if anything is missing."""
        nvml = _open_nvml()
        if nvml is None:
            return None
        try:
            return cls(nvml, [_handle_of(nvml, uuid) for uuid in device_uuids])
        except nvml.NVMLError:
            nvml.nvmlShutdown()
            return None

    def sample(self) -> dict[str, float | None]:
        """Read clock, power and temperature now, by their names in a report; None for what the GPU does not tell."""
        nvml = self._nvml
        clock_mhz = self._read(min, lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
        power_mw = self._read(sum, nvml.nvmlDeviceGetPowerUsage)
        temperature_c = self._read(max, lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        power_w = None if power_mw is None else power_mw / 1e3
        return {"sm_clock_mhz": clock_mhz, "power_w": power_w, "temperature_c": temperature_c}

    def total_energy_mj(self) -> int | None:
        """Millijoules since the driver was loaded; None for a GPU without the counter."""
        return self._read(sum, self._nvml.nvmlDeviceGetTotalEnergyConsumption)

    def close(self) -> None:
        """Shut NVML down."""
        self._nvml.nvmlShutdown()

    def _read(self, together: Callable[[list[int]], int], function: Callable[[Any], int]) -> int | None:
        try:
            return together([function(handle) for handle in self._handles])
        except self._nvml.NVMLError:
            return None


def open_probe(device: "torch.device", num_gpus: int = 1) -> NvmlProbe | None:
    """Probe a GPU, and those of other ranks after it; None on the CPU, or where one of them is unknown or missing."""
    # Others read versions here without torch.
    import torch  # noqa: PLC0415

    first = device.index or 0
    if device.type == "cpu" or first + num_gpus > torch.cuda.device_count():
        return None
    return NvmlProbe.open(*(str(torch.cuda.get_device_properties(first + i).uuid) for i in range(num_gpus)))


def nvml_driver_version() -> str | None:
    """Version of the NVIDIA driver; None where NVML is missing."""
    return _asked(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def linked_by_nvlink(one_uuid: str, other_uuid: str) -> bool | None:
    """Whether NVLink joins two GPUs, directly or by switches; None where NVML does not tell."""

    def ask(nvml: Any) -> bool:
        one, other = (_handle_of(nvml, uuid) for uuid in (one_uuid, other_uuid))
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    return _asked(ask)


def _asked(ask: Callable[[Any], _T]) -> _T | None:
    """What NVML answers; None where it is missing or has no answer."""
    nvml = _open_nvml()
    if nvml is None:
        return None
    try:
        return ask(nvml)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _handle_of(nvml: Any, uuid: str) -> Any:
    # NVML's indices do not follow CUDA_VISIBLE_DEVICES; its UUIDs do.
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _open_nvml() -> Any:
    """Import the module and initialize the library; None where either is missing."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


class DeviceMonitor:
    """Watches a device from a background thread between ``__enter__`` and ``__exit__``, which closes the probe.

    Without a probe it watches nothing and reports None throughout.
    """

    def __init__(self, probe: NvmlProbe | None, *, interval_s: float = SAMPLING_INTERVAL_S) -> None:
        self._probe = probe
        self._interval_s = interval_s
        self._samples: list[dict[str, float | None]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device-monitor", daemon=True)
        self._energy_before_mj: int | None = None
        self._report: DeviceReport | None = None

    @property
    def report(self) -> DeviceReport:
        """The aggregated samples; RuntimeError before the ``with`` block has ended."""
        if self._report is None:
            raise RuntimeError("the device report exists only once the monitor's with block has ended")
        return self._report

    def __enter__(self) -> Self:
        if self._probe is not None:
            self._energy_before_mj = self._probe.total_energy_mj()
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        energy_joules = None
        if self._probe is not None:
            energy_after_mj = self._probe.total_energy_mj()
            if self._energy_before_mj is not None and energy_after_mj is not None:
                energy_joules = (energy_after_mj - self._energy_before_mj) / 1e3
            self._stop.set()
            self._thread.join()
            # A run shorter than one interval still gets one sample.
            self._samples = self._samples or [self._probe.sample()]
            self._probe.close()
        self._report = DeviceReport(
            num_samples=len(self._samples),
            **{name: _range(each[name] for each in self._samples) for name in _SAMPLED},
            energy_joules=energy_joules,
        )

    def _watch(self) -> None:
        # Wait first: a sample taken at once would make the idle clock the run's lowest.
        while self._probe is not None and not self._stop.wait(self._interval_s):
            self._samples.append(self._probe.sample())


def _range(values: Iterable[float | None]) -> SampleRange | None:
    known = [value for value in values if value is not None]
    return SampleRange(min(known), sum(known) / len(known), max(known)) if known else None
