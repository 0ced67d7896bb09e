"""Checks that captured decode steps compute the model: their logits against those of the uncompiled one."""

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

Two computations differ by the roundings of both. One rounding to bfloat16 is 2⁻⁹/√3 ≈ 1.1e-3 in the mean square. About
10 in each of 32 layers add up to √320 · 1.1e-3 ≈ 2.0e-2, and those of two computations to 2.8e-2. The other dtypes have
3 and 16 bits more; float32 also sums in another order. A kernel for something else is off by about 1.
"""

SEED = 0
STEPS = 3
"""Tokens of each sequence. The last step's logits are compared, and that step attends to what the others cached."""

_MOST_COMPARED = 8
"""Rows of a batch that the reference computes: it goes through sequences one by one."""


@dataclass(frozen=True, slots=True)
class SelfCheckStep:
    """One decode step of ``n`` sequences of the same length, each in a block of its own.

    All are int32 and [n], but for ``kv_indptr``, [n + 1].
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
            self.kv_indptr[: len(rows) + 1],
            self.kv_indices[rows],
        )


@dataclass(frozen=True, slots=True)
class SelfCheckPoint:
    """Result for one batch size.

    Attributes:
        relative_error: ‖logits − reference‖ / ‖reference‖ of the worst row; infinite where one is not finite.
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


def checked_sizes(decoder: Decoder, batch_sizes: Sequence[int], *, sample: bool) -> tuple[int, ...]:
    """Of rising sizes those whose sequences fit into the KV cache, or a sample: smallest, middle and largest."""
    # A block for each sequence, besides that of padding.
    num_blocks = len(decoder.cache.layer(0)[0])
    sizes = tuple(size for size in batch_sizes if size < num_blocks)
    return tuple(sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})) if sample and sizes else sizes


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


def step_logits(decoder: Decoder, functions: LayerFunctions, *steps: SelfCheckStep) -> Tensor:
    """Logits of the last of consecutive steps, [n, vocab_size], with reference attention and in one forward."""
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
        expected = step_logits(decoder, eager_functions(TorchOps()), *(step.take(compared) for step in steps))
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
