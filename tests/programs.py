"""Python programs in processes of their own, for what the tests' own process cannot show."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def printed_by(program: str, *arguments: str) -> str:
    """What a program prints, which must end well and complain of nothing but forks, of which Python 3.12 warns."""
    command = [sys.executable, "-Wignore:This process:DeprecationWarning", "-c", textwrap.dedent(program), *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def json_printed_by(*arguments: str, environment: Mapping[str, str]) -> Any:
    """What Python prints as JSON; it must end well."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
