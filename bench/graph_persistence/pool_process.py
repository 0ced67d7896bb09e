"""Whether fixed addresses can also be had through a MemPool of torch's own allocator (step C)."""

from typing import Any, cast

import torch

from bench.graph_persistence.arena import Arena, as_torch_allocator, enter_primary_context
from bench.graph_persistence.job import Job
from bench.graph_persistence.step_log import StepLog
from bullet_graph.partition.driver import CudaDriver

ARENA_BYTES = 2 << 30


def run(job: Job, log: StepLog) -> None:  # noqa: ARG001 - every role's signature
    """All of it."""
    driver = CudaDriver()
    enter_primary_context(driver)
    arena = log.run("C: arena at a fixed address", lambda: Arena.create(driver, ARENA_BYTES))
    if arena is None:
        return
    allocator, keep = as_torch_allocator(arena)
    log.run("C: MemPool over the arena, eager and captured", lambda: through_pools(arena, allocator))
    log.run("C: torch's own segments in this process", own_segments)
    del keep


def through_pools(arena: Arena, allocator: Any) -> dict[str, Any]:
    """A tensor of a pool, and a capture's temporary: do both lie in the arena?"""
    pools = [torch.cuda.MemPool(allocator) for _ in range(2)]
    with torch.cuda.use_mem_pool(pools[0]):
        held = torch.ones(1 << 20, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The pool's own id, which no type of torch's stands for.
        graph.capture_begin(pool=cast(Any, pools[1].id), capture_error_mode="thread_local")
        try:
            temporary = held * 2
        finally:
            graph.capture_end()
        graph.replay()
    torch.cuda.synchronize()
    inside = [arena.base <= one.data_ptr() < arena.base + arena.num_bytes for one in (held, temporary)]
    return {
        "works": all(inside) and float(temporary.sum()) == 2.0 * (1 << 20),
        "eager_inside": inside[0],
        "captured_inside": inside[1],
        "segments": [[hex(address), num_bytes] for address, num_bytes in arena.log],
    }


def own_segments() -> dict[str, Any]:
    """Where torch's caching allocator puts its own memory, with nothing asked of it."""
    return {"address": hex(torch.empty(64 << 20, dtype=torch.uint8, device="cuda").data_ptr())}
