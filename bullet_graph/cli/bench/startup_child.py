"""One start of an engine in a process of its own: ``python -m bullet_graph.cli.bench.startup_child RESULT < CONFIG``.

Both are pickled. The result is a file with the phases of the start and other fields, or the error that ended it.
"""

import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

from bullet_graph import Engine
from bullet_graph.config import EngineConfig
from bullet_graph.errors import BulletGraphError
from bullet_graph.perf.start_report import StartReport
from bullet_graph.sampling_params import SamplingParams


def start(config: EngineConfig) -> tuple[StartReport, dict[str, Any]]:
    """Start an engine and generate a token."""
    with Engine(**config.values()) as engine:
        prompt = [0] * min(16, engine.max_model_len - 1)
        engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        capture = engine.capture
        return engine.start_report, {
            "capture": None if capture is None else dataclasses.asdict(capture),
            "compiles": dataclasses.asdict(engine.compiles),
            "cache_use": dataclasses.asdict(engine.cache_use),
            "num_missing_graphs": engine.stats().num_missing_graphs,
        }


def main() -> None:
    """Write the result."""
    found: object
    try:
        found = start(pickle.loads(sys.stdin.buffer.read()))
    except BulletGraphError as error:
        found = error
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
