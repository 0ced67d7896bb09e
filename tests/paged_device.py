"""A device without a model: checks every step it is given against a paged memory, and invents tokens.

It remembers which token lies at which place of which block, as a KV cache does, and makes the next token
from all the tokens it finds through the step's block lists. So a block that is shared, reused too early, or
left out shows as a wrong token or as a failed check.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from bullet_graph.engine.block_pool import PADDING_BLOCK, BlockPool
from bullet_graph.engine.sequence import Sequence, Status
from bullet_graph.partition.masks import Lane
from bullet_graph.runtime.step import SlotInit, Step, StepResult

VOCAB_SIZE = 1000
_FACTOR, _MODULUS = 1_000_003, 2_147_483_647


def _powers(count: int) -> np.ndarray:
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * _FACTOR % _MODULUS)
    return np.array(powers)


_POWERS = _powers(8192)


def next_token(seed: int, history: np.ndarray) -> int:
    """The token that follows ``history``: a hash of both, computed as :func:`generate_alone` does token by token."""
    powers = _POWERS[: len(history) + 1][::-1]
    return int(((seed + 1) * powers[0] + ((history + 1) * powers[1:] % _MODULUS).sum()) % _MODULUS % VOCAB_SIZE)


def generate_alone(seed: int, prompt: list[int], count: int, window: int | None = None) -> list[int]:
    """What a sequence must yield, whatever else runs."""
    if window is not None:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(seed, np.array(tokens[-window:])))
        return tokens[len(prompt) :]
    value = seed + 1
    for token in prompt:
        value = (value * _FACTOR + token + 1) % _MODULUS
    output = []
    for _ in range(count):
        output.append(value % VOCAB_SIZE)
        value = (value * _FACTOR + output[-1] + 1) % _MODULUS
    return output


def check_blocks(pool: BlockPool, num_slots: int, sequences: Iterable[Sequence]) -> None:
    """No block is leaked, owned by a slot that nobody has, or owned twice without a key."""
    holders = [s for s in sequences if s.slot >= 0]
    slots = {s.slot for s in holders}
    assert len(slots) == len(holders), "a slot with two sequences"
    by_slot = [pool.owned(slot) for slot in range(num_slots)]
    owned = Counter(block for blocks in by_slot for block in blocks)
    assert all(len(by_slot[slot]) == len(set(by_slot[slot])) for slot in slots)
    blocks, keys, cached = range(1, pool.num_usable + 1), pool._keys, pool._cached.keys()
    assert all(pool._num_holders[block] == count for block, count in owned.items())
    assert (sum(pool._num_holders), min(pool._num_holders)) == (owned.total(), 0), "held by nobody"
    assert all(block in keys for block, count in owned.items() if count > 1), "shared while it is written"
    assert sorted([*owned, *pool._free, *cached]) == list(blocks), "lost, or in two places"
    assert len(owned) == pool.num_used
    assert {key: block for block, key in keys.items()} == pool.found_by_key
    assert cached <= keys.keys() <= cached | owned.keys()
    assert not any(blocks for slot, blocks in enumerate(by_slot) if slot not in slots)
    assert all(s.status is Status.RUNNING or s.num_pending_steps for s in holders), "a leak"


@dataclass
class _Slot:
    init: SlotInit
    """The settings it was given last."""
    length: int = 0
    """Positions in the cache since the slot was initialised: they must be filled once each, in order."""
    tokens: list[int] = field(default_factory=list)
    last_token: int = -1
    awaits_decode: bool = False


@dataclass
class PagedDevice:
    """Executes steps in the order of launch, each at once, and hands the tokens over when waited for.

    What the prefill lane samples can be decoded only when it has been waited for.
    """

    block_tokens: int
    window: int | None = None
    slots: dict[int, _Slot] = field(default_factory=dict)
    max_blocks: int = 8192
    results: dict[int, StepResult] = field(default_factory=dict)
    touched: dict[int, list[tuple[int, np.ndarray, np.ndarray]]] = field(default_factory=dict)
    """For each step in flight, by slot the blocks that it touches, and those of them that it writes."""
    ended_prompts: dict[int, list[int]] = field(default_factory=dict)
    num_launched: int = 0

    def __post_init__(self) -> None:
        self.memory = np.full((self.max_blocks, self.block_tokens), -1)
        # How many steps in flight touch and write each block: for each slot, and (None) for all.
        self._users: dict[int | None, np.ndarray] = defaultdict(self._none)
        self._writers: dict[int | None, np.ndarray] = defaultdict(self._none)

    def _none(self) -> np.ndarray:
        return np.zeros(self.max_blocks, dtype=np.int32)

    def launch(self, step: Step, lane: Lane = "decode") -> int:
        ticket, self.num_launched = self.num_launched, self.num_launched + 1
        for init in step.admitted:
            self.slots[init.slot] = _Slot(init)
        self.touched[ticket] = []
        self.ended_prompts[ticket] = []
        tokens: list[int] = []
        used_slots: list[int] = []
        if step.prefill is not None:
            batch = step.prefill
            for i, slot in enumerate(batch.slots.tolist()):
                chunk = batch.token_ids[batch.q_indptr[i] : batch.q_indptr[i + 1]].tolist()
                blocks = batch.kv_indices[batch.kv_indptr[i] : batch.kv_indptr[i + 1]].astype(np.intp)
                assert chunk, "an empty chunk"
                assert not self.slots[slot].awaits_decode, "prefill of a slot that is decoding"
                history = self._write(ticket, slot, int(batch.starts[i]), chunk, int(batch.kv_starts[i]), blocks)
                if batch.samples[i]:
                    tokens.append(self._sample(slot, history))
                    if lane == "prefill":
                        self.slots[slot].awaits_decode = False
                        self.ended_prompts[ticket].append(slot)
                used_slots.append(slot)
        if step.decode is not None:
            decode = step.decode
            for i, slot in enumerate(decode.slots.tolist()):
                blocks = decode.kv_indices[decode.kv_indptr[i] : decode.kv_indptr[i + 1]].astype(np.intp)
                assert self.slots[slot].awaits_decode, "decode of a slot whose prompt has not ended"
                token, first = self.slots[slot].last_token, int(decode.kv_starts[i])
                history = self._write(ticket, slot, int(decode.positions[i]), [token], first, blocks)
                tokens.append(self._sample(slot, history))
                used_slots.append(slot)
        assert len(used_slots) == len(set(used_slots)), "a slot twice in one step"
        self.results[ticket] = StepResult(np.array(tokens, dtype=np.int32), None, device_ms=1.0)
        return ticket

    def wait(self, ticket: int) -> StepResult:
        for slot, blocks, written in self.touched.pop(ticket):
            self._count(slot, blocks, written, -1)
        for slot in self.ended_prompts.pop(ticket):
            self.slots[slot].awaits_decode = True
        return self.results.pop(ticket)

    def _write(
        self, ticket: int, slot: int, start: int, tokens: list[int], kv_start: int, blocks: np.ndarray
    ) -> np.ndarray:
        """Put tokens at positions from ``start`` on, into blocks whose first token has the position ``kv_start``."""
        state = self.slots[slot]
        if not state.length and start:
            # A prefix that another slot has written; that it is the right one shows in the tokens.
            assert start % self.block_tokens == 0
            state.tokens[:] = self.memory[blocks].ravel()[:start].tolist()
            state.length = start
        assert start == state.length, f"position {start} follows {state.length - 1}"
        state.length += len(tokens)
        seen = 0 if self.window is None else max(start + 1 - self.window, 0)
        assert kv_start == seen - seen % self.block_tokens
        end = state.length - kv_start
        assert len(blocks) == -(-end // self.block_tokens), "blocks do not match the length"
        assert PADDING_BLOCK not in blocks
        first = (start - kv_start) // self.block_tokens
        written = blocks[first:]
        writers, users = self._writers, self._users
        is_written = writers[None][blocks] > writers[slot][blocks]
        assert not is_written.any(), "a block is read while a step in flight writes it for another slot"
        is_used = users[None][written] > users[slot][written]
        assert not is_used.any(), "a block changed hands while a step in flight uses it"
        self.touched[ticket].append((slot, blocks, written))
        self._count(slot, blocks, written, 1)
        history = self.memory[blocks].ravel()
        history[start - kv_start : end] = tokens
        self.memory[written] = history[first * self.block_tokens :].reshape(-1, self.block_tokens)
        state.tokens[start:] = tokens
        assert history[seen - kv_start : end].tolist() == state.tokens[seen:], "not what was written there"
        return history[:end] if self.window is None else history[:end][-self.window :]

    def _count(self, slot: int, blocks: np.ndarray, written: np.ndarray, change: int) -> None:
        for key in (slot, None):
            self._users[key][blocks] += change
            self._writers[key][written] += change

    def _sample(self, slot: int, history: np.ndarray) -> int:
        state = self.slots[slot]
        state.last_token = next_token(state.init.seed, history)
        state.awaits_decode = True
        return state.last_token
