"""What the host's processors did meanwhile: with small models they decide as much as the GPU."""

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_COUNTED = 8
"""Columns of a ``cpu`` line up to the stolen time; those after it are part of the first ones."""


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
    """Counts processor time from its making on; Linux alone tells.

    Args:
        stat: the kernel's counters.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._before = _ticks(stat)

    def use(self) -> HostUse | None:
        """What happened since this clock was made; None where the kernel does not tell, or no time has passed."""
        before, after = self._before, _ticks(self._stat)
        if before is None or after is None:
            return None
        spent = [b - a for a, b in zip(before, after, strict=True)]
        total, num_cpus = sum(spent), os.cpu_count() or 1
        if total <= 0:
            return None
        stolen, idle = spent[_STEAL], spent[_IDLE] + spent[_IOWAIT]
        return HostUse(num_cpus, num_cpus * (total - idle - stolen) / total, num_cpus * stolen / total)


def _ticks(stat: Path) -> list[int] | None:
    """The counters of all processors together."""
    try:
        first = stat.read_text(encoding="ascii").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    ticks = [int(field) for field in first[1 : 1 + _COUNTED]]
    return ticks if first[0] == "cpu" and len(ticks) == _COUNTED else None
