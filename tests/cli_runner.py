"""Running the console script in this process, for the end-to-end tests."""

import json
from typing import Any

from click.testing import CliRunner, Result

from bullet_graph.cli.main import main

TINY = ("--model", "tiny", "--device", "cpu", "--kv-cache-bytes", "4MiB", "--max-model-len", "512")
"""Engine options that make any command quick."""


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    """Invoke ``bullet-graph`` with these arguments."""
    return CliRunner().invoke(main, arguments, input=stdin)


def parsed(result: Result) -> dict[str, Any]:
    """The JSON object that a command printed."""
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(result: Result) -> str:
    """The message of a command that failed as a user's error should: exit code 2, no traceback, no output."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    return result.stderr
