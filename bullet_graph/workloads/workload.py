"""A workload: the lengths of its requests and, where the source has them, arrival times and prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokenize = Callable[[str], Sequence[int]]
"""Turns a text into token ids."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload.

    Attributes:
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: length of the output, at least 1; a benchmark forces it.
        arrival_s: seconds after the workload's first request, or None where the source has no times.
        prompt_text: the prompt, where the source has it.
        prompt_token_ids: ``prompt_text`` as ``prompt_tokens`` token ids.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None
    prompt_text: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """At least one request, in order of arrival; reports call the workload by its ``name``."""

    name: str
    requests: tuple[WorkloadRequest, ...]


def make_prompt_token_ids(
    request: WorkloadRequest, index: int, vocab_size: int, seed: int
) -> npt.NDArray[np.int32]:
    """Return a request's own token ids, or random ones of its length.

    Random ids depend on (seed, index) alone and differ between indices, so no two prompts share a prefix.

    Args:
        request: the request to make a prompt for.
        index: its place in the workload, at least 0.
        vocab_size: random ids are uniform in [0, vocab_size).
        seed: at least 0.

    Returns:
        int32 [request.prompt_tokens].
    """
    if request.prompt_token_ids is not None:
        return np.asarray(request.prompt_token_ids, dtype=np.int32)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,))))
    return generator.integers(0, vocab_size, size=request.prompt_tokens, dtype=np.int32)
