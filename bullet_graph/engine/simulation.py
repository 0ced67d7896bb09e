"""An engine in virtual time: the real loop, scheduler and planner over a simulated device. No torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig
from bullet_graph.engine.core import EngineCore
from bullet_graph.engine.output import EngineStats, OutputKind
from bullet_graph.engine.replay import Replay, replay, timed_requests
from bullet_graph.engine.request import Request, Sample
from bullet_graph.engine.scheduler import Scheduler
from bullet_graph.engine.sequence import Sequence as EngineSequence
from bullet_graph.engine.trace import DecisionTrace
from bullet_graph.errors import ConfigError
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.partition.masks import partition_of
from bullet_graph.perf.metrics import ServedRequest
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.planner.planner import Planner
from bullet_graph.runtime.memory import held_tokens
from bullet_graph.runtime.simulated import SimulatedExecutor, StepRecord
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Workload
from bullet_graph.workloads.workload import Times

HOST_OVERHEAD_MS = 0.2
"""Default host time per launch."""
_EAGER_LAYERS_PER_LAUNCH = 2.5
"""Host time of a layer launched kernel by kernel, in launches: 0.5 ms; layers in FP8 take more, in 16 bits less."""

_VOCAB_SIZE = 256
"""Of random prompts: blocks of 16 tokens still differ, and Python has such numbers once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The engine to simulate: its configuration, and what a start would find out.

    Without ``decode_sms`` in the configuration there are all sizes of the performance model, unless ``capture_plan``
    names the CUDA graphs there are. ``host_overhead_ms`` and ``block_bytes`` are those of
    :class:`~bullet_graph.runtime.simulated.SimulatedExecutor`, ``lone_rows`` those of its base, and ``window`` is the
    scheduler's. Numbers out of range raise ConfigError at construction.
    """

    config: EngineConfig
    kv_cache_tokens: int
    max_model_len: int
    capture_plan: CapturePlan | None = None
    host_overhead_ms: float = HOST_OVERHEAD_MS
    block_bytes: int | None = None
    lone_rows: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.host_overhead_ms < math.inf:
            raise ConfigError(f"host_overhead_ms must be a number of at least 0, got {self.host_overhead_ms}")
        if self.num_kv_blocks <= -(-held_tokens(self.config, self.window, self.max_model_len) // KV_BLOCK_TOKENS):
            raise ConfigError(
                f"the KV cache must hold one sequence of max_model_len={self.max_model_len} tokens, but it holds "
                f"{self.kv_cache_tokens}: make it larger, or lower max_model_len"
            )

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the cache, the padding block included."""
        return self.kv_cache_tokens // KV_BLOCK_TOKENS + 1


class SimulatedEngine(EngineCore):
    """The engine's loop in virtual time, without weights, tokenizer or text.

    ``model`` gives steps' times and the planner's predictions. Raises ConfigError if it lacks a decode lane's size.
    """

    def __init__(
        self,
        model: PerformanceModel,
        settings: SimulationSettings,
        *,
        trace: DecisionTrace | None = None,
        on_step: Callable[[StepRecord], object] = lambda _: None,
    ) -> None:
        config, plan = settings.config, settings.capture_plan
        decode_sms = (config.decode_sms or tuple(model.decode_sms)) if plan is None else plan.decode_sms
        unknown = sorted(set(decode_sms) - set(model.decode_sms))
        if unknown:
            raise ConfigError(
                f"a decode lane of {unknown[0]} SMs is not in the performance table, which has "
                f"{', '.join(map(str, model.decode_sms)) or 'none'}: choose among these, or measure it"
            )
        executor = SimulatedExecutor(
            model,
            partitions=[partition_of(sms, num_sms=model.num_sms) for sms in decode_sms],
            host_overhead_ms=settings.host_overhead_ms,
            eager_layer_ms=_EAGER_LAYERS_PER_LAUNCH * settings.host_overhead_ms,
            block_bytes=settings.block_bytes,
            max_batch_sizes={} if plan is None else {p: sizes[-1] for p, sizes in plan.batch_sizes.items()},
            on_step=on_step,
        )
        planner = Planner(
            config.policy,
            max_chunk_tokens=config.max_num_batched_tokens,
            decode_sms=decode_sms,
            model=model,
            lone_rows=settings.lone_rows,
        )
        super().__init__(
            executor,
            planner,
            Scheduler(
                num_blocks=settings.num_kv_blocks,
                max_num_seqs=config.max_num_seqs,
                max_model_len=settings.max_model_len,
                prompt_order=config.prompt_order,
                window=settings.window,
                held_tokens=held_tokens(config, settings.window, settings.max_model_len),
                prefix_caching=config.prefix_caching and settings.window is None,
            ),
            num_layers=model.num_layers,
            trace=trace,
        )
        self.now, self.sleep_until = executor.now, executor.sleep_until

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        output_kind: OutputKind,
        arrival_s: float,
        slo: Slo,
    ) -> None:
        """Queue a request; its prompt matters to the prefix cache alone, and every output token is 0."""
        token_ids = np.asarray(prompt, dtype=np.int32)
        sequence = EngineSequence(request_id, 0, token_ids, sampling_params, 0, frozenset(), slo, arrival_s)
        self.add(Request([Sample(sequence, None)], output_kind))


class Simulation(NamedTuple):
    """A replay in virtual time, from 0 on, and the engine's counters at its end."""

    replay: Replay
    stats: EngineStats


def simulate(
    model: PerformanceModel,
    workload: Workload,
    arrivals: Times,
    settings: SimulationSettings,
    *,
    slo: Slo = NO_TARGETS,
    max_concurrency: int | None = None,
    trace: DecisionTrace | None = None,
    on_step: Callable[[StepRecord], object] = lambda _: None,
    on_done: Callable[[ServedRequest], object] = lambda _: None,
) -> Simulation:
    """Serve a workload in virtual time, each request to its recorded length; the same arguments give the same result.

    ``arrivals`` are in seconds, one for each request, not decreasing. ``on_step`` is called with every finished launch,
    ``on_done`` with each request's outcome. Settings that do not fit the performance model raise ConfigError.
    """
    requests = timed_requests(workload, arrivals, vocab_size=_VOCAB_SIZE, slo=slo, seed=settings.config.seed)
    engine = SimulatedEngine(model, settings, trace=trace, on_step=on_step)
    return Simulation(replay(engine, requests, max_concurrency=max_concurrency, on_done=on_done), engine.stats())
