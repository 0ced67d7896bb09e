"""How benchmarks keep results: JSON with the provenance, which holds the command line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from bullet_graph.cli.result_file import write_result_file
from bullet_graph.perf.provenance import collect_provenance


def write_report(path: Path, fields: dict[str, Any], *, device: str = "cuda") -> None:
    """Write a result file: the fields and the provenance."""
    report = {**fields, "provenance": dataclasses.asdict(collect_provenance(device))}
    write_result_file(path, json.dumps(report, indent=1))
