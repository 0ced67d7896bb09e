"""LLM inference that runs prefill and decode at the same time on one GPU."""

from bullet_graph import _imports  # isort: skip - the clock of the imports starts here

with _imports.collector_aside():
    from bullet_graph._version import __version__
    from bullet_graph.config import EngineConfig, Policy
    from bullet_graph.engine.async_engine import AsyncEngine
    from bullet_graph.engine.engine import Engine
    from bullet_graph.engine.output import (
        CompletionOutput,
        EngineStats,
        OutputKind,
        RequestOutput,
        TokenLogprobs,
    )
    from bullet_graph.errors import (
        BulletGraphError,
        CacheError,
        CaptureCacheWarning,
        CheckpointError,
        ConfigError,
        DeviceError,
        EngineDeadError,
        InsufficientMemoryError,
        ModelError,
        PartitionError,
        PerfTableError,
        PromptError,
        RequestError,
        SamplingParamsError,
        TraceError,
        UnsupportedModelError,
        WorkloadError,
    )
    from bullet_graph.perf.metrics import RequestMetrics
    from bullet_graph.sampling_params import SamplingParams
    from bullet_graph.slo import Slo

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
    "ModelError",
    "OutputKind",
    "PartitionError",
    "PerfTableError",
    "Policy",
    "PromptError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SamplingParamsError",
    "Slo",
    "TokenLogprobs",
    "TraceError",
    "UnsupportedModelError",
    "WorkloadError",
    "__version__",
]
