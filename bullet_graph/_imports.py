"""Imports the modules that need torch: without the garbage collector, which would take a quarter of the time.

Import this module right before the first of them: the start report counts the engine's imports from here.
"""

import gc
import time
from importlib import import_module
from typing import Any

BEGAN_S = time.perf_counter()
"""When the imports began, on the clock of ``time.perf_counter``."""


def load(module: str, name: str) -> Any:
    """Import a module and return its attribute ``name``."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(module), name)
    finally:
        if was_enabled:
            gc.enable()
