"""The prefix cache: keys, what the pool keeps and for how long, and what sequences find."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_loop import BLOCK_TOKENS, LANES_AT_ONCE, Loop

from bullet_graph.engine.block_pool import PADDING_BLOCK, BlockPool, BlocksRemoved, BlocksStored, chained_keys, root_key
from bullet_graph.engine.prompt_queue import prompt_load
from bullet_graph.engine.scheduler import AWAITED_BLOCKS
from bullet_graph.engine.sequence import Sequence, Status

TEXT = list(range(500, 540))
POLICIES = ("serial", "mixed", LANES_AT_ONCE)


def keys_of(tokens: list[int], *space: str | None) -> list[bytes]:
    return chained_keys(root_key(*space), np.array(tokens, dtype=np.int32), BLOCK_TOKENS)


# ---- keys ----


@given(
    first=st.lists(st.integers(0, 1), max_size=14),
    second=st.lists(st.integers(0, 1), max_size=14),
    spaces=st.tuples(*[st.sampled_from([None, "a", "b"])] * 2),
)
def test_keys_are_equal_where_all_tokens_up_to_there_are(
    first: list[int], second: list[int], spaces: tuple[str | None, str | None]
) -> None:
    one, other = keys_of(first, spaces[0]), keys_of(second, spaces[1])
    assert len(one) == len(first) // BLOCK_TOKENS
    for count, (a, b) in enumerate(zip(one, other, strict=False), 1):
        shared = first[: count * BLOCK_TOKENS] == second[: count * BLOCK_TOKENS]
        assert (a == b) == (shared and spaces[0] == spaces[1])


def test_a_key_goes_on_where_another_ended() -> None:
    head = keys_of(TEXT[:8])
    assert head + chained_keys(head[-1], np.array(TEXT[8:], dtype=np.int32), BLOCK_TOKENS) == keys_of(TEXT)
    assert len({root_key(), root_key(None), root_key("None"), root_key("a", "b"), root_key("a, b")}) == 5
    assert root_key("\ud800") != root_key("\udfff"), "JSON may hold half a character"


# ---- the pool ----


def test_blocks_without_a_key_are_taken_first_then_the_least_recently_released_prefixes_from_their_ends() -> None:
    pool = BlockPool(num_blocks=9, num_slots=4, max_blocks_per_seq=8, block_tokens=BLOCK_TOKENS)
    old, new = keys_of(TEXT[:12]), keys_of(TEXT[12:24])
    for slot, keys in enumerate((old, new)):
        assert pool.grow(slot, 12)
        pool.cache(slot, 0, keys)
    pool.clear(1)
    pool.clear(0)
    assert pool.num_free == 8
    # Found again, the first one is now the more recent one.
    pool.share(2, pool.find(new))
    pool.clear(2)
    assert pool.grow(3, 2 * BLOCK_TOKENS)
    assert (len(pool.find(old)), len(pool.find(new))) == (3, 3), "there were two blocks without a key"
    for taken in range(1, 6):
        assert pool.grow(3, (2 + taken) * BLOCK_TOKENS)
        assert (len(pool.find(old)), len(pool.find(new))) == (max(3 - taken, 0), min(6 - taken, 3))
    pool.clear(3)
    assert pool.num_held(pool.find(new)) == 0
    pool.forget()
    assert pool.find(new) == []
    assert pool.num_free == 8


# ---- what sequences find ----


def run(loop: Loop) -> int:
    """Serve everything; returns the prompt rows that were computed."""
    rows = 0
    while loop.unfinished:
        while len(loop.in_flight) < loop.depth and (scheduled := loop.launch()) is not None:
            prefill = scheduled.step.prefill
            rows += 0 if prefill is None else len(prefill.token_ids)
            loop.check_blocks()
        loop.retire()
        loop.check_blocks()
    loop.drain()
    return rows


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prompt_tokens", [17, 20])
def test_a_prompt_is_computed_once_but_for_its_last_block(policy: str, prompt_tokens: int) -> None:
    loop = Loop(policy)
    loop.add(TEXT[:prompt_tokens], max_tokens=1)
    assert run(loop) == prompt_tokens
    again = loop.add(TEXT[:prompt_tokens], max_tokens=1)
    assert prompt_load(again)[:2] == (prompt_tokens - 16, 16)
    assert run(loop) == prompt_tokens - 16
    assert again.num_found == 16
    scheduler = loop.scheduler
    assert (scheduler.num_queried_tokens, scheduler.num_found_tokens) == (2 * prompt_tokens, 16)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [5, 16, 1000])
def test_equal_prefixes_that_come_together_are_computed_once(policy: str, depth: int, chunk_tokens: int) -> None:
    loop = Loop(policy, chunk_tokens=chunk_tokens, depth=depth)
    loop.add(TEXT[:30], n=2)
    loop.add([*TEXT[:24], 1, 2, 3])
    loop.add([*TEXT[:24], 4, 5])
    assert run(loop) == 30 + 2 + 3 + 2
    assert loop.scheduler.num_found_tokens == 28 + 24 + 24


def test_who_awaits_a_prefix_blocks_nobody() -> None:
    loop = Loop("serial", chunk_tokens=8, max_num_seqs=4)
    writer, waiting, other = loop.add(TEXT[:30]), loop.add(TEXT[:31]), loop.add(5)
    assert loop.scheduler.prompts(0.0, 0.0) == [writer, other], "of equal prompts that wait, one is offered"
    loop.launch()
    assert [s.status for s in (writer, waiting, other)] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    assert loop.scheduler.prompts(0.0, 0.0) == [writer, other]
    loop.drain()


def test_a_writer_is_as_urgent_as_who_awaits_it_and_no_less_for_them() -> None:
    loop = Loop("serial", chunk_tokens=8, max_num_seqs=4)
    writer, awaiting, other = loop.add(TEXT[:30]), loop.add(TEXT[:31]), loop.add(5)
    loop.launch()
    queue = loop.scheduler.queue
    writer.deadline_s = 9.0
    other_first, writer_first = [other, writer], [writer, other]
    for sequence, deadline_s, order in (
        (other, 5.0, other_first),
        (awaiting, 2.0, writer_first),
        (awaiting, 20.0, other_first),
        (other, 12.0, writer_first),
    ):
        queue.remove(sequence)
        sequence.deadline_s = deadline_s
        queue.add(sequence)
        assert list(queue.ordered([writer], 0.0, 0.01)) == order
    loop.drain()


def test_a_short_prefix_is_not_awaited() -> None:
    loop = Loop("serial", chunk_tokens=1000)
    short = AWAITED_BLOCKS * BLOCK_TOKENS - 1
    for own in range(3):
        loop.add([*TEXT[:short], own, own])
    scheduled = loop.launch()
    assert scheduled is not None
    assert len(scheduled.admitted) == 3
    loop.drain()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_if_the_writer_goes_the_next_one_writes(policy: str, chunk_tokens: int) -> None:
    loop = Loop(policy, chunk_tokens=chunk_tokens)
    writer = loop.add(TEXT[:30])
    others = [loop.add(TEXT[: 30 + more]) for more in (1, 2)]
    loop.launch()
    loop.abort(writer)
    written = min(chunk_tokens, 30) // BLOCK_TOKENS * BLOCK_TOKENS
    # What the writer has written is found.
    assert run(loop) == 31 - min(written, 28) + (32 - 28)
    assert [s.status for s in others] == [Status.FINISHED] * 2


def test_a_prompt_that_is_scored_is_computed_but_others_find_it() -> None:
    loop = Loop("mixed")
    first = loop.add(TEXT[:20], n=2, prompt_logprobs=0)
    run(loop)
    again = loop.add(TEXT[:20], prompt_logprobs=0)
    plain = loop.add(TEXT[:20])
    run(loop)
    assert [s.num_found for s in (first, loop.sequences[1], again, plain)] == [0, 16, 0, 16]


def test_a_listener_hears_what_is_stored_and_removed() -> None:
    # Eleven blocks, of which the second prompt needs ten.
    loop = Loop("serial", chunk_tokens=1000, spare_blocks=1)
    heard: list[BlocksStored | BlocksRemoved] = []

    def listen(change: BlocksStored | BlocksRemoved) -> None:
        heard.append(change)
        loop.listen(change)

    loop.pool.listener = listen
    keys = keys_of(TEXT[:24], None)
    loop.add(TEXT[:20], max_tokens=1)
    run(loop)
    loop.add([*TEXT[:24], 1], max_tokens=1)
    run(loop)
    loop.add(37, max_tokens=1)
    run(loop)
    first, second, *removed, third = heard
    assert isinstance(first, BlocksStored)
    assert (first.parent, first.keys, first.token_ids.tolist()) == (None, tuple(keys[:5]), TEXT[:20])
    assert isinstance(second, BlocksStored)
    assert (second.parent, second.keys, second.token_ids.tolist()) == (keys[4], tuple(keys[5:]), TEXT[20:24])
    assert removed == [BlocksRemoved((key,)) for key in reversed(keys[1:])]
    assert isinstance(third, BlocksStored)
    loop.pool.abandon()
    assert heard[-1] == BlocksRemoved((keys[0], *third.keys))


def test_a_preempted_sequence_gets_back_what_is_still_there() -> None:
    # Sixteen blocks: both outgrow them, and the second one loses few of its own to the first.
    loop = Loop("mixed", spare_blocks=6, chunk_tokens=1000)
    loop.add(TEXT[:20], max_tokens=16)
    second = loop.add(TEXT[20:40], max_tokens=16)
    found = 0
    while loop.unfinished:
        loop.launch()
        if second.preempted and second.status is Status.RUNNING and not found:
            found = second.num_keyed * BLOCK_TOKENS
        loop.retire()
    loop.drain()
    assert loop.scheduler.num_preemptions == 1
    assert found > 20, "its generated tokens too"
    assert second.num_found == 0, "that counts what it found when it came"


def test_waiting_prompts_count_what_the_cache_lacks() -> None:
    loop = Loop("serial", chunk_tokens=8, max_num_seqs=1)
    loop.add(TEXT[:32])
    waiting = [loop.add(TEXT[:n]) for n in (32, 30, 12)] + [loop.add(9)]
    queue = loop.scheduler.queue
    totals = [queue.num_tokens]
    for _ in range(4):
        loop.launch()
        loop.retire()
        totals.append(queue.num_tokens)
        assert queue.num_tokens == sum(prompt_load(s).tokens_left for s in waiting)
    # Awaited keys are at the end of a prefix, so a prompt is looked up again when it can wait for nothing more.
    assert totals[0] == 32 + 30 + 12 + 9 + 32
    assert totals[-1] == 4 + 2 + 12 + 9
    assert all(b <= a for a, b in pairwise(totals))
    loop.drain()
    assert waiting[2].num_found == 8


def test_shared_blocks_that_others_hold_need_no_room() -> None:
    # Ten blocks: the first prompt takes seven; three are left, and one is kept back for it.
    loop = Loop("serial", spare_blocks=0, chunk_tokens=1000)
    first = loop.add(TEXT[:28], max_tokens=3)
    loop.launch()
    loop.retire()
    second = loop.add([*TEXT[:24], 1, 2, 3, 4, 5], max_tokens=1)
    loop.launch()
    assert [s.status for s in (first, second)] == [Status.RUNNING] * 2
    loop.drain()


def test_a_sequence_keeps_its_place_when_more_of_it_is_found() -> None:
    loop = Loop("serial", chunk_tokens=1000, max_num_seqs=1)
    loop.add(TEXT[:30], max_tokens=3)
    waiting: list[Sequence] = [loop.add(5), loop.add(TEXT[:31]), loop.add(6)]
    loop.launch()
    loop.retire()
    assert list(loop.scheduler.queue.ordered([], 0.0, 0.0)) == waiting
    loop.drain()


def test_a_prompt_that_is_scored_is_awaited_too() -> None:
    loop = Loop("serial", chunk_tokens=1000)
    loop.add(TEXT[:30], prompt_logprobs=0)
    loop.add(TEXT[:30])
    assert run(loop) == 30 + 2


# ---- the pool of KV blocks: against a model that only keeps sets, and by hand ----

NUM_SLOTS, MAX_BLOCKS, POOL_BLOCK_TOKENS = 4, 5, 8

GROW = st.tuples(st.just("grow"), st.integers(0, NUM_SLOTS - 1), st.integers(0, MAX_BLOCKS * POOL_BLOCK_TOKENS))
SLIDE = st.tuples(st.just("slide"), st.integers(0, NUM_SLOTS - 1), st.integers(0, MAX_BLOCKS * POOL_BLOCK_TOKENS))
RELEASE = st.tuples(st.just("release"), st.integers(0, NUM_SLOTS - 1), st.just(0))


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(
        num_blocks=num_blocks, num_slots=NUM_SLOTS, max_blocks_per_seq=MAX_BLOCKS, block_tokens=POOL_BLOCK_TOKENS
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
            passed = min(max(num_tokens // POOL_BLOCK_TOKENS - given_back[slot], 0), len(expected[slot]))
            kept = min(passed, max(wanted - given_back[slot] - len(expected[slot]), 0))
            pool.slide(slot, num_tokens, wanted * POOL_BLOCK_TOKENS)
            expected[slot] = expected[slot][passed:] + expected[slot][:kept]
            given_back[slot] += passed
        else:
            need = -(-num_tokens // POOL_BLOCK_TOKENS) - given_back[slot]
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
        capacities = [(n + len(blocks)) * POOL_BLOCK_TOKENS for n, blocks in zip(given_back, expected, strict=True)]
        assert [pool.capacity(s) for s in range(NUM_SLOTS)] == capacities
        assert pool.num_used + pool.num_free == pool.num_usable == num_blocks - 1
        peak = max(peak, len(owned))
    assert pool.peak_used == peak
    for slot in range(NUM_SLOTS):
        pool.clear(slot)
    assert pool.num_free == num_blocks - 1


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, MAX_BLOCKS * POOL_BLOCK_TOKENS), min_size=1, max_size=NUM_SLOTS),
    windows=st.lists(st.integers(1, MAX_BLOCKS * POOL_BLOCK_TOKENS), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    shuffler=st.randoms(),
)
def test_flatten_lists_the_blocks_that_cover_tokens(lengths: list[int], windows: list[int], shuffler: Random) -> None:
    pool = make_pool(1 + NUM_SLOTS * MAX_BLOCKS)
    slots = list(range(NUM_SLOTS))
    shuffler.shuffle(slots)
    slots = slots[: len(lengths)]
    for slot in slots:
        assert pool.grow(slot, MAX_BLOCKS * POOL_BLOCK_TOKENS)
    starts, indptr, indices = pool.flatten(int32(slots), int32(lengths))
    assert starts.tolist() == [0] * len(slots)
    expected = [pool.owned(s)[: -(-n // POOL_BLOCK_TOKENS)] for s, n in zip(slots, lengths, strict=True)]
    assert [indices[a:b].tolist() for a, b in pairwise(indptr)] == expected
    assert indptr[-1] == len(indices)
    assert starts.dtype == indptr.dtype == indices.dtype == np.int32
    # From a position on, whether or not blocks before it were given back.
    since = [n - window for n, window in zip(lengths, windows, strict=False)]
    firsts = [max(position, 0) // POOL_BLOCK_TOKENS for position in since]
    expected = [blocks[first:] for blocks, first in zip(expected, firsts, strict=True)]
    for slot, position in list(zip(slots, since, strict=True))[::2]:
        pool.slide(slot, position, 0)
    starts, indptr, indices = pool.flatten(int32(slots), int32(lengths), int32(since))
    assert [indices[a:b].tolist() for a, b in pairwise(indptr)] == expected
    assert starts.tolist() == [first * POOL_BLOCK_TOKENS for first in firsts]


def test_lowest_blocks_come_first_and_are_used_again() -> None:
    pool = make_pool(10)
    assert pool.grow(0, 3 * POOL_BLOCK_TOKENS)
    assert pool.owned(0) == [1, 2, 3]
    assert PADDING_BLOCK not in pool.owned(0)
    assert pool.grow(1, POOL_BLOCK_TOKENS)
    pool.clear(0)
    assert pool.grow(2, 4 * POOL_BLOCK_TOKENS)
    assert pool.owned(2) == [1, 2, 3, 5]
    assert pool.peak_used == 5
