"""README's first commands work in a fresh clone, typed one after the other, on a CPU."""

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
ON_A_GPU = ("profile", "llama-3.1-8b")
"""Words of commands that need one."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with this virtual environment, as after an installation, and a small model in the large one's place."""
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / ".venv" / ".installed").touch()
    write_checkpoint(folder / "Qwen3-8B", "qwen3")
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, they run an 8B model")
@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("make") is None, reason="needs git and make")
def test_the_first_commands_of_the_readme_work_in_a_clone(clone: Path) -> None:
    blocks = re.findall(r"^```\n(.*?)^```", (clone / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if re.match("make |source |bullet-graph ", line)]
    assert lines[:2] == [next(line for line in lines if line.startswith("make demo")), "source .venv/bin/activate"]
    script = ["set -e"]
    for line in lines:
        if line.startswith("bullet-graph serve"):
            script += [f"{line.partition('#')[0]} 2>server.log &", "server=$!"]
        elif not any(word in line for word in (*ON_A_GPU, "make demo")):  # that is what .ci/run ends with
            script.append(line)
    script += ["until grep -q 'serving ./Qwen3-8B at' server.log; do kill -0 $server; sleep 0.1; done"]
    script += ["kill -TERM $server", "wait $server", "grep . server.log"]
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("the server's port is in use")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("met all targets, %", "there is no performance table"):
        assert shown in done.stdout + done.stderr
