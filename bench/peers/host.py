"""What the host's processors did meanwhile: with small models they decide as much as the GPU."""

from dataclasses import dataclass

import psutil

_WORKING = ("user", "nice", "system", "irq", "softirq")
_WAITING = ("idle", "iowait")
_STOLEN = ("steal",)


@dataclass(frozen=True, slots=True)
class HostUse:
    """The host's processors over some time.

    Attributes:
        num_cpus: how many the operating system has.
        busy_cpus: how many of them worked, on average, for whatever program.
        stolen_cpus: how many the machine below a virtual one gave to others, on average.
    """

    num_cpus: int
    busy_cpus: float
    stolen_cpus: float


class HostClock:
    """Counts processor time from its making on."""

    def __init__(self) -> None:
        self._before = _seconds()

    def use(self) -> HostUse | None:
        """What happened since this clock was made; None where the system does not tell, or no time has passed."""
        before, after = self._before, _seconds()
        if before is None or after is None:
            return None
        busy, idle, stolen = (b - a for a, b in zip(before, after, strict=True))
        total, num_cpus = busy + idle + stolen, psutil.cpu_count() or 1
        if total <= 0:
            return None
        return HostUse(num_cpus, num_cpus * busy / total, num_cpus * stolen / total)


def _seconds() -> tuple[float, float, float] | None:
    """Of all processors together so far: working, idle, taken away."""
    try:
        times = psutil.cpu_times()
    except (OSError, TypeError):  # a container's /proc/stat may be missing, or not be one
        return None
    # Systems differ in what they count; a guest's time is part of the user's.
    working, waiting, stolen = (
        sum(getattr(times, name, 0.0) for name in names) for names in (_WORKING, _WAITING, _STOLEN)
    )
    return working, waiting, stolen
