"""The layout of a step's rows against a loop that goes token by token."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.runtime.rows import Chunk, lay_out, make_batches


class Described(NamedTuple):
    """A step; slots and blocks are those of its chunks, then of its decode rows."""

    chunks: list[Chunk]
    decode: list[int]
    slots: list[int]
    blocks: list[int]
    block_tokens: int


ARRAYS = (
    *("token_ids", "decode_slots", "positions", "kv_slots", "q_indptr", "kv_lens", "kv_indptr", "kv_indices"),
    *("sample_rows", "sample_indptr", "sample_slots", "sample_positions"),
)


def naive(step: Described) -> dict[str, list[int]]:
    """What ``lay_out`` must give, and what ``ended_prompts`` must, as plain lists."""
    expected: dict[str, list[int]] = {name: [0] if name.endswith("indptr") else [] for name in ARRAYS}
    ended: dict[str, list[int]] = {"ended": [], "ended_indptr": [0], "ended_indices": []}
    positions, unused = expected["positions"], iter(step.blocks)
    sequences = [*step.chunks, *((position, 1, True) for position in step.decode)]
    for index, ((start, length, samples), slot) in enumerate(zip(sequences, step.slots, strict=True)):
        blocks = [next(unused) for _ in range(-(-(start + length) // step.block_tokens))]
        for position in range(start, start + length):
            positions.append(position)
            block = blocks[position // step.block_tokens]
            expected["kv_slots"].append(block * step.block_tokens + position % step.block_tokens)
        expected["q_indptr"].append(len(positions))
        expected["kv_lens"].append(start + length)
        expected["kv_indices"] += blocks
        expected["kv_indptr"].append(len(expected["kv_indices"]))
        if samples:
            expected["sample_rows"].append(len(positions) - 1)
            expected["sample_slots"].append(slot)
            expected["sample_positions"].append(start + length)
        expected["sample_indptr"].append(len(expected["sample_rows"]))
        if samples and index < len(step.chunks):
            ended["ended"].append(index)
            ended["ended_indices"] += blocks
            ended["ended_indptr"].append(len(ended["ended_indices"]))
    expected["token_ids"] = list(range(1000, 1000 + sum(length for _, length, _ in step.chunks)))
    expected["decode_slots"] = step.slots[len(step.chunks) :]
    return expected | ended


@st.composite
def steps(draw: st.DrawFn) -> Described:
    starts = st.just(0) | st.integers(0, 40)
    chunks = draw(st.lists(st.tuples(starts, st.integers(1, 40), st.booleans()), max_size=4))
    decode = draw(st.lists(starts, min_size=0 if chunks else 1, max_size=4))
    slots = draw(st.permutations(range(len(chunks) + len(decode))))
    blocks = np.random.default_rng(draw(st.integers(0, 2**32))).permutation(np.arange(1, 2000))[:800]
    return Described(chunks, decode, slots, blocks.tolist(), draw(st.sampled_from([1, 3, 16])))


@settings(max_examples=100)
@given(steps())
def test_rows_are_those_of_a_naive_loop(step: Described) -> None:
    expected = naive(step)
    batches = make_batches(
        step.chunks,
        step.decode,
        blocks=np.array(step.blocks),
        block_tokens=step.block_tokens,
        token_ids=np.array(expected["token_ids"]),
        slots=step.slots,
    )
    rows = lay_out(*batches, step.block_tokens)
    found = {name: getattr(rows, name) for name in ARRAYS}
    found |= zip(("ended", "ended_indptr", "ended_indices"), rows.ended_prompts(), strict=True)
    assert {name: array.tolist() for name, array in found.items()} == expected
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}
    assert rows.num_prefill == len(step.chunks)
    assert rows.num_prefill_rows == len(expected["token_ids"])
    # Decode rows have tokens in the cache, too, and are no prompts.
    assert rows.num_continued == max((i + 1 for i, (start, *_) in enumerate(step.chunks) if start), default=0)
    assert type(rows.num_continued) is int


def test_blocks_given_back_move_only_what_is_attended_to() -> None:
    """Rows of sequences whose first blocks are gone are those of shorter sequences, at later positions."""
    blocks = np.arange(10, 30)
    shorter = make_batches([(5, 7, True)], [9], blocks=blocks, block_tokens=4)
    longer = make_batches([(5 + 8, 7, True)], [9 + 20], blocks=blocks, block_tokens=4)
    moved = [
        replace(at, kv_starts=np.array([skipped], dtype=np.int32), kv_indptr=of.kv_indptr, kv_indices=of.kv_indices)
        for at, of, skipped in zip(longer, shorter, (8, 20), strict=True)
    ]
    found, expected = lay_out(*moved, 4), lay_out(*shorter, 4)
    later = {"positions": [8] * 7 + [20], "sample_positions": [8, 20]}
    for name in ARRAYS:
        wanted = getattr(expected, name) + np.array(later.get(name, 0), dtype=np.int32)
        assert getattr(found, name).tolist() == wanted.tolist(), name
