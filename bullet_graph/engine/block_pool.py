"""Blocks of the KV cache: which are free, and which sequence holds which."""

import numpy as np

from bullet_graph.runtime.step import Int32Array

PADDING_BLOCK = 0
"""Never given to a sequence: padded rows of a decode graph read and write it."""


class BlockPool:
    """The free blocks, and the table of each slot's blocks in order of position, without those given back.

    ``num_blocks`` includes the padding block; each of ``num_slots`` sequences at once owns up to
    ``max_blocks_per_seq``.
    """

    def __init__(
        self, *, num_blocks: int, num_slots: int, max_blocks_per_seq: int, block_tokens: int
    ) -> None:
        self.num_usable = num_blocks - 1
        self.block_tokens = block_tokens
        # The lowest ids come first, so that a lightly loaded cache touches little memory.
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self.peak_used = 0
        self._table: Int32Array = np.zeros((num_slots, max_blocks_per_seq), dtype=np.int32)
        self._counts = [0] * num_slots
        # By slot, how many blocks before its own were given back.
        self._firsts: Int32Array = np.zeros(num_slots, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence need."""
        return -(-num_tokens // self.block_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give the slot room for ``num_tokens`` tokens; False, with nothing changed, if blocks lack."""
        have = self._counts[slot]
        need = self.blocks_for(num_tokens) - int(self._firsts[slot])
        if need <= have:
            return True
        count = need - have
        if count > len(self._free):
            return False
        self._table[slot, have:need] = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._counts[slot] = need
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def capacity(self, slot: int) -> int:
        """Tokens that the slot has room for, those whose blocks were given back included."""
        return (int(self._firsts[slot]) + self._counts[slot]) * self.block_tokens

    def slide(self, slot: int, position: int, num_tokens: int) -> None:
        """Give back the slot's blocks before ``position``; those it lacks for ``num_tokens`` become its next ones."""
        first, count = int(self._firsts[slot]), self._counts[slot]
        passed = min(position // self.block_tokens - first, count)
        if passed <= 0:
            return
        blocks = self.owned(slot)
        kept = min(passed, max(self.blocks_for(num_tokens) - first - count, 0))
        self._free.extend(reversed(blocks[kept:passed]))
        self._firsts[slot] += passed
        self._counts[slot] = count - passed + kept
        self._table[slot, : self._counts[slot]] = blocks[passed:] + blocks[:kept]

    def clear(self, slot: int) -> None:
        """Release all blocks of the slot."""
        self._free.extend(reversed(self.owned(slot)))
        self._counts[slot] = self._firsts[slot] = 0

    def owned(self, slot: int) -> list[int]:
        """The slot's blocks in order of position."""
        blocks: list[int] = self._table[slot, : self._counts[slot]].tolist()
        return blocks

    def flatten(
        self, slots: Int32Array, num_tokens: Int32Array, since: Int32Array | None = None
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """The block lists of several sequences, one after the other: indptr [n + 1] and indices [indptr[-1]].

        Before these, the position of the first token in each sequence's blocks [n]. ``slots`` [n] must own the blocks
        of ``num_tokens`` [n], those before the position ``since`` [n] excepted, which are not listed.
        """
        owned = self._firsts[slots]
        firsts = owned if since is None else np.maximum(since // self.block_tokens, owned)
        counts = -(-num_tokens // self.block_tokens) - firsts
        indptr = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        skipped = firsts - owned
        columns = np.arange(int((skipped + counts).max()), dtype=np.int32)
        listed = columns < (skipped + counts)[:, None]
        if since is not None:
            listed &= columns >= skipped[:, None]
        indices = self._table[:, : len(columns)][slots][listed]
        return firsts * np.int32(self.block_tokens), indptr, indices
