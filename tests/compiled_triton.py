"""Triton's compiler, where the other tests interpret kernels: in a process of its own, without a GPU."""

import os
from pathlib import Path
from typing import Any

from programs import json_printed_by


def run_compiled(script: str, folder: Path) -> Any:
    """What a Python script prints, as JSON; ``folder`` is for the script and Triton's cache."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    # A file and not `-c`: Triton reads the source of kernels that a script defines.
    file = folder / "script.py"
    file.write_text(script, encoding="utf-8")
    return json_printed_by(str(file), environment=environment)
