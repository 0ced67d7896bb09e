"""The layout of a step's rows against a loop that goes token by token."""

from dataclasses import dataclass
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.runtime.rows import lay_out
from bullet_graph.runtime.step import DecodeBatch, PrefillBatch


@dataclass(frozen=True)
class Chunk:
    """One sequence of a step: ``length`` None for a decode row."""

    slot: int
    start: int
    length: int | None
    samples: bool
    blocks: list[int]


ARRAYS = (
    *("token_ids", "decode_slots", "positions", "kv_slots", "q_indptr", "kv_lens", "kv_indptr", "kv_indices"),
    *("sample_rows", "sample_indptr", "sample_slots", "sample_positions"),
)


def naive(chunks: list[Chunk], token_ids: list[int], block_tokens: int) -> dict[str, list[int]]:
    """What ``lay_out`` must give, as plain lists."""
    expected: dict[str, list[int]] = {name: [0] if name.endswith("indptr") else [] for name in ARRAYS}
    expected["token_ids"] = token_ids
    positions = expected["positions"]
    for chunk in chunks:
        length = 1 if chunk.length is None else chunk.length
        for position in range(chunk.start, chunk.start + length):
            positions.append(position)
            block = chunk.blocks[position // block_tokens]
            expected["kv_slots"].append(block * block_tokens + position % block_tokens)
        if chunk.length is None:
            expected["decode_slots"].append(chunk.slot)
        expected["q_indptr"].append(len(positions))
        expected["kv_lens"].append(chunk.start + length)
        expected["kv_indices"] += chunk.blocks
        expected["kv_indptr"].append(len(expected["kv_indices"]))
        if chunk.samples:
            expected["sample_rows"].append(len(positions) - 1)
            expected["sample_slots"].append(chunk.slot)
            expected["sample_positions"].append(chunk.start + length)
        expected["sample_indptr"].append(len(expected["sample_rows"]))
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
    for name, values in naive(chunks, token_ids, block_tokens).items():
        found = getattr(rows, name)
        assert found.tolist() == values, name
        assert found.dtype == np.int32, name
    assert rows.num_prefill == len(prefill)
    assert rows.num_prefill_rows == len(token_ids)
    # Decode rows have tokens in the cache, too, and are no prompts.
    assert rows.num_continued == max((i + 1 for i, c in enumerate(prefill) if c.start), default=0)
    assert type(rows.num_continued) is int
    ended = [i for i, c in enumerate(prefill) if c.samples]
    prompts = rows.ended_prompts()
    assert [array.tolist() for array in prompts] == [
        ended,
        indptr([prefill[i].blocks for i in ended]).tolist(),
        [block for i in ended for block in prefill[i].blocks],
    ]
    assert {array.dtype for array in prompts} == {np.dtype(np.int32)}
