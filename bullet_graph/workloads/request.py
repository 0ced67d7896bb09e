"""What a workload asks of an engine: lengths, arrivals and, where the source has them, prompts."""

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
        prompt_token_ids: ``prompt_text`` as token ids (``prompt_tokens`` of them).
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None
    prompt_text: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        name: the spec or file name it was loaded from, for reports.
        requests: at least one.
    """

    name: str
    requests: tuple[WorkloadRequest, ...]


def make_prompt_token_ids(
    request: WorkloadRequest, index: int, vocab_size: int, seed: int
) -> npt.NDArray[np.int32]:
    """Token ids for a request: its own where it has them, else random ones of the length it asks for.

    Random ids follow from (seed, index) alone and differ between indices, so that no two prompts share a
    prefix that a cache could reuse.

    Args:
        request: the request to make a prompt for.
        index: its place in the workload, at least 0.
        vocab_size: ids are drawn uniformly from [0, vocab_size).
        seed: at least 0.

    Returns:
        int32 array of shape [request.prompt_tokens].
    """
    if request.prompt_token_ids is not None:
        return np.asarray(request.prompt_token_ids, dtype=np.int32)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,))))
    return generator.integers(0, vocab_size, size=request.prompt_tokens, dtype=np.int32)
