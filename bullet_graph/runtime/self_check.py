"""A check that captured decode steps still compute the model: their logits against those of the uncompiled one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bullet_graph.kernels.attention import ReferenceAttention
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, eager_functions
from bullet_graph.runtime.step import Int32Array

TOLERANCES = MappingProxyType({torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4})
"""Largest relative error of a row of logits, by dtype.

Two computations that round each time they store differ by the roundings of both. Of bfloat16 one is 2⁻⁹/√3 ≈ 1.1e-3 in
the mean square; the some 10 of each of 32 layers add up to √320 · 1.1e-3 ≈ 2.0e-2, of two computations to 2.8e-2. The
others have 3 and 16 bits more, float32's sums another order. A kernel for something else is off by about 1.
"""

SEED = 0
STEPS = 3
"""Tokens of each sequence; the last step's logits are compared, so that it attends to what the others have cached."""

_MOST_COMPARED = 8
"""Rows of a batch that the reference computes: it goes through sequences one by one."""


@dataclass(frozen=True, slots=True)
class SelfCheckStep:
    """One decode step of ``n`` sequences of the same length, each in a block of its own; all int32.

    Attributes:
        token_ids: [n], the input tokens.
        positions: [n].
        kv_slots: [n].
        kv_indptr: [n + 1].
        kv_indices: [n].
    """

    token_ids: Int32Array
    positions: Int32Array
    kv_slots: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array

    def take(self, rows: Int32Array) -> "SelfCheckStep":
        """The step of some of the sequences."""
        return SelfCheckStep(
            self.token_ids[rows],
            self.positions[rows],
            self.kv_slots[rows],
            np.arange(len(rows) + 1, dtype=np.int32),
            self.kv_indices[rows],
        )


@dataclass(frozen=True, slots=True)
class SelfCheckPoint:
    """What one batch size has shown.

    Attributes:
        batch_size: rows.
        relative_error: ‖logits − reference‖ / ‖reference‖ of the worst row; infinite where one is not finite.
        tolerance: the most it may be.
    """

    batch_size: int
    relative_error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether it is within the tolerance."""
        return self.relative_error <= self.tolerance

    def __str__(self) -> str:
        return f"batch size {self.batch_size}: relative error {self.relative_error:.2g}, tolerance {self.tolerance:g}"


def sampled_sizes(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """The smallest, the middle and the largest of rising sizes."""
    chosen = {0, len(batch_sizes) // 2, len(batch_sizes) - 1} if batch_sizes else set()
    return tuple(batch_sizes[index] for index in sorted(chosen))


def fitting_sizes(decoder: Decoder, batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes for which the KV cache has a block a sequence, besides that of padding."""
    num_blocks = len(decoder.cache.layer(0)[0])
    return tuple(size for size in batch_sizes if size < num_blocks)


@torch.inference_mode()
def run_self_check(
    decoder: Decoder, logits_of: Callable[[SelfCheckStep], Tensor], batch_sizes: Sequence[int]
) -> tuple[SelfCheckPoint, ...]:
    """Compare for each batch size. Overwrites the KV cache, which must hold nothing of use.

    Args:
        logits_of: runs one step and gives its logits, [n, vocab_size], before the next one runs.
    """
    tolerance = TOLERANCES[decoder.weights.lm_head.dtype]
    return tuple(
        SelfCheckPoint(size, _relative_error(decoder, logits_of, size), tolerance) for size in batch_sizes
    )


def step_logits(decoder: Decoder, functions: LayerFunctions, step: SelfCheckStep) -> Tensor:
    """Logits of a step with reference attention, [n, vocab_size]."""
    return _logits(decoder, functions, [step])


def _logits(decoder: Decoder, functions: LayerFunctions, steps: Sequence[SelfCheckStep]) -> Tensor:
    """Logits of the last of consecutive steps, [n, vocab_size]: all of them in one forward, as prompts are computed."""
    device = decoder.cos_sin.device

    def index(name: str) -> Tensor:
        """[n * len(steps)], sequence by sequence."""
        return _indices(np.stack([getattr(step, name) for step in steps], axis=1).ravel(), device)

    last = steps[-1]
    num_rows = len(last.token_ids) * len(steps)
    attention = ReferenceAttention(
        decoder.cache,
        q_indptr=list(range(0, num_rows + 1, len(steps))),
        kv_lens=(last.positions + 1).tolist(),
        kv_indptr=last.kv_indptr.tolist(),
        kv_indices=_indices(last.kv_indices, device),
    )
    hidden = decoder.run_layers(
        decoder.embed(index("token_ids")), index("positions"), index("kv_slots"), attention, functions
    )
    return decoder.logits(hidden, functions.ops)[len(steps) - 1 :: len(steps)]


def _indices(values: Int32Array, device: torch.device) -> Tensor:
    return torch.from_numpy(values).long().to(device)


def _relative_error(decoder: Decoder, logits_of: Callable[[SelfCheckStep], Tensor], batch_size: int) -> float:
    steps = _steps(batch_size, decoder.config.vocab_size, decoder.cache.block_tokens)
    compared = np.unique(np.linspace(0, batch_size - 1, min(batch_size, _MOST_COMPARED)).astype(np.int32))
    for step in steps:
        logits = logits_of(step)
    found = logits[_indices(compared, logits.device)].float()
    # In one forward and without a library's attention: else these two would take most of a start's self-check, seconds
    # where cuDNN first builds its kernel.
    with sdpa_kernel(SDPBackend.MATH):
        expected = _logits(decoder, eager_functions(TorchOps()), [step.take(compared) for step in steps])
    expected = expected.float()
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    worst = float(errors.max())
    # A NaN would compare as no error at all.
    return worst if np.isfinite(worst) else float("inf")


def _steps(batch_size: int, vocab_size: int, block_tokens: int) -> list[SelfCheckStep]:
    tokens = np.random.default_rng(SEED).integers(0, vocab_size, (STEPS, batch_size), dtype=np.int32)
    blocks = np.arange(1, batch_size + 1, dtype=np.int32)
    indptr = np.arange(batch_size + 1, dtype=np.int32)
    return [
        SelfCheckStep(
            tokens[index],
            np.full(batch_size, index, dtype=np.int32),
            blocks * np.int32(block_tokens) + np.int32(index),
            indptr,
            blocks,
        )
        for index in range(STEPS)
    ]
