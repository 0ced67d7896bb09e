"""Blocks of the KV cache: which are free, and which sequence holds which."""

from collections.abc import Sequence

import numpy as np

from bullet_graph.runtime.step import Int32Array

PADDING_BLOCK = 0
"""Never given to a sequence: padded rows of a decode graph read and write it."""


class Blocks:
    """The blocks of the KV cache, by owner: the only place where a block becomes owned or free.

    A block has one owner today. Sharing blocks between sequences means counting owners here: :meth:`acquire` gives a
    block its first owner, and :meth:`release` frees a block when its last owner has left.

    Args:
        num_blocks: blocks of the cache, including the padding block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        # The lowest ids come first, so that a lightly loaded cache touches little memory.
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with an owner."""
        return self.num_usable - len(self._free)

    def acquire(self, count: int) -> list[int] | None:
        """Take ``count`` ≥ 1 free blocks; None, with nothing changed, if there are fewer."""
        if count > len(self._free):
            return None
        taken = self._free[-count:]
        del self._free[-count:]
        used = self.num_usable - len(self._free)
        if used > self.peak_used:
            self.peak_used = used
        return taken[::-1]

    def release(self, blocks: Sequence[int]) -> None:
        """Give up blocks that :meth:`acquire` returned."""
        self._free.extend(reversed(blocks))


class BlockPool(Blocks):
    """The blocks, and the table of each slot's blocks in order of position.

    Args:
        num_blocks: blocks of the cache, including the padding block.
        num_slots: most sequences that hold blocks at once.
        max_blocks_per_seq: most blocks of one sequence.
        block_tokens: tokens per block.
    """

    def __init__(
        self, *, num_blocks: int, num_slots: int, max_blocks_per_seq: int, block_tokens: int
    ) -> None:
        super().__init__(num_blocks)
        self.block_tokens = block_tokens
        self._table: Int32Array = np.zeros((num_slots, max_blocks_per_seq), dtype=np.int32)
        self._counts = [0] * num_slots

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence need."""
        return -(-num_tokens // self.block_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give the slot room for ``num_tokens`` tokens; False, with nothing changed, if blocks lack."""
        have = self._counts[slot]
        need = self.blocks_for(num_tokens)
        if need <= have:
            return True
        taken = self.acquire(need - have)
        if taken is None:
            return False
        self._table[slot, have:need] = taken
        self._counts[slot] = need
        return True

    def clear(self, slot: int) -> None:
        """Release all blocks of the slot."""
        self.release(self.owned(slot))
        self._counts[slot] = 0

    def owned(self, slot: int) -> list[int]:
        """The slot's blocks in order of position."""
        blocks: list[int] = self._table[slot, : self._counts[slot]].tolist()
        return blocks

    def flatten(self, slots: Int32Array, num_tokens: Int32Array) -> tuple[Int32Array, Int32Array]:
        """The block lists of several sequences, one after the other.

        Args:
            slots: [n].
            num_tokens: [n], tokens to cover in each; the slot must own their blocks.

        Returns:
            (indptr [n + 1], indices [indptr[-1]]).
        """
        counts = -(-num_tokens // self.block_tokens)
        indptr = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        width = int(counts.max())
        indices = self._table[:, :width][slots][np.arange(width, dtype=np.int32) < counts[:, None]]
        return indptr, indices
