"""A device without a model: checks every step it is given against a paged memory, and invents tokens.

It remembers which token lies at which place of which block, as a KV cache does, and makes the next token
from all the tokens it finds through the step's block lists. So a block that is shared, reused too early, or
left out shows as a wrong token or as a failed check.
"""

from dataclasses import dataclass, field

import numpy as np

from bullet_graph.engine.block_pool import PADDING_BLOCK
from bullet_graph.partition.masks import Lane
from bullet_graph.runtime.step import SlotInit, Step, StepResult

VOCAB_SIZE = 1000


def next_token(seed: int, history: list[int]) -> int:
    """The token that follows ``history`` (a random-looking function of both)."""
    value = seed + 1
    for token in history:
        value = (value * 1_000_003 + token + 1) % 2_147_483_647
    return value % VOCAB_SIZE


def generate_alone(seed: int, prompt: list[int], count: int) -> list[int]:
    """What a sequence must yield, whatever else runs."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(seed, history))
    return history[len(prompt) :]


@dataclass
class _Slot:
    init: SlotInit
    """The settings it was given last."""
    length: int = 0
    """Positions in the cache since the slot was initialised: they must be filled once each, in order."""
    last_token: int = -1
    awaits_decode: bool = False


@dataclass
class PagedDevice:
    """Executes steps in the order of launch, each at once, and hands the tokens over when waited for.

    What the prefill lane samples can be decoded only when it has been waited for.
    """

    block_tokens: int
    slots: dict[int, _Slot] = field(default_factory=dict)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    results: dict[int, StepResult] = field(default_factory=dict)
    blocks_in_flight: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each step in flight, the blocks it touches and the slot that each is touched for."""
    ended_prompts: dict[int, list[int]] = field(default_factory=dict)
    num_launched: int = 0

    def launch(self, step: Step, lane: Lane = "decode") -> int:
        ticket, self.num_launched = self.num_launched, self.num_launched + 1
        for init in step.admitted:
            self.slots[init.slot] = _Slot(init)
        self._touched = self.blocks_in_flight[ticket] = {}
        self.ended_prompts[ticket] = []
        tokens: list[int] = []
        used_slots: list[int] = []
        if step.prefill is not None:
            batch = step.prefill
            for i, slot in enumerate(batch.slots.tolist()):
                chunk = batch.token_ids[batch.q_indptr[i] : batch.q_indptr[i + 1]].tolist()
                blocks = batch.kv_indices[batch.kv_indptr[i] : batch.kv_indptr[i + 1]].tolist()
                assert chunk, "an empty chunk"
                assert not self.slots[slot].awaits_decode, "prefill of a slot that is decoding"
                history = self._write(slot, int(batch.starts[i]), chunk, blocks)
                if batch.samples[i]:
                    tokens.append(self._sample(slot, history))
                    if lane == "prefill":
                        self.slots[slot].awaits_decode = False
                        self.ended_prompts[ticket].append(slot)
                used_slots.append(slot)
        if step.decode is not None:
            decode = step.decode
            for i, slot in enumerate(decode.slots.tolist()):
                blocks = decode.kv_indices[decode.kv_indptr[i] : decode.kv_indptr[i + 1]].tolist()
                assert self.slots[slot].awaits_decode, "decode of a slot whose prompt has not ended"
                history = self._write(slot, int(decode.positions[i]), [self.slots[slot].last_token], blocks)
                tokens.append(self._sample(slot, history))
                used_slots.append(slot)
        assert len(used_slots) == len(set(used_slots)), "a slot twice in one step"
        self.results[ticket] = StepResult(np.array(tokens, dtype=np.int32), None, device_ms=1.0)
        return ticket

    def wait(self, ticket: int) -> StepResult:
        del self.blocks_in_flight[ticket]
        for slot in self.ended_prompts.pop(ticket):
            self.slots[slot].awaits_decode = True
        return self.results.pop(ticket)

    def _write(self, slot: int, start: int, tokens: list[int], blocks: list[int]) -> list[int]:
        """Put tokens at positions from ``start`` on; all tokens that the cache then holds for the slot."""
        state = self.slots[slot]
        assert start == state.length, f"position {start} follows {state.length - 1}"
        state.length += len(tokens)
        assert len(blocks) == -(-state.length // self.block_tokens), "blocks do not match the length"
        assert PADDING_BLOCK not in blocks
        for block in blocks:
            for touched in self.blocks_in_flight.values():
                assert touched.get(block, slot) == slot, (
                    "a block changed hands while a step in flight uses it"
                )
            self._touched[block] = slot
        places = [(blocks[p // self.block_tokens], p % self.block_tokens) for p in range(state.length)]
        self.memory.update(zip(places[start:], tokens, strict=True))
        return [self.memory[place] for place in places]

    def _sample(self, slot: int, history: list[int]) -> int:
        state = self.slots[slot]
        state.last_token = next_token(state.init.seed, history)
        state.awaits_decode = True
        return state.last_token
