"""How benchmarks keep results: JSON with the command line and the provenance."""

import dataclasses
from pathlib import Path
from typing import Any

from bullet_graph.cli.result_file import to_json, write_result_file
from bullet_graph.perf.provenance import collect_provenance


def write_report(path: Path, fields: dict[str, Any], *, device: str = "cuda") -> None:
    """Write a result file: the fields, the command line as ``argv``, and the provenance."""
    provenance = dataclasses.asdict(collect_provenance(device))
    write_result_file(path, to_json({**fields, "provenance": provenance}))
