"""LLM inference that runs prefill and decode at the same time on one GPU.

The engines and their outputs are imported when they are first used: they need torch or numpy.
"""

from typing import TYPE_CHECKING

from bullet_graph._version import __version__
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.errors import (
    BulletGraphError,
    CacheError,
    CaptureCacheWarning,
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineDeadError,
    InsufficientMemoryError,
    LateError,
    ModelError,
    PartitionError,
    PerfTableError,
    PerfTableWarning,
    PromptError,
    RankError,
    RequestError,
    SamplingParamsError,
    TraceError,
    UnsupportedModelError,
    WorkloadError,
)
from bullet_graph.sampling_params import SamplingParams, StructuredOutputs
from bullet_graph.slo import Slo

if TYPE_CHECKING:
    from bullet_graph.engine.async_engine import AsyncEngine
    from bullet_graph.engine.engine import Engine
    from bullet_graph.engine.output import CompletionOutput, EngineStats, OutputKind, RequestOutput, TokenLogprobs
    from bullet_graph.perf.metrics import RequestMetrics

__all__ = [
    "AsyncEngine",
    "BulletGraphError",
    "CacheError",
    "CaptureCacheWarning",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "InsufficientMemoryError",
    "LateError",
    "ModelError",
    "OutputKind",
    "PartitionError",
    "PerfTableError",
    "PerfTableWarning",
    "Policy",
    "PromptError",
    "RankError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SamplingParamsError",
    "Slo",
    "StructuredOutputs",
    "TokenLogprobs",
    "TraceError",
    "UnsupportedModelError",
    "WorkloadError",
    "__version__",
]

_ON_FIRST_USE = {
    "AsyncEngine": "bullet_graph.engine.async_engine",
    "Engine": "bullet_graph.engine.engine",
    "RequestMetrics": "bullet_graph.perf.metrics",
    **dict.fromkeys(
        ("CompletionOutput", "EngineStats", "OutputKind", "RequestOutput", "TokenLogprobs"),
        "bullet_graph.engine.output",
    ),
}


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Here, since the module's import starts the clock of the engine's imports.
    from bullet_graph._imports import load  # noqa: PLC0415

    value = globals()[name] = load(_ON_FIRST_USE[name], name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
