"""README's first commands work in a fresh clone, on a CPU."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
DEMO, ACTIVATE, *LINES = re.findall("^(?:make|source|bullet-graph) .*", "".join(BLOCKS), re.MULTILINE)
ON_A_GPU = ("profile", "llama-3.1-8b")
"""Words of commands that need one."""
SHOWN = {"serve": "there is no performance table", "generate": "Memory ledger", "simulate": "met all targets, %"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with this virtual environment, as after an installation, and a small model in the large one's place."""
    folder = tmp_path_factory.mktemp("readme") / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / ".venv" / ".installed").touch()
    write_checkpoint(folder / "Qwen3-8B", "qwen3")
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, they run an 8B model")
@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("make") is None, reason="needs git and make")
@pytest.mark.parametrize("line", [line for line in LINES if not any(word in line for word in ON_A_GPU)])
def test_a_command_of_the_readme_works_in_a_clone(line: str, clone: Path) -> None:
    assert DEMO.startswith("make demo")  # .ci/run ends with it
    assert ACTIVATE == "source .venv/bin/activate"
    command = line.split()[1]
    if command == "serve":
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 8000)) == 0:
                pytest.skip("the server's port is in use")
        line = f"""{line.partition("#")[0]} 2>log &
        until grep -q 'serving ./Qwen3-8B at' log; do kill -0 $!; sleep 0.1; done
        kill -TERM $!; wait $!; cat log"""
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{ACTIVATE}\n{line}"],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SHOWN[command] in done.stdout + done.stderr
