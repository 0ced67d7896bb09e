"""Python's cyclic garbage collector, kept away from captures."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the collector from running in the block, and leave it as it was.

    It may free whatever it finds, kernels among it, and unloading one while a stream is captured ends the capture with
    an error.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
