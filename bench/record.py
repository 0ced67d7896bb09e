"""How benchmarks keep results: JSON that names the command, the commit, the versions and the device."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from bullet_graph.cli.result_file import write_result_file
from bullet_graph.perf.provenance import collect_provenance

ROOT = Path(__file__).resolve().parents[1]


def command_line() -> str:
    """This process's command line, without absolute paths below the repository or the home folder."""
    words = [_short(word) for word in sys.argv]
    return shlex.join(["python", *words])


def _short(word: str) -> str:
    for folder, prefix in ((ROOT, ""), (Path.cwd(), ""), (Path.home(), "~/")):
        word = word.replace(f"{folder}/", prefix)
    return word


def write_report(path: Path, fields: dict[str, Any], *, device: str = "cuda") -> None:
    """Write a result file: the fields, the command line and the provenance."""
    report = {
        "argv": command_line(),
        **fields,
        "provenance": dataclasses.asdict(collect_provenance(device)),
    }
    write_result_file(path, json.dumps(report, indent=1))
