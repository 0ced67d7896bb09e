"""A loop that follows plans step by step: no phase starves under any targets, and TPOT is held where it can be."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from planner_loads import LAYERS, planner

from bullet_graph.perf.performance import attention_pairs
from bullet_graph.planner.plan import ChunkLoad, Load, PromptLoad
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.slack import decode_load
from bullet_graph.planner.tuning import TUNING


@dataclass
class Row:
    """A sequence: a prompt, then tokens."""

    prompt_left: int
    arrival_s: float
    ttft_ms: float
    tokens_left: int
    first_token_s: float | None = None
    num_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)


@dataclass
class Device:
    """Follows plans step by step, one thing after the other; times are the model's."""

    planner: Planner
    tpot_ms: float
    rows: list[Row]
    now_s: float = 0.0
    chunk: list[tuple[Row, int]] = field(default_factory=list)
    layers_left: int = 0

    def load(self) -> Load:
        running = [r for r in self.rows if r.num_tokens and r.tokens_left]
        taken = {id(row): tokens for row, tokens in self.chunk}
        prompts = [
            PromptLoad(left, 0, r.arrival_s + r.ttft_ms / 1e3)
            for r in self.rows
            if (left := r.prompt_left - taken.get(id(r), 0)) > 0 and r.arrival_s <= self.now_s
        ]
        progress = [(r.first_token_s, r.num_tokens, r.tokens_left, self.tpot_ms) for r in running]
        batch = len(running), 1000 * len(running)
        decode = (
            decode_load(progress, *batch, self.now_s, solo_ms=self.planner.predictor.decode_ms)
            if running
            else None
        )
        tokens = sum(n for _, n in self.chunk)
        under_way = ChunkLoad(tokens, attention_pairs(tokens), self.layers_left, math.inf)
        return Load(
            self.now_s,
            decode,
            tuple(prompts[:64]),
            sum(p.tokens_left for p in prompts),
            under_way if self.chunk else None,
        )

    def tick(self) -> bool:
        """Whether anything was done."""
        load = self.load()
        plan = self.planner.plan(load)
        running = [r for r in self.rows if r.num_tokens and r.tokens_left]
        done = bool(plan.decode and running)
        lane_chunk = self.chunk
        if not self.chunk and plan.chunk_tokens:
            lane_chunk = self._take(plan.chunk_tokens)
            done = True
        if plan.decode_ms:
            self.now_s += plan.decode_ms / 1e3
        if plan.decode:
            for row in running:
                row.num_tokens += 1
                row.tokens_left -= 1
                row.token_times_s.append(self.now_s)
        if plan.prefill_lane == "decode":
            self._finish(lane_chunk)
        elif lane_chunk and plan.slice_layers:
            done = True
            if not self.chunk:
                self.chunk, self.layers_left = lane_chunk, LAYERS
            self.now_s += plan.slice_ms / 1e3
            self.layers_left -= plan.slice_layers
            if self.layers_left == 0:
                self._finish(self.chunk)
                self.chunk = []
        return done

    def _take(self, tokens: int) -> list[tuple[Row, int]]:
        taken = []
        for row in self.rows:
            if row.prompt_left and row.arrival_s <= self.now_s and tokens:
                taken.append((row, min(tokens, row.prompt_left)))
                tokens -= taken[-1][1]
        return taken

    def _finish(self, chunk: list[tuple[Row, int]]) -> None:
        for row, tokens in chunk:
            row.prompt_left -= tokens
            if row.prompt_left == 0:
                row.first_token_s, row.num_tokens = self.now_s, 1


@settings(deadline=None, max_examples=60)
@given(
    policy=st.sampled_from(("auto", "auto", "mixed", "split", "mixed:256", "serial")),
    tpot=st.one_of(st.just(math.inf), st.floats(0.5, 40.0)),
    ttft=st.one_of(st.just(math.inf), st.floats(1.0, 2000.0)),
    prompts=st.lists(st.integers(1, 6000), min_size=1, max_size=8),
    num_running=st.integers(0, 40),
    every_s=st.floats(0.0, 0.3),
)
def test_both_phases_go_on_under_any_targets(
    policy: str, tpot: float, ttft: float, prompts: list[int], num_running: int, every_s: float
) -> None:
    """Every prompt is prefilled in bounded time beside sequences that never end, and these get their tokens."""
    endless = [Row(0, 0.0, ttft, 10**6, 0.0, 1) for _ in range(num_running)]
    waiting = [Row(tokens, i * every_s, ttft, 5) for i, tokens in enumerate(prompts)]
    device = Device(planner(policy), tpot, endless + waiting)
    # Alone it would take about 25 µs a token; a tenth of that rate half of the time, a pause before, and the rest.
    limit_s = len(prompts) * every_s + 0.6e-3 * sum(prompts) + 2 * TUNING.pause_patience_s + 3.0
    while any(row.prompt_left for row in waiting):
        if not device.tick():
            device.now_s += 0.01
        assert device.now_s < limit_s
    if policy != "serial":
        for row in endless:
            times = [0.0, *row.token_times_s]
            assert max(b - a for a, b in pairwise(times)) < 0.45


@settings(deadline=None, max_examples=25)
@given(
    tpot=st.floats(9.0, 40.0),
    prompts=st.lists(st.integers(100, 6000), min_size=1, max_size=6),
    num_running=st.integers(1, 40),
)
def test_following_the_plans_holds_tpot_where_decode_alone_leaves_room(
    tpot: float, prompts: list[int], num_running: int
) -> None:
    """The simulated device is the model itself, and nothing runs at the same time: targets are held exactly."""
    running = [Row(0, 0.0, math.inf, 400, 0.0, 1) for _ in range(num_running)]
    device = Device(planner(), tpot, running + [Row(tokens, 0.0, math.inf, 1) for tokens in prompts])
    while device.tick() and any(row.tokens_left for row in running):
        pass
    for row in running:
        assert len(row.token_times_s) == 400
        assert row.token_times_s[-1] / 400 * 1e3 <= tpot
