"""Settings of the whole suite."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

# For `bench`. At the end: another build of the package, on PYTHONPATH, must come before the one beside `bench`.
sys.path.append(str(Path(__file__).parents[1]))

# Triton reads this when a kernel is defined: without a GPU the kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests run side by side, one process a core: more threads in each would only wait for one another.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smollm2", type=Path, metavar="FILE", help="GGUF file for tests/smollm2.py")


def pytest_collection_finish() -> None:
    # What the imports made lives as long as the process: a garbage collection need not look at it again.
    gc.freeze()
