"""Python programs in processes of their own, for what the tests' own process cannot show."""

import subprocess
import sys
import textwrap
from pathlib import Path


def printed_by(program: str, *arguments: str) -> str:
    """What a program prints, which must end well and complain of nothing."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
