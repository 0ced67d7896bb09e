"""The energy that the GPU has used since the server started."""

import asyncio

from bullet_graph.perf.energy import DeviceProbe


class EnergyMeter:
    """Reads the board's energy counter when somebody asks for it.

    Args:
        probe: of the GPU, closed with the meter; None has no figure.

    Attributes:
        joules: as last read; None where nothing tells it.
    """

    def __init__(self, probe: DeviceProbe | None) -> None:
        self._probe = probe
        self._start_mj = None if probe is None else probe.total_energy_mj()
        self.joules: float | None = None if self._start_mj is None else 0.0

    async def read(self) -> None:
        """Read the counter, which may take milliseconds, without holding up the event loop."""
        if self._probe is not None and self._start_mj is not None:
            now_mj = await asyncio.to_thread(self._probe.total_energy_mj)
            if now_mj is not None:
                self.joules = (now_mj - self._start_mj) / 1e3

    def close(self) -> None:
        """Let go of the device."""
        if self._probe is not None:
            self._probe.close()
