"""The pool of KV blocks: against a model that only keeps sets, and by hand."""

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.engine.block_pool import PADDING_BLOCK, BlockPool

NUM_SLOTS, MAX_BLOCKS, BLOCK_TOKENS = 4, 5, 8

GROW = st.tuples(st.just("grow"), st.integers(0, NUM_SLOTS - 1), st.integers(0, MAX_BLOCKS * BLOCK_TOKENS))
RELEASE = st.tuples(st.just("release"), st.integers(0, NUM_SLOTS - 1), st.just(0))


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(
        num_blocks=num_blocks, num_slots=NUM_SLOTS, max_blocks_per_seq=MAX_BLOCKS, block_tokens=BLOCK_TOKENS
    )


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@settings(max_examples=200, deadline=None)
@given(num_blocks=st.integers(1, 16), operations=st.lists(st.one_of(GROW, RELEASE), max_size=60))
def test_each_block_has_at_most_one_owner(num_blocks: int, operations: list[tuple[str, int, int]]) -> None:
    pool = make_pool(num_blocks)
    expected: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    peak = 0
    for name, slot, num_tokens in operations:
        if name == "release":
            pool.clear(slot)
            expected[slot] = []
        else:
            need = -(-num_tokens // BLOCK_TOKENS)
            fits = need - len(expected[slot]) <= num_blocks - 1 - sum(map(len, expected))
            assert pool.grow(slot, num_tokens) is fits
            # What a slot had stays where it was; a refusal changes nothing.
            assert pool.owned(slot)[: len(expected[slot])] == expected[slot]
            if fits:
                assert len(pool.owned(slot)) == max(need, len(expected[slot]))
            else:
                assert len(pool.owned(slot)) == len(expected[slot])
            expected[slot] = pool.owned(slot)
        owned = [block for s in range(NUM_SLOTS) for block in pool.owned(s)]
        assert [pool.owned(s) for s in range(NUM_SLOTS)] == expected
        assert len(owned) == len(set(owned)) == pool.num_used
        assert set(owned) <= set(range(1, num_blocks))
        assert pool.num_used + pool.num_free == pool.num_usable == num_blocks - 1
        peak = max(peak, len(owned))
    assert pool.peak_used == peak
    for slot in range(NUM_SLOTS):
        pool.clear(slot)
    assert pool.num_free == num_blocks - 1


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, MAX_BLOCKS * BLOCK_TOKENS), min_size=1, max_size=NUM_SLOTS),
    shuffler=st.randoms(),
)
def test_flatten_lists_the_blocks_that_cover_the_tokens(lengths: list[int], shuffler: Random) -> None:
    pool = make_pool(1 + NUM_SLOTS * MAX_BLOCKS)
    slots = list(range(NUM_SLOTS))
    shuffler.shuffle(slots)
    slots = slots[: len(lengths)]
    for slot in slots:
        assert pool.grow(slot, MAX_BLOCKS * BLOCK_TOKENS)
    indptr, indices = pool.flatten(int32(slots), int32(lengths))
    expected = [pool.owned(s)[: -(-n // BLOCK_TOKENS)] for s, n in zip(slots, lengths, strict=True)]
    assert [indices[a:b].tolist() for a, b in pairwise(indptr)] == expected
    assert indptr[-1] == len(indices)
    assert indptr.dtype == indices.dtype == np.int32


def test_lowest_blocks_come_first_and_are_used_again() -> None:
    pool = make_pool(10)
    assert pool.grow(0, 3 * BLOCK_TOKENS)
    assert pool.owned(0) == [1, 2, 3]
    assert PADDING_BLOCK not in pool.owned(0)
    assert pool.grow(1, BLOCK_TOKENS)
    pool.clear(0)
    assert pool.grow(2, 4 * BLOCK_TOKENS)
    assert pool.owned(2) == [1, 2, 3, 5]
    assert pool.peak_used == 5
