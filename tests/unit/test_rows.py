"""The layout of a step's rows against a loop that goes token by token."""

from dataclasses import dataclass, field
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.runtime.rows import Rows, lay_out
from bullet_graph.runtime.step import DecodeBatch, PrefillBatch


@dataclass(frozen=True)
class Chunk:
    """One sequence of a step: ``length`` None for a decode row."""

    slot: int
    start: int
    length: int | None
    samples: bool
    blocks: list[int]


@dataclass
class Expected:
    """What ``lay_out`` must give, as plain lists."""

    token_ids: list[int] = field(default_factory=list)
    decode_slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    kv_slots: list[int] = field(default_factory=list)
    q_indptr: list[int] = field(default_factory=lambda: [0])
    kv_lens: list[int] = field(default_factory=list)
    kv_indptr: list[int] = field(default_factory=lambda: [0])
    kv_indices: list[int] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    sample_indptr: list[int] = field(default_factory=lambda: [0])
    sample_slots: list[int] = field(default_factory=list)
    sample_positions: list[int] = field(default_factory=list)


def naive(chunks: list[Chunk], token_ids: list[int], block_tokens: int) -> Expected:
    expected = Expected(token_ids=token_ids)
    for chunk in chunks:
        length = 1 if chunk.length is None else chunk.length
        for position in range(chunk.start, chunk.start + length):
            expected.positions.append(position)
            block = chunk.blocks[position // block_tokens]
            expected.kv_slots.append(block * block_tokens + position % block_tokens)
        if chunk.length is None:
            expected.decode_slots.append(chunk.slot)
        expected.q_indptr.append(len(expected.positions))
        expected.kv_lens.append(chunk.start + length)
        expected.kv_indices += chunk.blocks
        expected.kv_indptr.append(len(expected.kv_indices))
        if chunk.samples:
            expected.sample_rows.append(len(expected.positions) - 1)
            expected.sample_slots.append(chunk.slot)
            expected.sample_positions.append(chunk.start + length)
        expected.sample_indptr.append(len(expected.sample_rows))
    return expected


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def indptr(lists: list[list[int]]) -> np.ndarray:
    return int32(np.cumsum([0, *map(len, lists)]).tolist())


def prefill_batch(chunks: list[Chunk], token_ids: list[int]) -> PrefillBatch | None:
    if not chunks:
        return None
    lengths = [chunk.length or 0 for chunk in chunks]
    return PrefillBatch(
        slots=int32([c.slot for c in chunks]),
        token_ids=int32(token_ids),
        q_indptr=int32(np.cumsum([0, *lengths]).tolist()),
        starts=int32([c.start for c in chunks]),
        kv_indptr=indptr([c.blocks for c in chunks]),
        kv_indices=int32([b for c in chunks for b in c.blocks]),
        samples=np.array([c.samples for c in chunks], dtype=np.bool_),
    )


def decode_batch(chunks: list[Chunk]) -> DecodeBatch | None:
    if not chunks:
        return None
    return DecodeBatch(
        slots=int32([c.slot for c in chunks]),
        positions=int32([c.start for c in chunks]),
        kv_indptr=indptr([c.blocks for c in chunks]),
        kv_indices=int32([b for c in chunks for b in c.blocks]),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Chunk], int]:
    block_tokens = draw(st.sampled_from([1, 3, 16]))
    num_prefill = draw(st.integers(0, 4))
    num_decode = draw(st.integers(0 if num_prefill else 1, 4))
    slots = draw(st.permutations(range(num_prefill + num_decode)))
    blocks = iter(Random(draw(st.integers(0, 2**32))).sample(range(1, 2000), 800))
    chunks = []
    for i, slot in enumerate(slots):
        start = draw(st.just(0) | st.integers(0, 40))
        length = draw(st.integers(1, 40)) if i < num_prefill else None
        count = -(-(start + (length or 1)) // block_tokens)
        samples = draw(st.booleans()) if i < num_prefill else True
        chunks.append(Chunk(slot, start, length, samples, [next(blocks) for _ in range(count)]))
    return chunks, block_tokens


def check(rows: Rows, expected: Expected, num_prefill: int) -> None:
    for name, values in vars(expected).items():
        found = getattr(rows, name)
        assert found.tolist() == values, name
        assert found.dtype == np.int32, name
    assert rows.num_prefill == num_prefill
    assert rows.num_prefill_rows == len(expected.token_ids)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_rows_are_those_of_a_naive_loop(step: tuple[list[Chunk], int]) -> None:
    chunks, block_tokens = step
    prefill = [c for c in chunks if c.length is not None]
    token_ids = list(range(1000, 1000 + sum(c.length or 0 for c in prefill)))
    rows = lay_out(
        prefill_batch(prefill, token_ids),
        decode_batch([c for c in chunks if c.length is None]),
        block_tokens,
    )
    check(rows, naive(chunks, token_ids, block_tokens), len(prefill))
    # Decode rows have tokens in the cache, too, and are no prompts.
    assert rows.num_continued == max((i + 1 for i, c in enumerate(prefill) if c.start), default=0)
    assert type(rows.num_continued) is int
    ended = [i for i, c in enumerate(prefill) if c.samples]
    found = rows.ended_prompts()
    assert [array.tolist() for array in found] == [
        ended,
        indptr([prefill[i].blocks for i in ended]).tolist(),
        [block for i in ended for block in prefill[i].blocks],
    ]
    assert {array.dtype for array in found} == {np.dtype(np.int32)}


def test_a_step_by_hand() -> None:
    # Slot 2: tokens 3 to 5 of its prompt, blocks of 4 tokens; slot 0: one decode row at position 8.
    prefill = PrefillBatch(
        slots=int32([2]),
        token_ids=int32([50, 51, 52]),
        q_indptr=int32([0, 3]),
        starts=int32([3]),
        kv_indptr=int32([0, 2]),
        kv_indices=int32([7, 9]),
        samples=np.array([True]),
    )
    decode = DecodeBatch(int32([0]), int32([8]), int32([0, 3]), int32([4, 5, 6]))
    rows = lay_out(prefill, decode, 4)
    assert rows.positions.tolist() == [3, 4, 5, 8]
    assert rows.kv_slots.tolist() == [7 * 4 + 3, 9 * 4, 9 * 4 + 1, 6 * 4]
    assert rows.q_indptr.tolist() == [0, 3, 4]
    assert rows.kv_lens.tolist() == [6, 9]
    assert rows.sample_rows.tolist() == [2, 3]
    assert rows.sample_slots.tolist() == [2, 0]
    assert rows.sample_positions.tolist() == [6, 9]
