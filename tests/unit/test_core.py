"""The loop over two lanes, whatever the planner, the load and the room there is."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest
from core_loop import MODEL, NUM_LAYERS, Arrival, CheckedExecutor, CoreLoop, Launch, arrivals
from examples import few
from hypothesis import given
from hypothesis import strategies as st
from planner_loads import planner as planner_of

from bullet_graph.config import Policy
from bullet_graph.engine.core import fill
from bullet_graph.engine.in_flight import other_lane
from bullet_graph.partition.masks import WHOLE_GPU, partition_of
from bullet_graph.planner.options import Corrections, ForwardKind
from bullet_graph.planner.plan import Load, Plan, PolicyName
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.tuning import TUNING
from bullet_graph.runtime.step import Placement, Step, StepLogprobs, StepResult
from bullet_graph.slo import NO_TARGETS, Slo

TARGETS = (
    NO_TARGETS,
    Slo(ttft_ms=500, tpot_ms=15),
    Slo(ttft_ms=30),
    Slo(tpot_ms=9),
    Slo(ttft_ms_per_token=0.1, tpot_ms=6),
    Slo(ttft_ms=0.01, tpot_ms=0.01),
)

requests = arrivals(TARGETS, max_output=50)


class _Wayward(Planner):
    """Decides at random among all that a plan may be, so that the loop cannot rely on a planner's habits."""

    def __init__(self, choices: list[int]) -> None:
        super().__init__(Policy("auto"), max_chunk_tokens=8192, decode_sms=MODEL.decode_sms, model=MODEL)
        self._choices = choices
        self._next = 0

    def plan(self, load: Load) -> Plan:
        self._next += 1
        choice = self._choices[self._next % len(self._choices)]
        prefilling = bool(load.prompts or load.chunk)
        tokens = (16, 48, 300, 5000)[choice % 4] if load.prompts and load.chunk is None else 0
        kinds = ["solo", "serial", "mixed", "split"]
        policy = kinds[choice % 4] if prefilling and load.decode is not None else "solo"
        if load.chunk is not None or policy == "split" or (prefilling and choice % 3 == 0):
            split = policy == "split"
            sms = MODEL.decode_sms[choice % len(MODEL.decode_sms)] if split else None
            return Plan(
                "split" if split else "solo",
                decode=load.decode is not None,
                prefill_lane="prefill",
                chunk_tokens=tokens,
                slice_layers=(1, 5, 20, NUM_LAYERS)[choice % 4],
                partition=partition_of(sms, num_sms=MODEL.num_sms),
            )
        return Plan(
            policy,  # type: ignore[arg-type]
            decode=load.decode is not None and (not prefilling or policy != "serial"),
            chunk_tokens=tokens,
        )


# ---- whatever comes ----


@few(20)
@given(
    requests=requests,
    policy=st.sampled_from(("serial", "serial:100", "mixed", "mixed:64", "split", "split:48", "auto")),
    spare_blocks=st.sampled_from([0, 1, 7, 40, 1000]),
    max_num_seqs=st.sampled_from([1, 2, 16]),
    chunk_tokens=st.sampled_from([48, 500, 8192]),
    host_overhead_ms=st.sampled_from([0.0, 0.1, 9.0]),
    depth=st.sampled_from([1, 2, 3]),
    row_step=st.sampled_from([1, 16, 100]),
    num_texts=st.sampled_from([None, 1, 3]),
)
def test_every_request_ends_with_its_own_tokens(
    requests: list[Arrival],
    policy: str,
    spare_blocks: int,
    max_num_seqs: int,
    chunk_tokens: int,
    host_overhead_ms: float,
    depth: int,
    row_step: int,
    num_texts: int | None,
) -> None:
    """No starvation, no block in two hands, no launch that the lanes do not allow (the executor checks each)."""
    loop = CoreLoop(
        planner_of(policy, max_chunk_tokens=chunk_tokens),
        num_kv_blocks=1 + 64 + spare_blocks,
        max_num_seqs=max_num_seqs,
        executor=CheckedExecutor(host_overhead_ms, depth, row_step=row_step),
        num_texts=num_texts,
    )
    loop.run(arrivals=requests)
    most = max(chunk_tokens, max_num_seqs + TUNING.row_step)
    assert max((launch.rows for launch in loop.executor.launches if launch.step.prefill is not None), default=0) <= most
    assert {output.outputs[0].finish_reason for output in loop.outputs.values()} == {"length"}
    check_chunks(loop)


