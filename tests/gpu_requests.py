"""Requests that the GPU tests of engines have in common."""

import numpy as np

from bullet_graph import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
LENGTHS = (1, 5, 16, 17, 100, 255, 600, 33)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 1000, size=n).tolist() for n in LENGTHS]
