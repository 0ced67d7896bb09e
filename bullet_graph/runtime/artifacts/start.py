"""A start with a cache of captures: take what is there, check what it computes, and else compile everything."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from bullet_graph.config import EngineConfig
from bullet_graph.graphs.compile_counts import CompileCounter, CompileCounts
from bullet_graph.models.decoder import Decoder
from bullet_graph.perf.start_report import PhaseName, StartClock
from bullet_graph.perf.table import PerfTable
from bullet_graph.runtime.artifacts.measured import cached_perf_table
from bullet_graph.runtime.artifacts.opening import CapturesOpener, store_of
from bullet_graph.runtime.artifacts.use import CacheUse, Captures, forget_kernels
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.fingerprint import fingerprint_of
from bullet_graph.runtime.resolve import Runtime
from bullet_graph.runtime.self_check import SelfCheckStep


@dataclass(frozen=True, slots=True)
class SelfCheckHook:
    """What a self_check needs of an executor that has not run a step yet.

    Attributes:
        decoder: whose uncompiled forward is the reference.
        logits_of: see :func:`~bullet_graph.runtime.self_check.run_self_check`.
        batch_sizes: that are captured or compiled, rising.
    """

    decoder: Decoder
    logits_of: Callable[[SelfCheckStep], Tensor]
    batch_sizes: tuple[int, ...]


class Started(Protocol):
    """What a start has made."""

    @property
    def executor(self) -> Executor:
        """Ready for steps."""

    @property
    def self_check(self) -> SelfCheckHook | None:
        """None where nothing was compiled."""


_Started = TypeVar("_Started", bound=Started)


def start_with_captures(
    config: EngineConfig,
    runtime: Runtime,
    plan: dict[str, Any],
    captures_for: CapturesOpener,
    start: Callable[[Captures], _Started],
    clock: StartClock,
) -> tuple[_Started, CompileCounts, CacheUse]:
    """Start with what a cache has; where that computes something else than the model, start again without it.

    Args:
        plan: that the cache's entry is for.
        captures_for: opens the cache.
        start: loads the weights and builds the executor.
        clock: told of what the cache costs.

    Returns:
        What ``start`` made, what was compiled on the way, and what the cache has brought.
    """
    gpu = runtime.device.type == "cuda"

    def noted(phase: PhaseName) -> AbstractContextManager[None]:
        return nullcontext() if config.capture_cache is None else clock.phase(phase)

    with ExitStack() as undo:
        with ExitStack() as opened:
            with noted("capture cache"):
                captures = opened.enter_context(captures_for(config, runtime, plan))
            counter = opened.enter_context(CompileCounter(gpu=gpu))
            started = start(captures)
            undo.callback(started.executor.shutdown)
            hook = started.self_check
            with noted("self-check"):
                holds = hook is None or captures.holds(hook.decoder, hook.logits_of, hook.batch_sizes)
        undo.pop_all()
    if holds:
        return started, counter.counts, captures.use
    started.executor.shutdown()
    # What they hold must go before the same is allocated again.
    del started, hook
    forget_kernels()
    captures = captures.without()
    with CompileCounter(gpu=gpu) as again:
        restarted = start(captures)
    return restarted, counter.counts + again.counts, captures.use


def cached_table_for(config: EngineConfig, runtime: Runtime) -> PerfTable | None:
    """The performance table that the configured cache has for this machine and model."""
    store = store_of(config)
    return None if store is None else cached_perf_table(store, fingerprint_of(runtime))
