"""The scheduler, driven by a device that checks every step: at random, then case by case."""

from typing import Any

import numpy as np
import pytest
from examples import few
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_loop import BLOCK_TOKENS, LANES_AT_ONCE, MAX_MODEL_LEN, Loop

from bullet_graph.engine.sequence import ScheduledStep, Sequence, Status
from bullet_graph.runtime.step import SlotInit, Step
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import Slo


class AnySchedule(RuleBasedStateMachine):
    """Adds, aborts, launches and retires in any order."""

    @initialize(
        policy=st.sampled_from(["serial", "mixed", LANES_AT_ONCE]),
        chunk_tokens=st.sampled_from([1, 2, 3, 5, 8, 16, 1000]),
        max_num_seqs=st.integers(1, 6),
        spare_blocks=st.integers(0, 8),
        depth=st.integers(1, 3),
        prompt_order=st.sampled_from(["arrival", "longest-output"]),
        window=st.sampled_from([None, None, None, 1, 5, 20]),
    )
    def build(self, **choices: object) -> None:
        self.loop = Loop(**choices)  # type: ignore[arg-type]

    @rule(
        start=st.sampled_from([7000, 8000]),
        length=st.integers(1, MAX_MODEL_LEN - 1),
        shared=st.integers(0, MAX_MODEL_LEN),
        own=st.integers(5000, 5002),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        cache_salt=st.sampled_from([None, None, "a"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add_one_that_shares(self, *, start: int, length: int, shared: int, own: int, **params: Any) -> None:
        """A prompt that others begin with as well, up to a token of its own."""
        text = list(range(start, start + MAX_MODEL_LEN))
        self.loop.add([*text[:shared], own, *text[shared:]][:length], **params)

    @rule(index=st.integers(0, 6), more=st.integers(1, 4))
    def go_on(self, index: int, more: int) -> None:
        """The next turn of a conversation: what was said, and some more."""
        if index < len(self.loop.sequences):
            said = self.loop.sequences[index]
            if said.num_known + more < MAX_MODEL_LEN:
                self.loop.add([*said.known_token_ids(0, said.num_known).tolist(), *[7] * more])

    @rule(
        # Short prompts with long outputs outgrow the pool, so that there is preemption.
        shapes=st.lists(
            st.tuples(
                st.integers(1, 10) | st.integers(1, MAX_MODEL_LEN - 1),
                st.integers(1, MAX_MODEL_LEN),
                st.none() | st.integers(1, 20),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def add(self, shapes: list[tuple[int, int, int | None]]) -> None:
        for prompt_tokens, max_tokens, end in shapes:
            self.loop.add(prompt_tokens, max_tokens, end)

    @rule(index=st.integers(0, 6))
    def abort(self, index: int) -> None:
        if index < len(self.loop.unfinished):
            self.loop.abort(self.loop.unfinished[index])

    @rule(count=st.integers(1, 12))
    def launch(self, count: int) -> None:
        for _ in range(count):
            if len(self.loop.in_flight) == self.loop.depth:
                self.loop.retire()
            self.loop.launch()

    @rule(lane=st.sampled_from([None, "decode", "prefill"]))
    def retire(self, lane: str | None) -> None:
        if self.loop.in_flight:
            self.loop.retire(lane)

    @invariant()
    def blocks_are_sound(self) -> None:
        if hasattr(self, "loop"):
            self.loop.check_blocks()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.drain()


AnySchedule.TestCase.settings = settings(few(20), stateful_step_count=30)
TestAnySchedule = AnySchedule.TestCase


def slots_of(scheduled: ScheduledStep | None) -> tuple[list[int], list[int]]:
    """(chunk lengths of the prefill, number of decode rows) of a step."""
    assert scheduled is not None
    prefill, decode = scheduled.step.prefill, scheduled.step.decode
    chunks = [] if prefill is None else np.diff(prefill.q_indptr).tolist()
    return chunks, 0 if decode is None else len(decode.slots)


def run_steps(loop: Loop) -> list[tuple[list[int], int]]:
    """Drain one step at a time; the shape of each."""
    shapes = []
    while (scheduled := loop.launch()) is not None:
        shapes.append(slots_of(scheduled))
        loop.retire()
    loop.drain()
    return shapes


@pytest.mark.parametrize(
    ("policy", "chunk_tokens", "requests", "steps"),
    [
        # Whole prompts before anything decodes.
        ("serial", 16, [(10, 3), (9, 2)], [([10, 6], 0), ([3], 0), ([], 2), ([], 1)]),
        # What decode rows leave of the budget.
        ("mixed", 8, [(3, 4), (20, 2)], [([3, 5], 0), ([7], 1), ([7], 1), ([1], 1), ([], 1)]),
    ],
)
def test_how_a_policy_fills_steps(
    policy: str, chunk_tokens: int, requests: list[tuple[int, int]], steps: list[tuple[list[int], int]]
) -> None:
    loop = Loop(policy, chunk_tokens=chunk_tokens)
    for prompt_tokens, max_tokens in requests:
        loop.add(prompt_tokens, max_tokens)
    assert run_steps(loop) == steps


def test_the_longest_outputs_go_first_where_that_is_the_order() -> None:
    loop = Loop(max_num_seqs=2, prompt_order="longest-output")
    sequences = [loop.add(prompt, max_tokens=output) for prompt, output in ((9, 3), (8, 9), (14, 5), (8, 9), (21, 4))]
    loop.drain()
    # Of equals, the first come; and a prompt under way is not left for a longer output.
    assert loop.first_admissions == [sequences[i] for i in (1, 3, 2, 4, 0)]


def test_a_prompt_with_a_deadline_goes_by_it_whatever_the_order() -> None:
    loop = Loop(prompt_order="longest-output")
    long = loop.add(8, max_tokens=9)
    assert loop.scheduler.queue.longest_first
    prompt = np.arange(8, dtype=np.int32)
    due = Sequence("due", 0, prompt, SamplingParams(max_tokens=1), 0, frozenset(), Slo(ttft_ms=1000.0))
    loop.scheduler.add(due)
    assert not loop.scheduler.queue.longest_first
    assert loop.scheduler.prompts(0.0, 1.0) == [due, long]


def test_without_a_free_slot_the_prompt_under_way_goes_on_and_no_other_begins() -> None:
    loop = Loop(max_num_seqs=1, chunk_tokens=4)
    under_way, _ = loop.add(8), loop.add(8)
    loop.launch()
    assert loop.scheduler.prompts(0.0, 1.0) == [under_way]
    loop.drain()


def test_no_step_is_launched_for_tokens_beyond_max_tokens_or_max_model_len() -> None:
    loop = Loop(depth=3)
    loop.add(4, max_tokens=2)
    loop.add(MAX_MODEL_LEN - 2, max_tokens=30)
    while any(len(s.prompt_token_ids) > s.num_cached for s in loop.sequences):
        loop.launch()
        if len(loop.in_flight) == 3:
            loop.retire()
    while loop.launch() is not None:
        pass
    assert sum(len(step.sampled) for _, step in loop.in_flight) <= 4
    loop.drain()
    assert [len(s.output_token_ids) for s in loop.sequences] == [2, 2]


@pytest.mark.parametrize("policy", ["serial", "mixed", LANES_AT_ONCE])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_to_come_is_preempted_and_loses_nothing(policy: str, depth: int) -> None:
    loop = Loop(policy, spare_blocks=2, depth=depth)
    for scored in (None, 0, None, 0):
        loop.add(8, max_tokens=MAX_MODEL_LEN - 8, prompt_logprobs=scored)
    num_preempted = 0
    while loop.unfinished:
        ran = [s for s in loop.sequences if s.status is Status.RUNNING]
        while len(loop.in_flight) < depth and loop.launch() is not None:
            still = [s for s in ran if s.status is Status.RUNNING]
            assert still == ran[: len(still)], "an older sequence made way for a younger one"
            num_preempted += len(ran) - len(still)
            ran = [s for s in loop.sequences if s.status is Status.RUNNING]
        # The oldest keeps running, so there is always progress.
        assert loop.unfinished[0].status is Status.RUNNING
        loop.retire()
    loop.drain()
    assert loop.scheduler.num_preemptions == num_preempted > 0


def test_a_preempted_sequence_goes_before_those_that_never_ran() -> None:
    loop = Loop("mixed", max_num_seqs=2, spare_blocks=0)
    first, second, third = (loop.add(14, max_tokens=20) for _ in range(3))
    while second.status is not Status.RUNNING or first.num_tokens < 20:
        loop.launch()
        loop.retire()
    while second.status is Status.RUNNING:
        loop.launch()
        loop.retire()
    assert third.status is Status.WAITING
    while third.status is Status.WAITING:
        assert second in loop.first_admissions
        loop.launch()
        loop.retire()
    assert second.status is not Status.WAITING
    loop.drain()


@pytest.mark.parametrize(
    ("chunk_tokens", "first_prompt", "second_prompt", "second_decodes"), [(1000, 20, 11, True), (2, 13, 20, False)]
)
def test_a_victim_with_steps_in_flight_is_held_until_it_can_go(
    chunk_tokens: int, first_prompt: int, second_prompt: int, second_decodes: bool
) -> None:
    # Ten blocks. The first needs one more while the second, which would have room to go on, is in flight.
    loop = Loop("mixed", chunk_tokens=chunk_tokens, spare_blocks=0, depth=2)
    first = loop.add(first_prompt, max_tokens=15)
    second = loop.add(second_prompt, max_tokens=15)
    while loop.launch() is not None:
        assert loop.scheduler.num_preemptions == 0
        if len(loop.in_flight) == 2:
            loop.retire()
    assert loop.pool.num_free == 0
    assert first.num_tokens % BLOCK_TOKENS == 1
    assert second.num_pending_steps == 1
    assert second.decoding is second_decodes
    loop.retire()
    scheduled = loop.launch()
    assert scheduled is not None
    assert first in scheduled.touched
    assert second.status is Status.WAITING
    assert loop.scheduler.num_preemptions == 1
    loop.drain()


def test_admission_keeps_a_block_back_for_each_running_sequence() -> None:
    # Ten blocks: the first takes five with its second token and keeps one back, so four are left to admit with.
    loop = Loop("mixed", spare_blocks=0, chunk_tokens=1000)
    loop.add(16, max_tokens=10)
    loop.launch()
    loop.retire()
    assert loop.pool.num_free == 6
    wide = loop.add(20, max_tokens=10)
    loop.launch()
    assert (loop.pool.num_free, wide.status) == (5, Status.WAITING)
    loop.drain()
    first, _ = (loop.add(20, max_tokens=1) for _ in range(2))
    assert loop.scheduler.prompts(0.0, 0.0) == [first], "five blocks are left for the second, of which one is kept back"


@pytest.mark.parametrize("policy", ["serial", "mixed", LANES_AT_ONCE])
@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_before_the_window_are_given_back(policy: str, depth: int) -> None:
    # 5 + 4 + 4 tokens: four blocks, where a sequence of full length has ten.
    loop = Loop(policy, window=5, chunk_tokens=4, spare_blocks=0, depth=depth)
    assert loop.pool.num_usable == 4
    sequence = loop.add(30, max_tokens=10)
    while not sequence.decoding or sequence.num_tokens < 36:
        while len(loop.in_flight) < depth and loop.launch() is not None:
            pass
        loop.retire()
    # The window, the tokens in flight, and a block that is begun at either end.
    assert loop.pool.num_used <= -(-(5 + depth) // BLOCK_TOKENS) + 1
    loop.drain()
    assert (loop.scheduler.num_preemptions, loop.pool.peak_used) == (0, 4)


def first_step(params: SamplingParams, stop_token_ids: frozenset[int]) -> Step:
    """The step that admits a prompt of 6 tokens."""
    loop = Loop()
    loop.scheduler.add(Sequence("a", 0, np.arange(6, dtype=np.int32), params, 77, stop_token_ids))
    scheduled = loop.schedule()
    assert scheduled is not None
    return scheduled.step


def test_settings_reach_the_slot() -> None:
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, max_tokens=5, min_tokens=2, logprobs=3)
    step = first_step(params, frozenset({9, 4}))
    # Output token i has position 6 + i: the first two may be neither 4 nor 9.
    masked = {"masked_token_ids": (4, 9), "masked_until": 8}
    assert step.admitted == (SlotInit(slot=0, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=77, **masked),)
    assert step.num_logprobs == 3
    step = first_step(SamplingParams(top_k=-1), frozenset({9}))
    assert (step.admitted[0].top_k, step.admitted[0].masked_token_ids, step.num_logprobs) == (0, (), None)


def test_settings_fit_the_device_s_32_bit_numbers() -> None:
    params = SamplingParams(temperature=1e-9, top_k=2**40, top_p=1e-60, max_tokens=2**40, min_tokens=2**40)
    (init,) = first_step(params, frozenset({9})).admitted
    assert max(init.top_k, init.masked_until) < 2**31
    assert init.masked_until >= MAX_MODEL_LEN
    assert np.float32(init.top_p) > 0
    # Dividing by it would overflow: the most probable token is what it means.
    assert init.temperature == 0


def test_a_prompt_without_room_before_its_window_slides_is_not_offered() -> None:
    loop = Loop("serial", chunk_tokens=16, window=4, depth=3)
    sequence = loop.add(38, max_tokens=1)
    assert [loop.launch().step.prefill_rows for _ in range(2)] == [16, 8]  # type: ignore[union-attr]
    assert loop.scheduler.prompts(0.0, 0.0) == []
    loop.retire()
    assert loop.scheduler.prompts(0.0, 0.0) == [sequence]
    loop.drain()
