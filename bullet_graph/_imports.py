"""Imports the modules that need torch: without the garbage collector, which would take a quarter of the time.

Import this module right before the first of them: the start report counts the engine's imports from here.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

BEGAN_S = time.perf_counter()
"""When the imports began, on the clock of ``time.perf_counter``."""


def load(module: str, name: str) -> Any:
    """Import a module and return its attribute ``name``."""
    with collector_aside():
        return getattr(import_module(module), name)


@contextmanager
def collector_aside() -> Iterator[None]:
    """Keep the cyclic garbage collector from running in the block, and from scanning what the block created."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        # Modules are no garbage: they go to the oldest generation, unless that would release what others have frozen.
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
    finally:
        if was_enabled:
            gc.enable()
