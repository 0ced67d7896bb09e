"""How benchmarks end: JSON with the command line and the provenance, or an error in a line."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli import EXIT_ERROR
from bullet_graph.cli.result_file import to_json, write_result_file
from bullet_graph.perf.provenance import collect_provenance


class Refusal(click.ClickException):
    """An error of the caller or the machine: one line, with the command line's exit code."""

    exit_code = EXIT_ERROR


def write_report(path: Path, fields: dict[str, Any], *, device: str = "cuda") -> None:
    """Write a result file: the fields, the command line as ``argv``, and the provenance."""
    provenance = dataclasses.asdict(collect_provenance(device))
    write_result_file(path, to_json({**fields, "provenance": provenance}))
