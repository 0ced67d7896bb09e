"""Puts the loop of an engine together from its settings."""

from pathlib import Path

from bullet_graph._version import __version__
from bullet_graph.config import EngineConfig
from bullet_graph.engine.core import EngineCore
from bullet_graph.engine.trace import DecisionTrace, TraceHeader
from bullet_graph.errors import ConfigError
from bullet_graph.partition.masks import SMS_PER_TPC
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.planner.corrections import Corrections
from bullet_graph.planner.planner import Planner
from bullet_graph.runtime.executor import Executor, max_batch_sizes


def new_core(
    config: EngineConfig,
    executor: Executor,
    performance: PerformanceModel | None,
    *,
    num_kv_blocks: int,
    max_model_len: int,
    num_layers: int,
    trace: DecisionTrace | None,
    corrections: Corrections,
) -> EngineCore:
    """A loop with no requests and all blocks free.

    Args:
        corrections: what has been learned of the performance model's errors; goes on learning.

    Raises:
        ConfigError: the policy needs a performance table, partitions or a lane that the executor was made without.
    """
    if config.policy.uses_prefill_lane and not executor.has_prefill_lane:
        raise ConfigError(
            f"the policy {config.policy} needs a prefill lane, but the engine was made for one that has none: make it "
            "with policy=auto, which can serve as any other"
        )
    planner = Planner(
        config.policy,
        max_chunk_tokens=config.chunk_tokens,
        decode_sms=[SMS_PER_TPC * p.decode_tpcs for p in executor.partitions if p.decode_tpcs is not None],
        max_batch_sizes=max_batch_sizes(executor),
        num_layers=num_layers,
        model=performance,
        corrections=corrections,
    )
    return EngineCore(
        executor,
        planner,
        num_kv_blocks=num_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        num_layers=num_layers,
        prompt_order=config.prompt_order,
        trace=trace,
    )


def open_trace(
    path: Path, config: EngineConfig, *, device: str, num_sms: int | None, num_layers: int
) -> DecisionTrace:
    """Begin a trace file of an engine; see :meth:`DecisionTrace.open`."""
    header = TraceHeader(
        model=config.model,
        device=device,
        num_sms=num_sms,
        num_layers=num_layers,
        policy=str(config.policy),
        slo=str(config.slo),
        version=__version__,
    )
    return DecisionTrace.open(path, header=header, overwrite=False)
