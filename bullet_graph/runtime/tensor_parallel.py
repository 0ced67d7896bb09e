"""Builds an engine's executor: on this process alone, or on several ranks of which this process is rank 0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from bullet_graph.config import EngineConfig
from bullet_graph.errors import BulletGraphError, DeviceError
from bullet_graph.models.sharding import shard
from bullet_graph.runtime.build import BuiltRuntime, Start, build_executor
from bullet_graph.runtime.capture_cache import cached_perf_table, configured_store
from bullet_graph.runtime.memory import MemoryLedger, with_kv_blocks
from bullet_graph.runtime.performance import measure_if_missing
from bullet_graph.runtime.ranks import Message, RankedExecutor, Ranks
from bullet_graph.runtime.resolve import Runtime


def build_on_ranks(config: EngineConfig, runtime: Runtime, start: Start) -> BuiltRuntime:
    """As :func:`build_executor`, with ``tensor_parallel_size`` ranks; the findings are rank 0's.

    Raises also what another rank raised, and RankError for one that ended. No process is left then.
    """
    own, *others = (of_rank(config, runtime, rank) for rank in range(config.tensor_parallel_size))
    measure_if_missing(config, own, partial(cached_perf_table, configured_store(config), own), start.clock)
    if not others:
        return build_executor(config, own, start)
    with _started(config, others, lambda other: ("start", config, other)) as ranks:
        with start.clock.phase("device"):
            ranks.connect(runtime.device)
        together = replace(start, agree=partial(agreed, ranks), communicators=ranks.communicators)
        built = build_executor(config, own, together)
        ranks.gather("built")
    return replace(built, executor=RankedExecutor(built.executor, ranks))


@contextmanager
def other_ranks(config: EngineConfig, runtime: Runtime, start: Callable[[Runtime], Message]) -> Iterator[Ranks]:
    """Start the other ranks, each with a message about what it runs, and end them with the block.

    ``runtime`` is that of the whole model. Raises as :func:`of_rank`.
    """
    others = [of_rank(config, runtime, rank) for rank in range(1, config.tensor_parallel_size)]
    with _started(config, others, start) as ranks:
        yield ranks
    ranks.stop()
    ranks.close()


@contextmanager
def _started(config: EngineConfig, others: Sequence[Runtime], start: Callable[[Runtime], Message]) -> Iterator[Ranks]:
    """Start the other ranks. Where the block fails, end all of them, and raise the error that came first."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    ranks = Ranks(config.tensor_parallel_size)
    try:
        for rank, other in enumerate(others, start=1):
            ranks.send(*start(other), torch.get_num_threads(), only=rank)
        yield ranks
    except BaseException as error:
        try:
            # One of ours says all; any other may be due to another rank.
            if isinstance(error, Exception) and not isinstance(error, BulletGraphError):
                ranks.explain(error)
            raise
        finally:
            ranks.fail(RuntimeError("the start has failed"))
            ranks.stop()
            ranks.close()


def agreed(ranks: Ranks, ledger: MemoryLedger) -> MemoryLedger:
    """Rank 0's ledger, with as many KV blocks as every rank has room for; they are told."""
    least = min(ledger.num_kv_blocks, *(blocks for _, blocks in ranks.gather("blocks")))
    ranks.send("blocks", least)
    return with_kv_blocks(ledger, least)


def of_rank(config: EngineConfig, runtime: Runtime, rank: int) -> Runtime:
    """What a rank runs: its share of the model, on a GPU of its own after rank 0's.

    Raises ConfigError where the model cannot be divided, DeviceError where GPUs are missing.
    """
    device, num_ranks = runtime.device, config.tensor_parallel_size
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + rank)
        if device.index >= (found := torch.cuda.device_count()):
            raise DeviceError(
                f"tensor_parallel_size={num_ranks} needs a GPU for each rank from {runtime.device} on, but torch sees "
                f"{found}: lower it, or check CUDA_VISIBLE_DEVICES"
            )
    model = shard(runtime.model, num_ranks, rank, expert_parallel=config.expert_parallel)
    return replace(runtime, model=model, device=device)
