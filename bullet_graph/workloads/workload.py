"""A workload: the lengths of its requests, when they arrive, their prompts, and what these have in common."""

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.errors import ConfigError, WorkloadError

Times = npt.NDArray[np.float64]
Tokenize = Callable[[str], Sequence[int]]
"""Turns a text into token ids."""


@dataclass(frozen=True, slots=True)
class TurnBefore:
    """The request that a later turn of a conversation follows.

    Attributes:
        index: of that request, among those of the workload.
        num_tokens: of its prompt and its output, with which the later turn's prompt begins.
        think_s: seconds from its last token until the later turn arrives.
    """

    index: int
    num_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload.

    Attributes:
        prompt_tokens: length of the whole prompt, at least 1.
        output_tokens: length of the output, at least 1; a benchmark forces it.
        arrival_s: seconds after the workload's first request, or None where the source has no times.
        prompt_token_ids: the prompt, or what it adds to the turn before, where the source has it.
        prefix_ids: names of the pieces with which the prompt begins; a piece has the same tokens in every prompt.
        prefix_tokens: length of each piece; the prompt may end within the last one.
        follows: the turn before in a conversation; None for a first turn. Later turns have no ``prefix_ids``.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None
    prompt_token_ids: tuple[int, ...] | None = None
    prefix_ids: tuple[int, ...] = ()
    prefix_tokens: int = 0
    follows: TurnBefore | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """At least one request; reports call the workload by its ``name``.

    First turns are in order of arrival. Each later turn comes after the turn before it, and before the next first turn.
    ``longer``, if there is no end, makes one with so many requests, which begins with this one.
    """

    name: str
    requests: tuple[WorkloadRequest, ...]
    longer: "Callable[[int], Workload] | None" = field(default=None, compare=False)

    def first(self, num_requests: int) -> "Workload":
        """Its first requests; all, where it has fewer and cannot be made longer."""
        if num_requests > len(self.requests) and self.longer is not None:
            return self.longer(num_requests)
        return Workload(self.name, self.requests[:num_requests])

    def without(self, indices: Collection[int]) -> "Workload":
        """The requests but these, which were not sent; it is to be counted, not to be served."""
        return Workload(self.name, tuple(r for index, r in enumerate(self.requests) if index not in indices))

    def require_fit(self, max_model_len: int, share: float = 0.0) -> None:
        """WorkloadError if no request, or less than this share, is short enough to be served."""
        total = len(self.requests)
        num_fit = sum(r.prompt_tokens + r.output_tokens <= max_model_len for r in self.requests)
        if num_fit == 0 or num_fit < share * total:
            raise WorkloadError(
                f"{total - num_fit} of the {total} requests of {self.name} are longer than max_model_len="
                f"{max_model_len}, prompt and output together, and would fail at any rate: take a model or "
                "--max-model-len with room for them, or another workload"
            )

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts begin alike by design."""
        return any(request.prefix_ids or request.follows for request in self.requests)

    @property
    def shareable_prompt_tokens(self) -> int:
        """Prompt tokens that a prefix cache of unlimited size would hold, in whole blocks, served in this order.

        The last token of a prompt is always computed. Nothing has computed the last token of an output.
        """
        known: set[int] = set()
        return sum(_shareable_tokens(request, known) for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How the requests of a workload arrive.

    Random gaps, the first one included, follow a gamma distribution of shape ``burstiness``, as in vLLM's serving
    benchmark: 1 is a Poisson process, less is burstier, more is steadier, infinite has equal gaps. One factor then
    scales them so that the last request arrives at exactly ``num_requests / request_rate``. Every seed thus has the
    same mean rate, and one seed has the same pattern at every rate.

    Of conversations, these are the times of first turns: they arrive at the rate divided by the mean number of turns.
    A later turn has the time of its first turn here; a replay lets it arrive once the turn before has ended, and leaves
    it out if all conversations have begun by then.

    Attributes:
        request_rate: requests per second; infinite lets all arrive at 0, None takes the recorded times.
        time_scale: factor on recorded times: 0.5 replays at twice the recorded rate.
        max_concurrency: most requests under way at once; None is no limit.
        seed: of random gaps and random prompts, at least 0.
        uncounted_s: requests that arrive within so many seconds are served, but are in no latency and no share.
    """

    request_rate: float | None
    burstiness: float = 1.0
    time_scale: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    uncounted_s: float = 0.0

    def times(self, workload: Workload) -> Times:
        """Arrival times: float64 [number of requests], seconds after the start, not decreasing.

        Raises ConfigError where a number is out of range or has no effect, or the burstiness so small that all gaps
        vanish; WorkloadError where recorded times are asked for, but the workload (synthetic, ShareGPT) has none.
        """
        rate = self.request_rate
        if rate is not None and self.time_scale != 1:
            raise ConfigError("time_scale changes recorded times: give request_rate=trace, or leave it out")
        if (rate is None or math.isinf(rate)) and self.burstiness != 1:
            raise ConfigError("burstiness is of random gaps: give a finite request_rate, or leave it out")
        return self._recorded(workload) if rate is None else self._drawn(workload, rate)

    def _recorded(self, workload: Workload) -> Times:
        if not 1e-9 <= self.time_scale <= 1e9:
            raise ConfigError(f"the scale of a trace's times must be from 1e-9 to 1e9, got {self.time_scale}")
        times = [request.arrival_s for request in workload.requests]
        if None in times:
            raise WorkloadError(
                f"{workload.name} has no arrival times: give a request rate instead, or a trace that has them "
                "(Azure CSV, Mooncake JSONL)"
            )
        return np.array(times, dtype=np.float64) * self.time_scale

    def _drawn(self, workload: Workload, request_rate: float) -> Times:
        num_requests = len(workload.requests)
        if self.seed < 0:
            raise ConfigError(f"arrivals need a seed of at least 0, got {self.seed}")
        for name, value in (("request_rate", request_rate), ("burstiness", self.burstiness)):
            if value != math.inf and not 1e-9 <= value <= 1e9:
                raise ConfigError(f"{name} must be a number above 0 (1e-9 to 1e9), or inf, got {value}")
        if math.isinf(request_rate):
            return np.zeros(num_requests)
        conversation = np.cumsum([request.follows is None for request in workload.requests]) - 1
        num_gaps = int(conversation[-1]) + 1
        if math.isinf(self.burstiness):
            gaps = np.ones(num_gaps)
        else:
            # PCG64 by name: numpy may change its default generator.
            gaps = np.random.Generator(np.random.PCG64(self.seed)).gamma(self.burstiness, size=num_gaps)
        times = np.cumsum(gaps)
        if times[-1] == 0:
            raise ConfigError(
                f"burstiness={self.burstiness} leaves no gap between {num_requests} requests: raise the burstiness"
            )
        scaled: Times = (times / times[-1] * (num_requests / request_rate))[conversation]
        return scaled


