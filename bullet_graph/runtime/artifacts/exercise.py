"""Runs forwards of each kind once, so that kernels which no start needs are compiled when a cache is built."""

import numpy as np

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.partition.masks import LANES, Lane
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.step import DecodeBatch, Int32Array, Placement, PrefillBatch, SlotInit, Step

PROMPT_TOKENS = (1, 2, 5, 16, 100, 128, 1000, 1024, 2048)
"""Lengths that are specialised differently: one, odd, multiples of 16, longer than captured pieces."""

_SLOT = 0


def exercise(executor: Executor, *, max_rows: int, max_model_len: int, num_kv_blocks: int) -> int:
    """Serve one sequence at a time for each length that fits; returns how many steps were run.

    Args:
        max_rows: most rows of a forward.
        max_model_len: most tokens of a sequence.
        num_kv_blocks: blocks of the cache, that of padding included.
    """
    room = min(max_rows - 1, max_model_len - 1, (num_kv_blocks - 3) * KV_BLOCK_TOKENS)
    lanes: tuple[Lane, ...] = LANES if executor.has_prefill_lane else ("decode",)
    steps = 0
    for tokens in (tokens for tokens in PROMPT_TOKENS if tokens <= room):
        for lane in lanes:
            _run(executor, Step((_slot(),), _prompt(0, tokens), None, None), lane)
            # The prompt's last token again, as a chunk that goes on, then one decode row, then both in one forward.
            _run(executor, Step((), _prompt(tokens - 1, 1), None, None), lane)
            _run(executor, Step((), None, _decode(tokens), None), "decode")
            _run(executor, Step((_slot(1),), _prompt(0, 1, slot=1), _decode(tokens), None), "decode")
            steps += 4
    return steps


def _run(executor: Executor, step: Step, lane: Lane) -> None:
    executor.wait(executor.launch(step, Placement(lane=lane)))


def _slot(slot: int = _SLOT) -> SlotInit:
    return SlotInit(slot, 0.0, 0, 1.0, 0.0, 0, (), 0)


def _blocks(num_tokens: int, first: int) -> Int32Array:
    count = -(-num_tokens // KV_BLOCK_TOKENS)
    return np.arange(first, first + count, dtype=np.int32)


def _prompt(start: int, count: int, *, slot: int = _SLOT) -> PrefillBatch:
    # Block 0 is that of padding, block 1 the second sequence's.
    blocks = _blocks(start + count, 2) if slot == _SLOT else _blocks(count, 1)
    return PrefillBatch(
        slots=np.array([slot], dtype=np.int32),
        token_ids=np.zeros(count, dtype=np.int32),
        q_indptr=np.array([0, count], dtype=np.int32),
        starts=np.array([start], dtype=np.int32),
        kv_indptr=np.array([0, len(blocks)], dtype=np.int32),
        kv_indices=blocks,
        samples=np.array([True]),
    )


def _decode(position: int) -> DecodeBatch:
    blocks = _blocks(position + 1, 2)
    return DecodeBatch(
        slots=np.array([_SLOT], dtype=np.int32),
        positions=np.array([position], dtype=np.int32),
        kv_indptr=np.array([0, len(blocks)], dtype=np.int32),
        kv_indices=blocks,
    )
