"""What benchmarks have in common: a command, and JSON with the command line and the provenance."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from bullet_graph.cli.main import ErrorReporting
from bullet_graph.cli.result_file import to_json, write_result_file
from bullet_graph.perf.provenance import collect_provenance


class Tool(ErrorReporting):
    """A benchmark's command: it has ``-h``, shows defaults, and reports errors as ``bullet-graph`` does.

    Without a docstring of its own, its help is that of its module, whose example keeps its lines.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.context_settings = {"help_option_names": ["-h", "--help"], "show_default": True}
        if self.help is None:
            about = sys.modules[more["callback"].__module__].__doc__ or ""
            self.help = about.replace("\n\n    ", "\n\n\b\n    ").replace("``", "`")


def write_report(path: Path, fields: dict[str, Any], *, device: str = "cuda") -> None:
    """Write a result file: the fields, the command line as ``argv``, and the provenance."""
    provenance = dataclasses.asdict(collect_provenance(device))
    write_result_file(path, to_json({**fields, "provenance": provenance}))
