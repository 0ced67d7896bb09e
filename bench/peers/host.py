"""How busy the host's processors were during a run: with small models they decide as much as the GPU."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class HostUse:
    """The host's processors over some time.

    Attributes:
        num_cpus: logical processors.
        busy_cpus: processors that worked, on average, for any program.
        stolen_cpus: processors that the hypervisor gave to other machines, on average.
    """

    num_cpus: int
    busy_cpus: float
    stolen_cpus: float


class HostClock:
    """Counts processor time from its creation on."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def use(self) -> HostUse | None:
        """The use since this clock was made; None where the system does not count, or no time has passed."""
        before, after = self._before, _cpu_times()
        if before is None or after is None:
            return None
        # A guest's time is part of the user's.
        passed = {name: after[name] - before[name] for name in after if not name.startswith("guest")}
        total, stolen, num_cpus = sum(passed.values()), passed.get("steal", 0.0), psutil.cpu_count() or 1
        if total <= 0:
            return None
        idle = passed.get("idle", 0.0) + passed.get("iowait", 0.0)
        return HostUse(num_cpus, num_cpus * (total - idle - stolen) / total, num_cpus * stolen / total)


def _cpu_times() -> dict[str, float] | None:
    try:
        return dict(psutil.cpu_times()._asdict())
    except (OSError, TypeError):  # a container's /proc/stat may be missing, or malformed
        return None
