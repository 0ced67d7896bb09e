"""Forwards with prompt rows and decode rows, as the engine lays them out: what ``mixed_step.py`` times."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.runtime.rows import Rows, lay_out
from bullet_graph.runtime.step import DecodeBatch, Int32Array, PrefillBatch


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chunk of a prompt.

    Attributes:
        tokens: rows.
        cached: tokens before them.
        ends: the prompt ends with the chunk, and a token is sampled.
    """

    tokens: int
    cached: int = 0
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """A forward.

    Attributes:
        name: of the load that has such forwards.
        prompts: those that go on first.
        decode_rows: that attend to ``context`` tokens each.
        context: tokens.
    """

    name: str
    prompts: tuple[Prompt, ...]
    decode_rows: int
    context: int

    @property
    def rows(self) -> int:
        """Of the forward."""
        return self.decode_rows + sum(prompt.tokens for prompt in self.prompts)

    @property
    def num_blocks(self) -> int:
        """Of the KV cache, the padding block included."""
        tokens = [prompt.cached + prompt.tokens for prompt in self.prompts] + [
            self.context
        ] * self.decode_rows
        return 1 + sum(-(-number // KV_BLOCK_TOKENS) for number in tokens)


CASES = (
    Case("conv at once", (Prompt(300, 500), Prompt(260), Prompt(256, ends=False)), 208, 1128),
    Case("conv at once, large", (Prompt(600, 600), Prompt(500), Prompt(488, ends=False)), 460, 1128),
    Case("code at once", (Prompt(700, 2000), Prompt(566, ends=False)), 14, 2600),
    Case("code at once, large", (Prompt(900, 1500), Prompt(1138, ends=False)), 10, 2600),
    Case("code at once, larger", (Prompt(900, 1500), Prompt(1900), Prompt(1286, ends=False)), 10, 2600),
    Case("conv at 15 ms", (Prompt(150, 400), Prompt(42, ends=False)), 64, 1200),
    Case("code at 8 ms", (Prompt(140, 3000, ends=False),), 20, 2500),
)


def rows_of(case: Case, *, vocab_size: int) -> Rows:
    """The forward's rows; decode rows have the first slots, and blocks are in random order."""
    rng = np.random.default_rng(0)
    blocks = (1 + rng.permutation(case.num_blocks - 1)).astype(np.int32)
    decode_blocks = case.decode_rows * -(-case.context // KV_BLOCK_TOKENS)
    lengths = np.array([prompt.tokens for prompt in case.prompts], dtype=np.int32)
    starts = np.array([prompt.cached for prompt in case.prompts], dtype=np.int32)
    prefill = PrefillBatch(
        slots=np.arange(len(lengths), dtype=np.int32) + np.int32(case.decode_rows),
        token_ids=rng.integers(0, vocab_size, lengths.sum()).astype(np.int32),
        q_indptr=_indptr(lengths),
        starts=starts,
        kv_indptr=_indptr(-(-(starts + lengths) // KV_BLOCK_TOKENS)),
        kv_indices=blocks[decode_blocks:],
        samples=np.array([prompt.ends for prompt in case.prompts], dtype=np.bool_),
    )
    decode = DecodeBatch(
        slots=np.arange(case.decode_rows, dtype=np.int32),
        positions=np.full(case.decode_rows, case.context - 1, dtype=np.int32),
        kv_indptr=_indptr([-(-case.context // KV_BLOCK_TOKENS)] * case.decode_rows),
        kv_indices=blocks[:decode_blocks],
    )
    return lay_out(prefill, decode if case.decode_rows else None, KV_BLOCK_TOKENS)


def _indptr(counts: Sequence[int] | Int32Array) -> Int32Array:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
