"""Checks that captured decode steps compute the model: their logits against those of the uncompiled one."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bullet_graph.kernels.communicator import Communicator
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

FP8_TOLERANCE = 0.4
"""The same with FP8, which turns a difference in the last digit into 1/8 of a number: some 0.2 after 4 to 32 layers."""

ROUTED_TOLERANCE, WRONG_ROW = 0.2, 0.9
"""With experts: of the median row, unless one is wrong. Rows that rounding sends to another expert differ by 0.05 to
0.7, a row of zeros by 1."""

SEED = 0
STEPS = 3
"""Tokens of each sequence. The last step's logits are compared, and that step attends to what the others cached."""

_FIRST_BLOCK = 1
"""Each sequence has a block of its own; block 0 is that of padding."""

_MOST_COMPARED = 4
"""Rows of a batch that the reference computes, first and last among them: it goes through sequences one by one."""

StepLogits = Callable[[Int32Array, Rows], Tensor]
"""Logits of a decode step, [n, vocab_size]: of its n token ids, in its rows, before the next step runs."""


@dataclass(frozen=True, slots=True)
class SelfCheckPoint:
    """Result for one batch size: ‖logits − reference‖ / ‖reference‖ of the row that counts, infinite if not finite."""

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
    communicator: Communicator | None = None

    @torch.inference_mode()
    def __call__(self, *, sample: bool) -> tuple[SelfCheckPoint, ...]:
        """Compare all sizes whose sequences fit into the KV cache, or a sample: smallest, middle and largest.

        Overwrites the cache, which must hold nothing of use.
        """
        # A block for each sequence, besides that of padding.
        sizes = [size for size in self.batch_sizes if size < self.decoder.cache.num_blocks]
        if sample and sizes:
            sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
        if not sizes:
            return ()
        config = self.decoder.config
        dtype = self.decoder.weights.lm_head.dtype
        routes, is_fp8 = config.num_experts > 0 and dtype != torch.float32, config.fp8 is not None or config.fp8_kv
        tolerance = FP8_TOLERANCE if is_fp8 else ROUTED_TOLERANCE if routes else TOLERANCES[dtype]
        tokens = np.random.default_rng(SEED).integers(0, config.vocab_size, (sizes[-1], STEPS), dtype=np.int32)
        compared = [np.unique(np.linspace(0, size - 1, _MOST_COMPARED).astype(np.int32)) for size in sizes]
        found = [self._found(tokens[:size], rows) for size, rows in zip(sizes, compared, strict=True)]
        # Sizes share their sequences, so one forward of all that are compared serves every size.
        once = np.unique(np.concatenate(compared))
        expected = self._expected(tokens, once)
        return tuple(
            SelfCheckPoint(size, _error(logits, expected[np.searchsorted(once, rows)], routes), tolerance)
            for size, rows, logits in zip(sizes, compared, found, strict=True)
        )

    def _found(self, tokens: Int32Array, compared: Int32Array) -> Tensor:
        """Logits of the compared sequences after their last step, of a batch of all of them."""
        block_tokens = self.decoder.cache.block_tokens
        blocks = np.arange(len(tokens)) + _FIRST_BLOCK
        for position in range(STEPS):
            step = make_batches((), [position] * len(tokens), blocks=blocks, block_tokens=block_tokens)
            logits = self.logits_of(tokens[:, position], lay_out(*step, block_tokens))
        return logits[_indices(compared, logits.device)].float()

    def _expected(self, tokens: Int32Array, compared: Int32Array) -> Tensor:
        """Those logits by the decoder's own forward."""
        block_tokens = self.decoder.cache.block_tokens
        prompts = make_batches(
            [(0, STEPS, True)] * len(compared),
            (),
            blocks=compared + _FIRST_BLOCK,
            token_ids=tokens[compared].ravel(),
            block_tokens=block_tokens,
        )
        rows = lay_out(*prompts, block_tokens)
        # In one forward and without a library's attention: else these two would take most of a start's self-check,
        # seconds where cuDNN first builds its kernel.
        with sdpa_kernel(SDPBackend.MATH):
            return reference_logits(
                self.decoder, eager_functions(TorchOps(self.communicator)), rows.token_ids, rows
            ).float()


def reference_logits(decoder: Decoder, functions: LayerFunctions, token_ids: Int32Array, rows: Rows) -> Tensor:
    """Logits of the rows that are sampled, [s, vocab_size], with reference attention; ``token_ids`` are of all rows."""
    device = decoder.cos_sin.device
    hidden = decoder.run_layers(
        decoder.embed(_indices(token_ids, device), functions.ops),
        _indices(rows.positions, device),
        _indices(rows.kv_slots, device),
        reference_attention(decoder.cache, rows, rows.q_indptr),
        functions,
    )
    return decoder.logits(hidden, functions.ops)[_indices(rows.sample_rows, device)]


def _indices(values: Int32Array, device: torch.device) -> Tensor:
    return torch.from_numpy(values).long().to(device)


def _error(found: Tensor, expected: Tensor, routes: bool) -> float:
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    worst = float(errors.max())
    if routes and worst < WRONG_ROW:
        return float(errors.median())
    # A NaN would compare as no error at all.
    return worst if np.isfinite(worst) else float("inf")
