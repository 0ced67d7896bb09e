"""The pool of KV blocks: against a model that only keeps sets, and by hand."""

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.engine.block_pool import PADDING_BLOCK, BlockPool

NUM_SLOTS, MAX_BLOCKS, BLOCK_TOKENS = 4, 5, 8

GROW = st.tuples(st.just("grow"), st.integers(0, NUM_SLOTS - 1), st.integers(0, MAX_BLOCKS * BLOCK_TOKENS))
SLIDE = st.tuples(st.just("slide"), st.integers(0, NUM_SLOTS - 1), st.integers(0, MAX_BLOCKS * BLOCK_TOKENS))
RELEASE = st.tuples(st.just("release"), st.integers(0, NUM_SLOTS - 1), st.just(0))


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(
        num_blocks=num_blocks, num_slots=NUM_SLOTS, max_blocks_per_seq=MAX_BLOCKS, block_tokens=BLOCK_TOKENS
    )


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@settings(max_examples=200)
@given(num_blocks=st.integers(1, 16), operations=st.lists(st.one_of(GROW, SLIDE, RELEASE), max_size=60))
def test_each_block_has_at_most_one_owner(num_blocks: int, operations: list[tuple[str, int, int]]) -> None:
    pool = make_pool(num_blocks)
    expected: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    given_back = [0] * NUM_SLOTS
    peak = 0
    for name, slot, num_tokens in operations:
        if name == "release":
            pool.clear(slot)
            expected[slot], given_back[slot] = [], 0
        elif name == "slide":
            # Nothing more is wanted, or all that fits.
            wanted = num_tokens % 2 * MAX_BLOCKS
            passed = min(max(num_tokens // BLOCK_TOKENS - given_back[slot], 0), len(expected[slot]))
            kept = min(passed, max(wanted - given_back[slot] - len(expected[slot]), 0))
            pool.slide(slot, num_tokens, wanted * BLOCK_TOKENS)
            expected[slot] = expected[slot][passed:] + expected[slot][:kept]
            given_back[slot] += passed
        else:
            need = -(-num_tokens // BLOCK_TOKENS) - given_back[slot]
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
        capacities = [(n + len(blocks)) * BLOCK_TOKENS for n, blocks in zip(given_back, expected, strict=True)]
        assert [pool.capacity(s) for s in range(NUM_SLOTS)] == capacities
        assert pool.num_used + pool.num_free == pool.num_usable == num_blocks - 1
        peak = max(peak, len(owned))
    assert pool.peak_used == peak
    for slot in range(NUM_SLOTS):
        pool.clear(slot)
    assert pool.num_free == num_blocks - 1


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, MAX_BLOCKS * BLOCK_TOKENS), min_size=1, max_size=NUM_SLOTS),
    windows=st.lists(st.integers(1, MAX_BLOCKS * BLOCK_TOKENS), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    shuffler=st.randoms(),
)
def test_flatten_lists_the_blocks_that_cover_tokens(lengths: list[int], windows: list[int], shuffler: Random) -> None:
    pool = make_pool(1 + NUM_SLOTS * MAX_BLOCKS)
    slots = list(range(NUM_SLOTS))
    shuffler.shuffle(slots)
    slots = slots[: len(lengths)]
    for slot in slots:
        assert pool.grow(slot, MAX_BLOCKS * BLOCK_TOKENS)
    starts, indptr, indices = pool.flatten(int32(slots), int32(lengths))
    assert starts.tolist() == [0] * len(slots)
    expected = [pool.owned(s)[: -(-n // BLOCK_TOKENS)] for s, n in zip(slots, lengths, strict=True)]
    assert [indices[a:b].tolist() for a, b in pairwise(indptr)] == expected
    assert indptr[-1] == len(indices)
    assert starts.dtype == indptr.dtype == indices.dtype == np.int32
    # From a position on, whether or not blocks before it were given back.
    since = [n - window for n, window in zip(lengths, windows, strict=False)]
    firsts = [max(position, 0) // BLOCK_TOKENS for position in since]
    expected = [blocks[first:] for blocks, first in zip(expected, firsts, strict=True)]
    for slot, position in list(zip(slots, since, strict=True))[::2]:
        pool.slide(slot, position, 0)
    starts, indptr, indices = pool.flatten(int32(slots), int32(lengths), int32(since))
    assert [indices[a:b].tolist() for a, b in pairwise(indptr)] == expected
    assert starts.tolist() == [first * BLOCK_TOKENS for first in firsts]


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