@few(25)
@given(
    requests=requests,
    choices=st.lists(st.integers(0, 59), min_size=1, max_size=40) | st.sampled_from(["split", "auto"]),
    spare_blocks=st.sampled_from([0, 3, 40]),
    aborts=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 11)), max_size=12),
    depth=st.sampled_from([1, 2]),
    num_texts=st.sampled_from([None, 1, 3]),
)
def test_neither_planners_nor_aborts_at_any_moment_break_the_books(
    requests: list[Arrival],
    choices: list[int] | str,
    spare_blocks: int,
    aborts: list[tuple[int, int]],
    depth: int,
    num_texts: int | None,
) -> None:
    executor = CheckedExecutor(max_in_flight=depth)
    planner = choices if isinstance(choices, str) else _Wayward(choices)
    loop = CoreLoop(planner, num_kv_blocks=1 + 64 + spare_blocks, executor=executor, num_texts=num_texts)
    for _, prompt_tokens, output_tokens, slo in requests:
        loop.add(prompt_tokens, output_tokens, slo=slo)
    for count in range(81):
        for name in (f"request-{index}" for at, index in aborts if at == count):
            loop.abort(name)
            loop.check_books()
        if loop.core.has_unfinished_requests():
            loop.step()
    loop.run()
    check_chunks(loop)


def check_chunks(loop: CoreLoop) -> None:
    """The slices of each chunk cover every layer once, in order; what was predicted to be a slice is one."""
    layers: Counter[int] = Counter()
    for launch in loop.executor.launches:
        placement = launch.placement
        assert layers[id(launch.step)] == placement.first_layer
        layers[id(launch.step)] = NUM_LAYERS if placement.last_layer is None else placement.last_layer
        assert placement.first_layer < layers[id(launch.step)]
    assert set(layers.values()) <= {NUM_LAYERS}


# ---- what each policy does with two lanes ----


def both_phases(policy: str, slo: Slo = NO_TARGETS, executor: CheckedExecutor | None = None) -> CoreLoop:
    """Sequences that decode, then long prompts beside them."""
    loop = CoreLoop(policy, max_model_len=4096, num_kv_blocks=4000, executor=executor)
    loop.run(arrivals=[(0.0, 50, 150, slo)] * 8 + [(0.1, 3000, 5, slo), (0.2, 3500, 5, slo), (0.3, 2000, 5, slo)])
    return loop


def test_a_split_runs_both_lanes_at_once_and_gives_the_whole_gpu_back() -> None:
    loop = both_phases("split:48")
    launches = loop.executor.launches
    beside = [launch for launch in launches if launch.placement.partition.decode_tpcs == 24]
    assert {launch.placement.lane for launch in beside} == {"decode", "prefill"}
    assert sum(launch.placement.lane == "decode" for launch in beside) > 10
    assert not all(launch.placement.takes_turns for launch in beside)
    steps = [launch for launch in launches if launch.step.prefill is None]
    assert not any(launch.placement.takes_turns for launch in steps), "decode never waits for a slice"
    assert launches[-1].placement.partition == WHOLE_GPU
    assert set(loop.core.stats().policy_seconds) == {"split", "solo"}


