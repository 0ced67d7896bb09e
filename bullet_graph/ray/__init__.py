"""This engine on Ray: batches on Ray Data, and a server on Ray Serve. What needs Ray is imported when it is used."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bullet_graph.ray.predictor import BatchPredictor
    from bullet_graph.ray.serving import app, deployment

__all__ = ["BatchPredictor", "app", "deployment"]

_ON_FIRST_USE = {
    "BatchPredictor": "bullet_graph.ray.predictor",
    "app": "bullet_graph.ray.serving",
    "deployment": "bullet_graph.ray.serving",
}


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Here, since the module's import starts the clock of the engine's imports.
    from bullet_graph._imports import load  # noqa: PLC0415

    value = globals()[name] = load(_ON_FIRST_USE[name], name)
    return value
