"""Decode steps of one model in several ways: captured, compared and timed; for ``decode_step.py``."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from bench.kernels.decode_inputs import DEVICE, scattered_blocks
from bench.kernels.random_decoder import random_decoder
from bench.kernels.sustained import relative_error
from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs
from bullet_graph.graphs.halves import DEFAULT_HALVES, Halves, halves_for
from bullet_graph.graphs.key import GraphKey
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.models.config import ModelConfig
from bullet_graph.perf.energy import DeviceMonitor

VARIANTS: tuple[Halves, ...] = (
    DEFAULT_HALVES,
    *(halves for halves in get_args(Halves) if halves != DEFAULT_HALVES),
)
"""Ways to compute a step of more than one row: the product's, then what is held against it."""
MAX_ERROR = 5e-2
"""Relative, Frobenius, of logits against the product's: all round to bfloat16, not all as often, layer upon layer."""
MAX_OTHER_TOKENS = 0.25
"""Share of rows whose largest logit may be another: random weights leave the first two close at times."""
ROWS_WARM_UP_S, TURN_S = 0.3, 0.06


def inputs_for(rows: int, context: int, num_blocks: int) -> DecodeInputs:
    """A step of so many rows, each of which attends to ``context`` tokens in blocks scattered over the cache."""
    kv_lens = np.full(rows, context, dtype=np.int32)
    # Block 0 is padding's.
    indptr, blocks = scattered_blocks(kv_lens, num_blocks - 1, KV_BLOCK_TOKENS)
    blocks = blocks + np.int32(1)
    positions = kv_lens - np.int32(1)
    kv_slots = blocks[indptr[1:] - 1] * np.int32(KV_BLOCK_TOKENS) + positions % np.int32(KV_BLOCK_TOKENS)
    return DecodeInputs(np.arange(rows, dtype=np.int32), positions, kv_slots, indptr, blocks)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a variant's step compares with the product's.

    Attributes:
        relative_error: Frobenius, of the logits.
        same_tokens: share of the rows.
    """

    relative_error: float
    same_tokens: float

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, expected_logits: Tensor, expected: Tensor) -> "Agreement":
        """Compare a step's results, all of them of the same rows."""
        same = float((tokens == expected).float().mean())
        return cls(relative_error(logits, expected_logits.float()), same)

    def holds(self, rows: int) -> bool:
        """Whether it is within the tolerance, which lets one row of a few differ."""
        others = round((1 - self.same_tokens) * rows)
        return self.relative_error <= MAX_ERROR and others <= max(1, MAX_OTHER_TOKENS * rows)


def distinct(names: Sequence[Halves], rows: int) -> dict[Halves, Halves]:
    """Each variant's name to that of the first which launches the same for so many rows."""
    first: dict[Halves, Halves] = {}
    return {name: first.setdefault(halves_for(rows, name), name) for name in names}


class Bench:
    """One decoder, and for each variant its graphs."""

    def __init__(self, config: ModelConfig, names: Sequence[Halves], max_rows: int, context: int) -> None:
        self.num_blocks = 1 + max_rows * -(-context // KV_BLOCK_TOKENS)
        decoder = random_decoder(config, num_blocks=self.num_blocks, max_positions=context)
        self.state = SamplingState(max_rows + 1, DEVICE)
        self.state.last_token.random_(0, config.vocab_size)
        self.tokens = self.state.last_token.clone()
        self.context, self.stream = context, torch.cuda.Stream()
        self.variants = tuple(names)
        self.graphs = {
            name: DecodeGraphs(
                decoder,
                self.state,
                max_batch_size=max_rows,
                num_kv_blocks=self.num_blocks,
                padding_slot=max_rows,
                halves=name,
            )
            for name in names
        }

    def capture(self, name: Halves, rows: int) -> None:
        """Capture a step of one of the captured sizes; compiles on the variant's first."""
        self.graphs[name].capture_one(GraphKey(rows), self.stream)

    def step(self, name: Halves, inputs: DecodeInputs) -> Tensor:
        """Enqueue a step; returns its tokens."""
        return self.graphs[name].run(inputs)

    def results(self, name: Halves, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        """(logits, tokens) of a step from the same input tokens every time."""
        self.state.last_token.copy_(self.tokens)
        tokens = self.step(name, inputs).clone()
        return self.graphs[name].logits(len(tokens)).clone(), tokens

    def times_ms(self, name: Halves, inputs: DecodeInputs, seconds: float) -> list[float]:
        """Of single steps, back to back, for about so long."""
        start = time.perf_counter()
        self.step(name, inputs)
        torch.cuda.synchronize()
        count = max(3, int(seconds / (time.perf_counter() - start)))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.step(name, inputs)
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def case(self, rows: int, rounds: int) -> dict[str, Any]:
        """Capture, compare and time every variant for so many rows."""
        inputs = inputs_for(rows, self.context, self.num_blocks)
        same = distinct(self.variants, rows)
        names = [name for name, first in same.items() if name == first]
        for name in names:
            self.capture(name, rows)
        expected = self.results(names[0], inputs)
        agreements = {name: Agreement.of(*self.results(name, inputs), *expected) for name in names}
        self.times_ms(names[0], inputs, ROWS_WARM_UP_S)
        times: dict[Halves, list[float]] = {name: [] for name in names}
        with DeviceMonitor.for_gpu(str(torch.cuda.get_device_properties(0).uuid)) as monitor:
            for turn in range(rounds):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    times[name] += self.times_ms(name, inputs, TURN_S)
        return {
            "rows": rows,
            "variants": [
                {
                    "name": name,
                    "same_launches_as": None if first == name else first,
                    "step_ms": round(float(np.median(times[first])), 4),
                    "p10_ms": round(float(np.percentile(times[first], 10)), 4),
                    "p90_ms": round(float(np.percentile(times[first], 90)), 4),
                    "num_steps": len(times[first]),
                    **dataclasses.asdict(agreements[first]),
                    "agrees": agreements[first].holds(rows),
                }
                for name, first in same.items()
            ],
            "device": dataclasses.asdict(monitor.report),
        }