@pytest.mark.parametrize("policy", ["serial", "mixed"])
def test_other_policies_use_the_decode_lane_alone(policy: str) -> None:
    launches = both_phases(policy).executor.launches
    assert {launch.placement.lane for launch in launches} == {"decode"}
    both = any(launch.step.prefill is not None and launch.step.decode is not None for launch in launches)
    assert both == (policy == "mixed")


@pytest.mark.parametrize("policy", ["mixed:100", "auto"])
def test_prompt_rows_take_the_place_of_padding(policy: str) -> None:
    def mixed(row_step: int) -> tuple[CoreLoop, list[int]]:
        loop = both_phases(policy, Slo(tpot_ms=9.0), CheckedExecutor(row_step=row_step))
        steps = [launch for launch in loop.executor.launches if launch.step.prefill and launch.step.decode]
        return loop, [launch.rows for launch in steps]

    (_, plain), (loop, padded) = mixed(1), mixed(64)
    assert len(padded) <= len(plain)
    if policy == "auto":
        # All but where prompts end.
        assert sum(rows % 64 == 0 for rows in padded) > 0.6 * len(padded)
        assert sum(rows % 64 == 0 for rows in plain) < 0.3 * len(plain)
        # What was predicted for fewer rows is a prediction still.
        assert ("mixed", "step", 128) in loop.core.stats().corrections
    else:
        # Never more than the policy allows.
        assert max(padded) == max(plain) == 100


def test_a_long_prompt_in_a_split_holds_nothing_up_and_decodes_as_soon_as_its_last_slice_is_done() -> None:
    loop = both_phases("split:48")
    step_ms = MODEL.split(48, 8, 8 * 200, 2048, 2048**2 / 2).decode_ms
    gaps = [gap for i in range(8) for gap in loop.outputs[f"request-{i}"].metrics.itl_ms]
    # Each change of the split may wait for the end of one slice.
    assert sum(gap > 2 * step_ms for gap in gaps) <= 8 * 6
    assert sorted(gaps)[int(0.9 * len(gaps))] < 1.5 * step_ms
    for i in (8, 9, 10):
        assert loop.outputs[f"request-{i}"].metrics.itl_ms[0] < 60


# ---- what the planner learns ----


class _Biased(CheckedExecutor):
    """Reports twice the time of slow launches; ``is_slow`` also learns if the other lane was busy at begin and end."""

    def __init__(self, is_slow: Callable[[Launch, bool], bool], max_in_flight: int = 2) -> None:
        super().__init__(max_in_flight=max_in_flight)
        self._is_slow = is_slow
        self._began_beside: set[int] = set()

    def launch(self, step: Step, placement: Placement) -> int:
        ticket = super().launch(step, placement)
        if self.in_flight[other_lane(placement.lane)]:
            self._began_beside.add(ticket)
        return ticket

    def wait(self, ticket: int) -> StepResult:
        launch = next(launch for launch in self.launches if launch.ticket == ticket)
        result = super().wait(ticket)
        beside = ticket in self._began_beside and bool(self.in_flight[other_lane(launch.placement.lane)])
        return replace(result, device_ms=2 * result.device_ms) if self._is_slow(launch, beside) else result


