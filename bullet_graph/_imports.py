"""The import of the package: when it began, and without the garbage collector. To be imported before all else."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bullet_graph.graphs.collector import paused_collector

BEGAN_S = time.perf_counter()
"""On the clock of ``time.perf_counter``."""


@contextmanager
def collector_aside() -> Iterator[None]:
    """Keep the cyclic garbage collector from running in the block, and from looking through all of it right after.

    Modules are no garbage: to look through torch's again and again takes a quarter of the import. What is there at the
    end is put straight among the oldest objects, unless the process has frozen some, which that would release.
    """
    with paused_collector():
        yield
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
