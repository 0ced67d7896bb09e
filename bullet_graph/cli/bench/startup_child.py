"""One start of an engine in a process of its own: ``python -m bullet_graph.cli.bench.startup_child RESULT < CONFIG``.

The configuration is pickled. The result is a JSON file with the phases of the start, or the error that ended it.
"""

import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Any

from bullet_graph import Engine
from bullet_graph.cli import EXIT_ERROR
from bullet_graph.config import EngineConfig
from bullet_graph.errors import BulletGraphError
from bullet_graph.sampling_params import SamplingParams

_PROMPT_TOKENS = 16


def start(config: EngineConfig) -> dict[str, Any]:
    """Start an engine and generate a token; times are those of ``time.perf_counter``."""
    with Engine(**config.values()) as engine:
        prompt = [0] * min(_PROMPT_TOKENS, engine.max_model_len - 1)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        engine.generate([prompt], params, use_tqdm=False)
        report, capture = engine.start_report, engine.capture
        return {
            **dataclasses.asdict(report),
            "capture": None if capture is None else dataclasses.asdict(capture),
            "compiles": dataclasses.asdict(engine.compiles),
            "cache_use": dataclasses.asdict(engine.cache_use),
            "num_missing_graphs": engine.stats().num_missing_graphs,
        }


def main() -> int:
    """Write the result; returns the exit code."""
    result = Path(sys.argv[1])
    try:
        found = start(pickle.loads(sys.stdin.buffer.read()))
    except BulletGraphError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    result.write_text(json.dumps(found), encoding="utf-8")
    return EXIT_ERROR if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
