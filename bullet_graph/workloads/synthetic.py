"""Synthetic workloads: ``conv`` and ``code`` follow the lengths of the Azure traces, ``longdoc`` is long documents.

Request i depends on the seed and i alone, so a longer workload begins with the shorter one.
"""

import json
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

from bullet_graph.errors import WorkloadError
from bullet_graph.workloads.workload import Workload, WorkloadRequest

SYNTHETIC_NAMES = ("conv", "code", "longdoc")

# A lognormal of median m and mean μ has σ = sqrt(2 ln(μ / m)).
_LONGDOC_MEDIAN_TOKENS = np.array([5800.0, 150.0])
_LONGDOC_MEAN_TOKENS = np.array([7000.0, 200.0])
_LONGDOC_MAX_TOKENS = np.array([32_000, 2_000])


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
        return _round(np.exp(log_lengths))


def synthetic_workload(name: str, num_requests: int, seed: int = 0) -> Workload:
    """Generate a workload of ``SYNTHETIC_NAMES``: its requests have lengths but neither prompts nor arrival times.

    ``longdoc`` has lognormal lengths: prompts of mean 7,000 tokens (at most 32,000) and outputs of mean 200 (at most
    2,000).

    Raises WorkloadError for an unknown name, no request, or a negative seed.
    """
    if name not in SYNTHETIC_NAMES:
        raise WorkloadError(
            f"unknown synthetic workload {name!r}: use synthetic:{', synthetic:'.join(SYNTHETIC_NAMES)}"
        )
    if num_requests < 1 or seed < 0:
        raise WorkloadError(
            f"a synthetic workload needs at least 1 request and a seed of at least 0, got {num_requests} "
            f"requests and seed {seed}"
        )
    # PCG64 by name: numpy may change its default generator.
    generator = np.random.Generator(np.random.PCG64(seed))
    if name == "longdoc":
        sigma = np.sqrt(2 * np.log(_LONGDOC_MEAN_TOKENS / _LONGDOC_MEDIAN_TOKENS))
        drawn = _round(_LONGDOC_MEDIAN_TOKENS * np.exp(sigma * generator.standard_normal((num_requests, 2))))
        lengths = np.clip(drawn, 1, _LONGDOC_MAX_TOKENS)
    else:
        data = resources.files(__package__) / "data" / "azure_lengths.json"
        tables = LengthTables(**json.loads(data.read_text(encoding="utf-8"))[name])
        lengths = tables.lengths(generator.random((num_requests, 2)))
    requests = tuple(WorkloadRequest(prompt, output, arrival_s=None) for prompt, output in lengths.tolist())
    return Workload(name=f"synthetic:{name}", requests=requests)


def _round(lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.rint(lengths).astype(np.int64)
