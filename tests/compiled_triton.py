"""Triton's compiler, where the other tests interpret kernels: in a process of its own, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_compiled(script: str, folder: Path) -> Any:
    """What a Python script prints, as JSON; ``folder`` is for the script and Triton's cache."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": str(ROOT),
    }
    # A file and not `-c`: Triton reads the source of kernels that a script defines.
    file = folder / "script.py"
    file.write_text(script, encoding="utf-8")
    process = subprocess.run(
        [sys.executable, file], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)
