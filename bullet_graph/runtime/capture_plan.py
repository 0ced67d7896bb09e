"""The capture plan that a configuration names, and the plan that a capture cache's entry was built for."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError
from bullet_graph.graphs.capture_plan import CapturePlan, load_plan

if TYPE_CHECKING:
    # It imports torch, and the simulator does without.
    from bullet_graph.runtime.resolve import Runtime


def max_forward_rows(config: EngineConfig) -> int:
    """Most rows of a forward."""
    return config.chunk_tokens + config.max_num_seqs


def named_plan(config: EngineConfig, runtime: "Runtime") -> CapturePlan | None:
    """The plan that the configuration names, checked against engine and device; None where it names none.

    Raises:
        ConfigError: it cannot be read, or was made for another model, dtype, GPU or engine.
    """
    if config.capture_plan is None:
        return None
    plan = load_plan(config.capture_plan)
    dtype = str(runtime.dtype).removeprefix("torch.")
    check_plan(plan, config, name=config.capture_plan, dtype=dtype, num_sms=runtime.num_sms)
    return plan


def check_plan(plan: CapturePlan, config: EngineConfig, *, name: str, dtype: str, num_sms: int) -> None:
    """Make sure that an engine of this configuration can follow the plan called ``name``.

    Args:
        dtype: of the engine, resolved.
        num_sms: of the GPU.

    Raises:
        ConfigError: the plan was made for something else; names the key, both values, and what to do.
    """
    name = f"the capture plan {name}"
    for key, found, required in (
        ("model", plan.model, Path(config.model).name),
        ("dtype", plan.dtype, dtype),
        ("num_sms", plan.num_sms, num_sms),
        ("max_num_seqs", plan.max_num_seqs, config.max_num_seqs),
    ):
        if found != required:
            raise ConfigError(
                f"{name} was made for {key}={found}, but the engine has {key}={required}: set the engine's to that of "
                "the plan, or make another plan with `bullet-graph capture plan`"
            )
    max_rows = max_forward_rows(config)
    if plan.piecewise_rows and plan.piecewise_rows[-1] > max_rows:
        raise ConfigError(
            f"{name} captures forwards of {plan.piecewise_rows[-1]} rows in piecewise_rows, but the longest of "
            f"this engine has {max_rows} (chunk and max_num_seqs): remove the larger sizes, or allow longer chunks"
        )
    sms = config.policy.decode_sms
    if sms is not None and sms not in plan.decode_sms:
        raise ConfigError(
            f"{name} has no decode lane of {sms} SMs, which the policy {config.policy} needs, but "
            f"{', '.join(map(str, plan.decode_sms)) or 'the whole GPU only'}: choose one of these, or add a [[decode]]"
        )


def plan_mapping(plan: CapturePlan) -> dict[str, Any]:
    """A capture plan as a JSON object."""
    mapping: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan)))
    return mapping


def gpu_entry_plan(plan: CapturePlan, config: EngineConfig) -> dict[str, Any]:
    """The plan of an entry for an engine on a GPU."""
    mapping = plan_mapping(plan)
    # Without graphs nothing is compiled for them.
    return mapping if config.cuda_graphs else {**mapping, "cuda_graphs": False}


def cpu_entry_plan(config: EngineConfig, runtime: "Runtime") -> dict[str, Any]:
    """The plan of an entry for an engine on the CPU: the rows that layers are compiled for."""
    return {
        "model": Path(config.model).name,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "compiled_rows": max_forward_rows(config),
    }