def make_prompt_token_ids(request: WorkloadRequest, index: int, vocab_size: int, seed: int) -> npt.NDArray[np.int32]:
    """A request's own token ids, or random ones in [0, vocab_size): int32 [request.prompt_tokens].

    Those of a later turn are what it adds to the turn before, which is shorter. Random ids depend on (seed, index)
    alone, those of a piece on the seed and its name: other than in such pieces, no two prompts share a prefix.
    """

    def draw(key: tuple[int, ...], size: int) -> npt.NDArray[np.int32]:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
        return generator.integers(0, vocab_size, size=size, dtype=np.int32)

    if request.prompt_token_ids is not None:
        return np.asarray(request.prompt_token_ids, dtype=np.int32)
    size = request.prompt_tokens - (0 if request.follows is None else request.follows.num_tokens)
    pieces = [draw((0, name), request.prefix_tokens) for name in request.prefix_ids]
    return np.concatenate([*pieces, draw((index,), max(0, size - request.prefix_tokens * len(pieces)))])[:size]


def _shareable_tokens(request: WorkloadRequest, known: set[int]) -> int:
    """Tokens of the prompt in whole blocks that are ``known`` by their prefix; adds the prompt's."""
    if request.follows is not None:
        shared = request.follows.num_tokens - 1
    else:
        # Pieces with names, or the blocks of a recorded prompt.
        ids, size = request.prompt_token_ids, request.prefix_tokens
        names: Sequence[Hashable] = request.prefix_ids
        if ids is not None:
            size = KV_BLOCK_TOKENS
            names = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
        chain = tuple(itertools.accumulate(names, lambda prefix, name: hash((prefix, name)), initial=0))[1:]
        shared = size * sum(key in known for key in chain)
        known.update(chain)
    return min(shared, request.prompt_tokens - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
