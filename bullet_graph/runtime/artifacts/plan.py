"""What captures are for, besides machine and model: the JSON object that a cache's entry is named by."""

from pathlib import Path
from typing import Any

from bullet_graph.config import EngineConfig
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.runtime.capture_plan import max_forward_rows
from bullet_graph.runtime.fingerprint import plan_mapping
from bullet_graph.runtime.resolve import Runtime


def gpu_plan(plan: CapturePlan, config: EngineConfig) -> dict[str, Any]:
    """Of an engine on a GPU that follows this plan."""
    mapping = plan_mapping(plan)
    # Without graphs nothing is compiled for them.
    return mapping if config.cuda_graphs else {**mapping, "cuda_graphs": False}


def cpu_plan(config: EngineConfig, runtime: Runtime) -> dict[str, Any]:
    """Of an engine on the CPU that compiles its halves: for how many rows."""
    return {
        "model": Path(config.model).name,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "compiled_rows": max_forward_rows(config),
    }
