"""Who owns which block of the KV cache."""

import numpy as np

from bullet_graph.runtime.step import Int32Array

PADDING_BLOCK = 0
"""Never owned by a sequence: padded rows of a decode graph read and write it."""


class BlockPool:
    """Free blocks of the KV cache, and each slot's blocks in order of position.

    Args:
        num_blocks: blocks in the cache, the padding block included.
        num_slots: most sequences that hold blocks at once.
        max_blocks_per_seq: most blocks of one sequence.
        block_tokens: tokens a block holds.
    """

    def __init__(
        self, *, num_blocks: int, num_slots: int, max_blocks_per_seq: int, block_tokens: int
    ) -> None:
        self.block_tokens = block_tokens
        self.num_usable = num_blocks - 1
        # Lowest ids first, so that a lightly loaded cache touches little memory.
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._table: Int32Array = np.zeros((num_slots, max_blocks_per_seq), dtype=np.int32)
        self._counts = [0] * num_slots
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        """Blocks that no slot owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks owned by slots."""
        return self.num_usable - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence take."""
        return -(-num_tokens // self.block_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Make the slot hold at least ``num_tokens`` tokens; False, with nothing changed, if blocks lack."""
        have = self._counts[slot]
        need = self.blocks_for(num_tokens)
        if need <= have:
            return True
        missing = need - have
        if missing > len(self._free):
            return False
        taken = self._free[-missing:]
        del self._free[-missing:]
        self._table[slot, have:need] = taken[::-1]
        self._counts[slot] = need
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def release(self, slot: int) -> None:
        """Give back all of the slot's blocks."""
        self._free.extend(self.owned(slot)[::-1])
        self._counts[slot] = 0

    def owned(self, slot: int) -> list[int]:
        """The slot's blocks in order of position."""
        blocks: list[int] = self._table[slot, : self._counts[slot]].tolist()
        return blocks

    def flatten(self, slots: Int32Array, num_tokens: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Block lists of several sequences end to end.

        Args:
            slots: [n].
            num_tokens: [n], tokens to cover in each; the blocks must be owned.

        Returns:
            (indptr [n + 1], indices [indptr[-1]]).
        """
        counts = -(-num_tokens // self.block_tokens)
        indptr = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        width = int(counts.max())
        indices = self._table[:, :width][slots][np.arange(width, dtype=np.int32) < counts[:, None]]
        return indptr, indices
