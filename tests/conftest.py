"""Settings of the whole suite."""

import functools
import gc
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# Until all tests are imported: what that makes stays.
gc.disable()

# For `bench`. At the end: another build of the package, on PYTHONPATH, must come before the one beside `bench`.
sys.path.append(str(Path(__file__).parents[1]))

# Tests run side by side, one process a core: more threads, also of what they start, would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where xdist's processes run the tests, the one that hands them out needs no torch.
if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv:
    import torch

    torch.set_num_threads(1)
    # Triton reads this when a kernel is defined: without a GPU the kernels run in its interpreter.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("untimed"), max_examples=1000)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smollm2", type=Path, metavar="FILE", help="GGUF file for tests/smollm2.py")


def pytest_collection_finish() -> None:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        hasten(interpreter)
    # What the imports made lives as long as the process: a garbage collection need not look at it again.
    gc.freeze()
    gc.enable()


def hasten(interpreter: ModuleType) -> None:
    """Spare Triton's interpreter half of its time: it looks all of its functions up at each call of a kernel."""

    @functools.cache
    def builtins_of(place: object) -> list[tuple[str, object]]:
        return inspect.getmembers(place, interpreter.tl.core.is_builtin)

    def patch(place: object, builder: object, scope: object) -> None:
        builtins = builtins_of(place)
        if builtins and getattr(place, builtins[0][0]) is builtins[0][1]:  # else a caller has done so
            for name, member in builtins:
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch
    # It computes conditions of overflows that it then asserts in debug mode only, which it has not.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
