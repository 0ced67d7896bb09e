"""Runs forwards of each kind once, so that kernels which no start needs are compiled when a cache is built.

Triton compiles a kernel anew where a number is 1 or a multiple of 16, and where an address is a multiple of 16 bytes.
So what counts are rows, sequences and blocks of each such kind, in each forward that a lane may be given.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.partition.masks import LANES, Lane
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.step import DecodeBatch, Int32Array, Placement, PrefillBatch, SlotInit, Step

PROMPT_TOKENS = (1, 2, 5, 16, 100, 128, 1000, 1024, 2048)
"""Lengths of prompts alone: one, odd, multiples of 16, longer than a large model's captured pieces."""

MIXED_PROMPTS = (1, 2, 3, 4)
"""Prompts beside decode rows: arrays of the latter begin so many numbers of four bytes after an aligned address."""

MIXED_TOKENS = (16, 20)
"""Their lengths: of one block and of two."""

DECODE_ROWS = (1, 3, 16, 100, 128)

_POSITION = 5
"""Of decode rows; what they attend to does not matter."""


def exercise(
    executor: Executor, *, max_rows: int, max_num_seqs: int, max_model_len: int, num_kv_blocks: int
) -> int:
    """Launch every kind of step that fits; returns how many.

    Args:
        max_rows: most rows of a forward.
        max_num_seqs: slots.
        max_model_len: most tokens of a sequence.
        num_kv_blocks: blocks of the cache, that of padding included.
    """
    # Block 0 is that of padding, block 1 the decode rows'.
    room = (num_kv_blocks - 2) * KV_BLOCK_TOKENS
    steps = 0
    lanes: tuple[Lane, ...] = LANES if executor.has_prefill_lane else ("decode",)
    for tokens in (tokens for tokens in PROMPT_TOKENS if tokens < min(max_rows, max_model_len, room)):
        # A whole prompt, then its last token as a chunk that goes on.
        for lane, start in itertools.product(lanes, sorted({0, tokens - 1})):
            _run(executor, Step(_admitted(1), _prompts(1, start, tokens), None, None), lane)
            steps += 1
    for step in _decode_steps(max_rows, max_num_seqs, max_model_len, room):
        _run(executor, step, "decode")
        steps += 1
    return steps


def _decode_steps(max_rows: int, max_num_seqs: int, max_model_len: int, room: int) -> Iterator[Step]:
    if max_model_len <= max(_POSITION, *MIXED_TOKENS):
        return
    for rows in (rows for rows in DECODE_ROWS if rows <= max_num_seqs):
        yield Step(_admitted(rows), None, _decode(0, rows), None)
        for prompts, tokens in itertools.product(MIXED_PROMPTS, MIXED_TOKENS):
            fits = prompts + rows <= max_num_seqs and prompts * tokens + rows <= max_rows
            if fits and prompts * _num_blocks(tokens) * KV_BLOCK_TOKENS <= room:
                yield Step(
                    _admitted(prompts + rows), _prompts(prompts, 0, tokens), _decode(prompts, rows), None
                )


def _run(executor: Executor, step: Step, lane: Lane) -> None:
    executor.wait(executor.launch(step, Placement(lane=lane)))


def _admitted(count: int) -> tuple[SlotInit, ...]:
    return tuple(SlotInit(slot, 0.0, 0, 1.0, 0.0, 0, (), 0) for slot in range(count))


def _num_blocks(tokens: int) -> int:
    return -(-tokens // KV_BLOCK_TOKENS)


def _prompts(count: int, start: int, end: int) -> PrefillBatch:
    """Tokens [start, end) of so many prompts, in the first slots."""
    ordinals = np.arange(count + 1, dtype=np.int32)
    num_blocks = _num_blocks(end)
    return PrefillBatch(
        slots=ordinals[:-1],
        token_ids=np.zeros(count * (end - start), dtype=np.int32),
        q_indptr=ordinals * np.int32(end - start),
        starts=np.full(count, start, dtype=np.int32),
        kv_indptr=ordinals * np.int32(num_blocks),
        kv_indices=np.arange(2, 2 + count * num_blocks, dtype=np.int32),
        samples=np.ones(count, dtype=np.bool_),
    )


def _decode(first_slot: int, rows: int) -> DecodeBatch:
    blocks: Int32Array = np.ones(rows, dtype=np.int32)
    return DecodeBatch(
        slots=np.arange(first_slot, first_slot + rows, dtype=np.int32),
        positions=blocks * np.int32(_POSITION),
        kv_indptr=np.arange(rows + 1, dtype=np.int32),
        kv_indices=blocks,
    )
