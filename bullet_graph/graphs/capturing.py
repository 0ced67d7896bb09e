"""Capturing a CUDA graph while other streams and threads are at work."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what the block launches on the current stream; yields the graph, which is complete after the block.

    ``torch.cuda.graph`` would synchronize and empty the allocator's cache for every graph. Python's cyclic garbage
    collector is paused: it may unload a kernel, which ends a capture with an error.
    """
    graph = torch.cuda.CUDAGraph()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()
    finally:
        if was_enabled:
            gc.enable()
