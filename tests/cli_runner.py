"""Running the console script in this process, for the end-to-end tests."""

import json
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from bullet_graph.cli.main import main

TINY = ("--model", "tiny", "--device", "cpu", "--kv-cache-bytes", "4MiB", "--max-model-len", "512")
"""Engine options that make any command quick."""
CONTEXT = click.Context(main)


def find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the first words name, and its arguments."""
    command: click.Command = main
    while isinstance(command, click.Group) and words and (child := command.get_command(CONTEXT, words[0])):
        command, words = child, words[1:]
    return command, words


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    """Invoke ``bullet-graph`` with these arguments."""
    return CliRunner().invoke(main, arguments, input=stdin)


def parsed(result: Result) -> dict[str, Any]:
    """The JSON object that a command printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(result: Result) -> str:
    """The message of a command that failed as a user's error should: exit code 2, no traceback, no output."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    return result.stderr


def printed(result: Result) -> dict[str, Any]:
    """The JSON that a command printed, and nothing beside it."""
    assert result.stderr == "", result.stderr
    return parsed(result)


def write_trace(folder: Path, *lengths: tuple[int, int]) -> Path:
    """A trace in Azure's form: requests with prompts and outputs of these lengths, 10 ms apart."""
    path = folder / "trace.csv"
    rows = [f"2023-11-16 18:15:{46 + 0.01 * i:.2f},{p},{o}" for i, (p, o) in enumerate(lengths)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


class EnergyProbe:
    """A GPU that spends 31 J on every run."""

    energy_mj = 0

    def sample(self) -> dict[str, float]:
        return {"sm_clock_mhz": 1500, "power_w": 650.0, "temperature_c": 55}

    def total_energy_mj(self) -> int:
        self.energy_mj += 31_000
        return self.energy_mj

    def close(self) -> None:
        pass