@pytest.mark.parametrize("slow", ["step", "slice"])
def test_slow_launches_correct_the_predictions_of_their_own_kind(slow: ForwardKind) -> None:
    executor = _Biased(lambda launch, _: (launch.step.decode is None) == (slow == "slice"))
    corrections = both_phases("split:48", executor=executor).core.stats().corrections
    step, part = corrections["split", "step", 64], corrections["split", "slice", 2048]
    assert (step if slow == "step" else part) > 1.2
    assert (part if slow == "step" else step) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_split_learns_nothing_from_a_step_that_ran_alone_a_while(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    ratios: dict[tuple[PolicyName, ForwardKind], list[float]] = defaultdict(list)

    def observe(_: Corrections, policy: PolicyName, kind: ForwardKind, *measured: float) -> None:
        ratios[policy, kind].append(measured[2] / measured[1])

    monkeypatch.setattr(Corrections, "observe", observe)
    executor = _Biased(lambda x, beside: x.step.prefill is None and not beside, depth)
    both_phases("split:48", executor=executor)
    assert sum(launch.placement.partition != WHOLE_GPU for launch in executor.launches) > len(ratios["split", "step"])
    assert ratios["split", "step"]
    assert max(ratios["split", "step"]) < 1.5
    assert min(ratios["solo", "step"]) > 1.5, "alone is what these steps always are"


class _Scripted(Planner):
    """Follows a script, then decodes; notes what it is told of predictions."""

    def __init__(self, *script: Plan) -> None:
        super().__init__(Policy("mixed"), max_chunk_tokens=8192, decode_sms=(), model=None)
        self.script = list(script)
        self.observed: list[tuple[PolicyName, ForwardKind, int, float]] = []
        self.corrections.observe = self.note  # type: ignore[method-assign]

    def plan(self, load: Load) -> Plan:
        del load
        return self.script.pop(0) if self.script else Plan("solo", decode=True)

    def note(self, policy: PolicyName, kind: ForwardKind, rows: int, predicted_ms: float, measured_ms: float) -> None:
        assert measured_ms > 0
        self.observed.append((policy, kind, rows, predicted_ms))


@pytest.mark.parametrize(("prompt_tokens", "is_whole"), [(64, True), (63, False)])
def test_a_chunk_cut_short_says_nothing_of_the_prediction(prompt_tokens: int, is_whole: bool) -> None:
    script = (Plan("mixed", decode=True, chunk_tokens=64, decode_ms=7.0), Plan("mixed", decode=True, decode_ms=3.0))
    planner = _Scripted(*script)
    loop = CoreLoop(planner, executor=CheckedExecutor(max_in_flight=1))
    loop.add(prompt_tokens, 5)
    loop.run()
    assert planner.observed == [("mixed", "slice", 64, 7.0)] * is_whole + [("mixed", "step", 1, 3.0)]


@pytest.mark.parametrize("lone_rows", [1, 2])
def test_decode_alone_is_unhurried_until_a_prompt_comes(lone_rows: int) -> None:
    slo = Slo(ttft_ms=500, tpot_ms=100)

    def launch_times(*requests: Arrival) -> list[float]:
        executor, planner = CheckedExecutor(), planner_of(lone_rows=lone_rows)
        CoreLoop(planner, executor=executor).run(arrivals=requests)
        assert {one.placement.least_rows for one in executor.launches if one.step.prefill is None} == {lone_rows}
        # Of the corrections, none has to learn of the padding.
        assert planner.corrections["solo", "step", 64] == pytest.approx(1.0, abs=0.02)
        return [launch.time_s for launch in executor.launches]

    first: Arrival = (0.0, 10, 20, slo)
    times = launch_times(first)
    step_s = MODEL.decode(1, 20).ms / 1e3
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[2:] == pytest.approx([TUNING.unhurried_ratio * step_s] * len(gaps[2:]), rel=0.02)
    assert len(gaps) >= 18
    in_a_pause_s = times[10] - 0.1 * step_s
    both = launch_times(first, (in_a_pause_s, 100, 1, slo))
    assert both[:10] == times[:10]
    assert both[10] == pytest.approx(in_a_pause_s, abs=1e-4)


def test_a_planner_that_launches_nothing_is_an_error_not_an_endless_loop() -> None:
    loop = CoreLoop(_Scripted(*[Plan("solo", decode=False)] * 2))
    assert loop.core.step() == []
    loop.add(10, 2)
    with pytest.raises(RuntimeError, match="1 requests are under way, but the planner launches nothing"):
        loop.step()


# ---- aborts between two slices ----


def test_an_abort_between_slices_with_nothing_in_flight() -> None:
    executor = CheckedExecutor(max_in_flight=1)
    loop = CoreLoop(_Wayward([18]), max_model_len=4096, num_kv_blocks=600, executor=executor)
    loop.add(1000, 5)
    loop.step()
    assert executor.launches[-1].placement.last_layer is not None
    loop.abort("request-0")
    assert not loop.core.in_flight
    assert loop.core.has_unfinished_requests(), "there are layers to run before the blocks are free"
    loop.add(900, 5)
    loop.run(max_steps=100)


@pytest.mark.parametrize("tpot_ms", [4.4, 4.5])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_pause_where_decode_waits_for_the_blocks_of_the_chunk_under_way(tpot_ms: float, depth: int) -> None:
    """No prompt of the chunk can be preempted between its slices, so it must go on whatever the target says."""
    loop = CoreLoop("auto", num_kv_blocks=1 + 64, executor=CheckedExecutor(max_in_flight=depth))
    loop.add(30, 600, slo=Slo(tpot_ms=tpot_ms))
    while len(loop.sequences["request-0"].output_token_ids) < 5:
        loop.step()
    loop.add(900, 5)
    loop.run(max_steps=3000)


def test_a_sequence_held_back_for_its_steps_in_flight_goes_on_when_they_are_over() -> None:
    """It was to lose its blocks for another's next token; that one's end made room before it could."""
    for prompt_tokens in range(860, 890, 2):
        loop = CoreLoop(planner_of("serial", max_chunk_tokens=48), num_kv_blocks=66, max_num_seqs=2)
        loop.run(arrivals=[(0.0, 14, 100, NO_TARGETS), (0.3, prompt_tokens, 35, NO_TARGETS)], max_steps=2000)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lanes_are_filled_and_waited_for_no_longer_than_asked(depth: int) -> None:
    loop = CoreLoop("auto", executor=CheckedExecutor(max_in_flight=depth))
    loop.add(1000, 3)
    loop.step(0.001)
    assert len(loop.core.in_flight["decode"]) == depth
    assert loop.executor.now() == pytest.approx(0.001)
    assert not loop.outputs
    loop.run()


def test_a_chunk_is_due_when_the_first_of_its_prompts_is() -> None:
    # Slices of 20 layers, chunks of 300 rows.
    loop = CoreLoop(_Wayward([18]), executor=CheckedExecutor(max_in_flight=1))
    loop.add(100, 5, slo=Slo(ttft_ms=900))
    loop.add(100, 5, slo=Slo(ttft_ms=500))
    loop.add(100, 5, slo=Slo(ttft_ms=700))
    loop.step(0.0)
    chunk = loop.core._load().chunk
    assert chunk is not None
    assert (chunk.tokens, chunk.deadline_s) == (300, 0.5)
    loop.run()


@pytest.mark.parametrize(
    ("chunk_tokens", "decode_rows", "filled"),
    # Up to the next multiple of 64, not beyond 256, and never less than was planned.
    [(0, 10, 0), (54, 10, 54), (55, 10, 118), (200, 60, 200), (250, 60, 250), (1, 0, 64), (190, 60, 196)],
)
def test_a_chunk_is_filled_up_to_the_padding(chunk_tokens: int, decode_rows: int, filled: int) -> None:
    assert fill(chunk_tokens, decode_rows, 256, lambda rows: -(-rows // 64) * 64) == filled


@pytest.mark.parametrize(("policy", "chunk_tokens", "tpot_ms"), [("auto", 64, 4.4), ("auto", 64, 4.6), ("split", 6, 9)])
def test_the_last_sequence_that_decodes_loses_its_blocks(policy: str, chunk_tokens: int, tpot_ms: float) -> None:
    """A started prompt holds all other blocks: no pause may wait for decode then, no lane have a chunk of nothing."""
    loop = CoreLoop(planner_of(policy, max_chunk_tokens=chunk_tokens), num_kv_blocks=1 + 64)
    loop.run(arrivals=[(0.0, 900, 5, NO_TARGETS), (0.001, 20, 400, Slo(ttft_ms=50, tpot_ms=tpot_ms))], max_steps=5000)
    assert loop.core.stats().num_preemptions == 1


def test_prompts_in_sight_count_among_the_longest_outputs_and_all_for_their_tokens() -> None:
    loop = CoreLoop("auto")
    loop.core.scheduler.queue._prompt_order = "longest-output"
    loop.add(8, 50)
    loop.step()
    loop.add(8, 300)
    assert loop.core._load().steps_left == 300
    for _ in range(80):  # more than are in sight
        loop.add(8, 5)
    assert loop.core._load().queued_tokens == 81 * 8


def test_scores_go_to_their_request_though_one_before_it_was_aborted() -> None:
    loop = CoreLoop("serial")
    first, _ = (loop.add(4, 1, scored=0) for _ in range(2))
    wait, scores = loop.executor.wait, StepLogprobs(np.arange(6.0), *[np.empty((6, 0), int)] * 2)
    loop.executor.wait = lambda ticket: replace(wait(ticket), prompt_logprobs=scores)  # type: ignore[method-assign]
    loop.core._launch()
    loop.core.abort(first)
    (output,) = loop.core.step()
    assert [one and one.logprob for one in output.prompt_logprobs or ()] == [None, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("scored", [None, 0])
def test_a_chunk_that_is_scored_says_nothing_of_the_prediction(scored: int | None) -> None:
    planner = _Scripted(Plan("solo", decode=False, chunk_tokens=64, decode_ms=7.0))
    loop = CoreLoop(planner)
    loop.add(64, 2, scored=scored)
    loop.run()
    assert planner.observed == ([("solo", "slice", 64, 7.0)] if scored is None else [])


@pytest.mark.parametrize("output_tokens", [1, 2])
def test_a_prompt_whose_only_token_is_its_first_will_not_decode(output_tokens: int) -> None:
    loop = CoreLoop("split:48")
    loop.add(8, 500)
    loop.step()
    name = loop.add(1000, output_tokens)
    while not any(launch.ends_chunk for launch in loop.core.in_flight["prefill"]):
        loop.step()
    assert list(loop.core._decoding_next()) == [loop.sequences[name]] * (output_tokens - 1)


def test_a_predicted_ttft_counts_the_layers_of_the_chunk_that_are_not_launched() -> None:
    loop = CoreLoop("split:48")
    loop.add(8, 500)
    loop.step()
    loop.add(1000, 2)
    while loop.core._chunk is None:
        loop.step()
    scheduled, chunk = loop.core._chunk
    predicted_ms = loop.core.predicted_ttft_ms(1, NO_TARGETS)
    loop.core._chunk = scheduled, replace(chunk, layers_left=0)
    left_ms = chunk.tokens * loop.core.planner.prefill_ms_per_token * chunk.layers_left / NUM_LAYERS
    assert 0 < chunk.layers_left < NUM_LAYERS
    assert predicted_ms - loop.core.predicted_ttft_ms(1, NO_TARGETS) == pytest.approx(left_ms)
    loop.core.in_flight.due_s = lambda _, now_s: now_s + 9.0  # type: ignore[method-assign]
    assert loop.core.predicted_ttft_ms(1, NO_TARGETS) > 9000


@pytest.mark.parametrize("structured", [True, False])
def test_a_step_that_a_structured_output_misses_says_nothing_of_the_prediction(structured: bool) -> None:
    masks = Mock(ended=False, bitmasks=lambda found: np.zeros((len(found), 1), np.int32))
    planner = _Scripted(Plan("mixed", decode=True, chunk_tokens=64), Plan("solo", decode=True, decode_ms=3.0))
    loop = CoreLoop(planner)
    for matcher in (None, masks if structured else None):
        loop.add(32, 3, matcher=matcher)
    loop.run()
    assert planner.observed == ([] if structured else [("solo", "step", 2, 3.0)])
