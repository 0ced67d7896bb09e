"""Requests that the GPU tests of engines have in common."""

from pathlib import Path
from typing import Any

import numpy as np

from bullet_graph import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
LENGTHS = (1, 5, 16, 17, 100, 255, 600, 33)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 1000, size=n).tolist() for n in LENGTHS]


def open_engine(folder: Path, policy: str, **settings: Any) -> Engine:
    settings = {"max_num_seqs": 6, "kv_cache_bytes": 2**28, "perf_table": "roofline"} | settings
    return Engine(str(folder), policy=policy, **settings)
