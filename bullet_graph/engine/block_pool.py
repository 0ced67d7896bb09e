"""Blocks of the KV cache: which are free, which sequences hold which, and which tokens they hold (the prefix cache)."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from bullet_graph.runtime.step import Int32Array, indptr_of

PADDING_BLOCK = 0
"""Never given to a sequence: padded rows of a decode graph read and write it."""


def root_key(*space: str | None) -> bytes:
    """The parent of a sequence's first key. Sequences of other spaces, such as another salt, never share a block."""
    return blake2b(ascii(space).encode(), digest_size=32).digest()


def chained_keys(parent: bytes, token_ids: Int32Array, block_tokens: int) -> list[bytes]:
    """A key for each full block of ``token_ids``, which follow those of ``parent``.

    Equal keys mean equal tokens from the first position on: nobody can find two inputs of one BLAKE2b hash of 32 bytes.
    """
    data, size, keys = token_ids.tobytes(), block_tokens * token_ids.itemsize, list[bytes]()
    for start in range(0, len(data) - size + 1, size):
        keys.append(parent := blake2b(parent + data[start : start + size], digest_size=32).digest())
    return keys


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks, one after the other, that others can find from now on.

    ``parent`` is the key before the first one; None at the beginning of a sequence. ``token_ids`` are those of all.
    """

    parent: bytes | None
    keys: tuple[bytes, ...]
    token_ids: Int32Array
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that nobody can find any more."""

    keys: tuple[bytes, ...]


CacheListener = Callable[[BlocksStored | BlocksRemoved], None]
"""Is told what the prefix cache holds, in order, in the engine's thread, which waits for it."""


class BlockPool:
    """The free blocks, and the table of each slot's blocks in order of position, without those given back.

    ``num_blocks`` includes the padding block; each of ``num_slots`` sequences holds up to ``max_blocks_per_seq``.

    It is the prefix cache as well. A block with a key holds the tokens that the key stands for, and is never written
    again. Several slots may share it. Released by the last one, it counts as free but keeps its tokens until it is
    taken: after all free blocks without a key, and least recently released first. ``found_by_key`` has all such blocks.
    """

    def __init__(self, *, num_blocks: int, num_slots: int, max_blocks_per_seq: int, block_tokens: int) -> None:
        self.num_usable = num_blocks - 1
        self.block_tokens = block_tokens
        # The lowest ids come first, so that a lightly loaded cache touches little memory.
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self.found_by_key: dict[bytes, int] = {}
        self.listener: CacheListener | None = None
        self.peak_used = 0
        self._table: Int32Array = np.zeros((num_slots, max_blocks_per_seq), dtype=np.int32)
        self._counts = [0] * num_slots
        # By slot, how many blocks before its own were given back.
        self._firsts: Int32Array = np.zeros(num_slots, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that no slot holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

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
        if count > self.num_free:
            return False
        while len(self._free) < count:
            self._evict()
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in blocks:
            self._num_holders[block] = 1
        self._table[slot, have:need] = blocks
        self._counts[slot] = need
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def capacity(self, slot: int) -> int:
        """Tokens that the slot has room for, those whose blocks were given back included."""
        return (int(self._firsts[slot]) + self._counts[slot]) * self.block_tokens

    def slide(self, slot: int, position: int, num_tokens: int) -> None:
        """Give back the slot's blocks before ``position``; those it lacks for ``num_tokens`` become its next ones.

        None of its blocks may have a key.
        """
        first, count = int(self._firsts[slot]), self._counts[slot]
        passed = min(position // self.block_tokens - first, count)
        if passed <= 0:
            return
        blocks = self.owned(slot)
        kept = min(passed, max(self.blocks_for(num_tokens) - first - count, 0))
        self._release(blocks[kept:passed])
        self._firsts[slot] += passed
        self._counts[slot] = count - passed + kept
        self._table[slot, : self._counts[slot]] = blocks[passed:] + blocks[:kept]

    def clear(self, slot: int) -> None:
        """Release all blocks of the slot."""
        self._release(self.owned(slot))
        self._counts[slot] = self._firsts[slot] = 0

    def _release(self, blocks: list[int]) -> None:
        """Give up one hold on each; the last blocks of a prefix are then taken before its first ones."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    # ---- the prefix cache ----

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of these keys, up to the first that the cache lacks."""
        return list(takewhile(lambda block: block is not None, map(self.found_by_key.get, keys)))  # type: ignore[arg-type]

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of these some slot holds: sharing them needs no free block."""
        return sum(self._num_holders[block] > 0 for block in blocks)

    def share(self, slot: int, blocks: list[int]) -> None:
        """Give found blocks to a slot that has none, as its first ones."""
        for block in blocks:
            if not self._num_holders[block]:
                del self._cached[block]
            self._num_holders[block] += 1
        self._table[slot, : len(blocks)] = blocks
        self._counts[slot] = len(blocks)
        self.peak_used = max(self.peak_used, self.num_used)

    def cache(self, slot: int, first: int, keys: list[bytes]) -> list[bool]:
        """Let others find the slot's blocks from its ``first`` on, which hold what ``keys`` stand for.

        Of two blocks with the same tokens, only the first one gets the key. Returns which keys are new.
        """
        new = []
        for block, key in zip(self._table[slot, first : first + len(keys)].tolist(), keys, strict=True):
            new.append(self.found_by_key.setdefault(key, block) == block)
            if new[-1]:
                self._keys[block] = key
        return new

    def forget(self) -> None:
        """Empty the prefix cache, while no slot holds a block."""
        while self._cached:
            self._evict()

    def abandon(self) -> None:
        """Tell the listener that all blocks are lost, as the pool is not used any more."""
        if self.listener is not None and self.found_by_key:
            self.listener(BlocksRemoved(tuple(self.found_by_key)))

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        key = self._keys.pop(block)
        del self.found_by_key[key]
        self._free.append(block)
        if self.listener is not None:
            self.listener(BlocksRemoved((key,)))

    def owned(self, slot: int) -> list[int]:
        """The slot's blocks in order of position."""
        blocks: list[int] = self._table[slot, : self._counts[slot]].tolist()
        return blocks

    def first_block(self, slot: int) -> int:
        """The slot's first block; sequences that have it in common begin with the same tokens."""
        return int(self._table[slot, 0])

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
        skipped = firsts - owned
        columns = np.arange(int((skipped + counts).max()), dtype=np.int32)
        listed = columns < (skipped + counts)[:, None]
        if since is not None:
            listed &= columns >= skipped[:, None]
        return firsts * np.int32(self.block_tokens), indptr_of(counts), self._table[:, : len(columns)][slots][listed]
