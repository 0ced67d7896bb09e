"""Settings of simulated engines."""

from dataclasses import fields, replace
from typing import Any

from bullet_graph.engine.simulation import SimulationSettings


def changed(settings: SimulationSettings, **changes: Any) -> SimulationSettings:
    """The settings with other values: of the simulation, or else of the engine's configuration."""
    own = {each.name: changes.pop(each.name) for each in fields(settings) if each.name in changes}
    return replace(settings, config=replace(settings.config, **changes), **own)
