"""Checks that captured decode steps compute the model: their logits against those of the uncompiled one."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bullet_graph.kernels.ops import TorchOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, eager_functions
from bullet_graph.runtime.cpu import reference_attention
from bullet_graph.runtime.rows import Rows, lay_out, make_batches
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


StepLogits = Callable[[Int32Array, Rows], Tensor]
"""Logits of a decode step, [n, vocab_size]: of its n token ids, in its rows, before the next step runs."""


@dataclass(frozen=True, slots=True)
class SelfCheckPoint:
    """Result for one batch size: ‖logits − reference‖ / ‖reference‖ of the worst row, infinite if one is not finite."""

    batch_size: int
    relative_error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.relative_error <= self.tolerance

    def __str__(self) -> str:
        return f"batch size {self.batch_size}: relative error {self.relative_error:.2g}, tolerance {self.tolerance:g}"


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Compares decode steps that are captured or compiled, for rising batch sizes, with the decoder's own forward."""

    decoder: Decoder
    logits_of: StepLogits
    batch_sizes: tuple[int, ...]

    @torch.inference_mode()
    def __call__(self, *, sample: bool) -> tuple[SelfCheckPoint, ...]:
        """Compare all sizes whose sequences fit into the KV cache, or a sample: smallest, middle and largest.

        Overwrites the cache, which must hold nothing of use.
        """
        # A block for each sequence, besides that of padding.
        sizes = [size for size in self.batch_sizes if size < self.decoder.cache.num_blocks]
        if sample and sizes:
            sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
        tolerance = TOLERANCES[self.decoder.weights.lm_head.dtype]
        return tuple(
            SelfCheckPoint(size, _relative_error(self.decoder, self.logits_of, size), tolerance)
            for size in sizes
        )


def reference_logits(
    decoder: Decoder, functions: LayerFunctions, token_ids: Int32Array, rows: Rows
) -> Tensor:
    """Logits of the rows that are sampled, [s, vocab_size], with reference attention; ``token_ids`` are of all rows."""
    device = decoder.cos_sin.device
    hidden = decoder.run_layers(
        decoder.embed(_indices(token_ids, device)),
        _indices(rows.positions, device),
        _indices(rows.kv_slots, device),
        reference_attention(decoder.cache, rows, rows.q_indptr),
        functions,
    )
    return decoder.logits(hidden, functions.ops)[_indices(rows.sample_rows, device)]


def _indices(values: Int32Array, device: torch.device) -> Tensor:
    return torch.from_numpy(values).long().to(device)


def _relative_error(decoder: Decoder, logits_of: StepLogits, batch_size: int) -> float:
    block_tokens = decoder.cache.block_tokens
    tokens = np.random.default_rng(SEED).integers(
        0, decoder.config.vocab_size, (batch_size, STEPS), dtype=np.int32
    )
    # Each sequence has a block of its own.
    blocks = np.arange(1, batch_size + 1)
    for position in range(STEPS):
        step = make_batches((), [position] * batch_size, blocks=blocks, block_tokens=block_tokens)
        logits = logits_of(tokens[:, position], lay_out(*step, block_tokens))
    compared = np.unique(np.linspace(0, batch_size - 1, min(batch_size, _MOST_COMPARED)).astype(np.int32))
    prompts = make_batches(
        [(0, STEPS, True)] * len(compared),
        (),
        blocks=blocks[compared],
        token_ids=tokens[compared].ravel(),
        block_tokens=block_tokens,
    )
    rows = lay_out(*prompts, block_tokens)
    # In one forward and without a library's attention: else these two would take most of a start's self-check, seconds
    # where cuDNN first builds its kernel.
    with sdpa_kernel(SDPBackend.MATH):
        expected = reference_logits(decoder, eager_functions(TorchOps()), rows.token_ids, rows).float()
    found = logits[_indices(compared, logits.device)].float()
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    worst = float(errors.max())
    # A NaN would compare as no error at all.
    return worst if np.isfinite(worst) else float("inf")
