"""Synthetic workloads: ``conv`` and ``code`` follow the lengths of the Azure traces, ``longdoc`` is long documents.

``sharegpt`` and ``arxiv`` have published lengths of chats and of summaries of papers. ``chat`` is conversations with
shared system prompts. Request i depends on the seed and i alone, so a longer workload begins with the shorter one.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

from bullet_graph.errors import WorkloadError
from bullet_graph.workloads.workload import TurnBefore, Workload, WorkloadRequest

SYNTHETIC_NAMES = ("conv", "code", "longdoc", "sharegpt", "arxiv", "chat")


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A lognormal distribution, cut off at ``most``."""

    median: float
    mean: float
    most: float

    def at(self, normals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Map draws from the standard normal distribution, float64 of any shape, to this one."""
        # A lognormal of median m and mean μ has σ = sqrt(2 ln(μ / m)).
        sigma = np.sqrt(2 * np.log(self.mean / self.median))
        drawn: npt.NDArray[np.float64] = np.minimum(self.median * np.exp(sigma * normals), self.most)
        return drawn

    def tokens_at(self, normals: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The same as lengths of at least 1 token, int64."""
        return np.maximum(np.rint(self.at(normals)).astype(np.int64), 1)


# bench/README.md says where these numbers come from. Of prompts and of outputs:
_LENGTHS = {
    "longdoc": (LogNormal(5800, 7000, 32_000), LogNormal(150, 200, 2000)),
    "sharegpt": (LogNormal(1730, 2666, 7000), LogNormal(415, 481, 1000)),
    "arxiv": (LogNormal(7059, 7904, 15_000), LogNormal(208, 230, 1000)),
}
_CHAT_SYSTEM_PROMPTS = 20
_CHAT_SYSTEM = LogNormal(800, 1000, 4000)
_CHAT_MEAN_TURNS = 3.5
_CHAT_MOST_TURNS = 20
_CHAT_MESSAGE = LogNormal(40, 80, 4000)
_CHAT_ANSWER = LogNormal(150, 250, 2000)
CHAT_THINK_S = LogNormal(7, 10, 120)
_MOST_REQUESTS = 10**7


@dataclass(frozen=True, slots=True)
class LengthTables:
    """Joint distribution of prompt and output lengths, as quantiles that are interpolated on a log scale.

    Requests are divided into equal shares by prompt length, and each share has its own table of outputs. This keeps
    any dependence between the two: in the conv trace, prompts of about 1,100 tokens have the longest outputs.
    ``bench/fit_workloads.py`` measures the tables.

    Attributes:
        probabilities: ascending, from 0 to 1; each length is the quantile at one of them.
        output_tokens: a row per share, shortest prompts first.
    """

    probabilities: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[tuple[int, ...], ...]

    def lengths(self, uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Map points of the unit square, float64 [num_requests, 2], to prompt and output lengths, int64 alike."""
        prompt_at, output_at = uniforms[:, 0], uniforms[:, 1]
        log_lengths = np.empty_like(uniforms)
        log_lengths[:, 0] = np.interp(prompt_at, self.probabilities, np.log(self.prompt_tokens))
        share = (prompt_at * len(self.output_tokens)).astype(np.int64)
        for index, output_tokens in enumerate(self.output_tokens):
            rows = share == index
            log_lengths[rows, 1] = np.interp(output_at[rows], self.probabilities, np.log(output_tokens))
        return np.rint(np.exp(log_lengths)).astype(np.int64)


def synthetic_workload(name: str, num_requests: int, seed: int = 0) -> Workload:
    """Generate a workload of ``SYNTHETIC_NAMES``: its requests have lengths but neither prompts nor arrival times.

    Of ``chat``, the last conversation may lack its last turns.

    Raises WorkloadError for an unknown name, no request or over 10 million, or a negative seed.
    """
    if name not in SYNTHETIC_NAMES:
        raise WorkloadError(f"unknown workload {name!r}: use synthetic:{', synthetic:'.join(SYNTHETIC_NAMES)}")
    if not 1 <= num_requests <= _MOST_REQUESTS or seed < 0:
        found = f"{num_requests} requests and seed {seed}"
        raise WorkloadError(f"a synthetic workload has 1 to {_MOST_REQUESTS:,} requests and a seed ≥ 0, got {found}")
    # PCG64 by name: numpy may change its default generator.
    generator = np.random.Generator(np.random.PCG64(seed))
    if name == "chat":
        system_tokens = _CHAT_SYSTEM.tokens_at(generator.standard_normal(_CHAT_SYSTEM_PROMPTS)).tolist()
        conversations = _conversations(seed, system_tokens)
        return Workload(f"synthetic:{name}", tuple(itertools.islice(conversations, num_requests)))
    if name in _LENGTHS:
        normals = generator.standard_normal((num_requests, 2)).T
        lengths = np.stack([of.tokens_at(each) for of, each in zip(_LENGTHS[name], normals, strict=True)], axis=1)
    else:
        data = resources.files(__package__) / "data" / "azure_lengths.json"
        tables = LengthTables(**json.loads(data.read_text(encoding="utf-8"))[name])
        lengths = tables.lengths(generator.random((num_requests, 2)))
    requests = tuple(WorkloadRequest(prompt, output, arrival_s=None) for prompt, output in lengths.tolist())
    return Workload(name=f"synthetic:{name}", requests=requests)


def _conversations(seed: int, system_tokens: Sequence[int]) -> Iterator[WorkloadRequest]:
    """All turns of one conversation after the other, without end."""
    popularity = 1 / np.arange(1, len(system_tokens) + 1)  # Zipf's law
    index = 0
    for conversation in itertools.count():
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(conversation,))))
        system = int(generator.choice(len(system_tokens), p=popularity / popularity.sum()))
        num_turns = min(generator.geometric(1 / _CHAT_MEAN_TURNS), _CHAT_MOST_TURNS)
        messages, answers, thoughts = generator.standard_normal((3, num_turns))
        lengths = np.stack([_CHAT_MESSAGE.tokens_at(messages), _CHAT_ANSWER.tokens_at(answers)], axis=1)
        pieces: tuple[tuple[int, ...], int] = (system,), system_tokens[system]
        prompt_tokens, before = system_tokens[system], None
        for (message, answer), think_s in zip(lengths.tolist(), CHAT_THINK_S.at(thoughts), strict=True):
            prompt_tokens += message
            yield WorkloadRequest(prompt_tokens, answer, None, None, *pieces, before)
            prompt_tokens += answer
            before, pieces = TurnBefore(index, prompt_tokens, float(think_s)), ((), 0)
            index += 1
