"""The policy that ``auto`` chooses, and properties of every plan."""

import dataclasses
import math
from typing import Any

import pytest
from fakes.perf_tables import LLAMA_8B, h200_table
from hypothesis import example, given
from hypothesis import strategies as st
from planner_loads import LAYERS, MAX_CHUNK, POLICIES, chosen, chunk_of, correct, decoding, load_of, model, planner

from bullet_graph.config import Policy
from bullet_graph.partition.masks import WHOLE_GPU, partition_of
from bullet_graph.perf.performance import Prediction, attention_pairs
from bullet_graph.perf.predict import TableModel
from bullet_graph.planner.plan import DecodeLoad, Load, Option, Plan, PromptLoad
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.tuning import TUNING


class SmallModel(TableModel):
    """Prompts take a tenth of the time of an 8B model's, decode and mixed steps all of it."""

    def prefill(self, tokens: int, pairs: float, sms: int | None = None) -> Prediction:
        whole = super().prefill(tokens, pairs, sms)
        return dataclasses.replace(whole, ms=whole.ms / 10)


class ExpertModel(TableModel):
    """Any prompt rows add 8 ms to a mixed step beside what an 8B model's add, as those that touch all experts do."""

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        mixed = super().mixed(tokens, pairs, batch_size, kv_tokens)
        return dataclasses.replace(mixed, ms=mixed.ms + 8 * (tokens > 0))


def auto_over(device: Any, *decode_sms: int, policy: str = "auto") -> Planner:
    return Planner(Policy.parse(policy), max_chunk_tokens=MAX_CHUNK, decode_sms=decode_sms, model=device)


class TestAuto:
    def test_no_target_takes_the_highest_throughput_with_both_phases(self) -> None:
        plan = planner().plan(load_of(decoding(64), 8192))
        assert (plan.bound, plan.decode, plan.chunk_tokens > 0) == ("throughput", True, True)
        best = max(o.throughput * (0.95 if o.slice_layers else 1) for o in plan.options)
        assert chosen(plan).throughput == pytest.approx(best)

    def test_a_few_rows_do_not_hold_up_the_many_that_wait(self) -> None:
        """With 4 rows decoding and 60 prompts waiting, what counts is prefill."""
        plan = planner().plan(load_of(decoding(4), *[1000] * 60))
        assert chosen(plan).prefill_tokens_per_s >= 0.95 * max(o.prefill_tokens_per_s for o in plan.options)

    @pytest.mark.parametrize(
        ("decode_rows", "queued", "steps_left", "rows"),
        [
            # 64 rows and a hundredth of the prompts, rounded down to a multiple; never fewer than are worth it, nor
            # more than a forward may hold or are left. Beside many decode rows, prompts keep their share.
            (64, 120_000, 100, 1024),
            (64, 199_000, 100, 2048),
            (64, 120_000, 1000, 1024),
            (64, 1_200_000, 100, MAX_CHUNK),
            (64, 500, 3, 564),
            (1000, 32_000, 10_000, 2048),
        ],
    )
    def test_prompts_last_as_long_as_the_longest_output(
        self, decode_rows: int, queued: int, steps_left: int, rows: int
    ) -> None:
        load = load_of(decoding(decode_rows), *[500] * min(queued // 500, 64))
        plan = planner().plan(dataclasses.replace(load, queued_tokens=queued, steps_left=steps_left))
        assert (plan.policy, plan.decode, plan.chunk_tokens) == ("mixed", True, rows - decode_rows)
        assert chosen(plan).chunk_tokens == rows - decode_rows

    def test_under_a_target_no_forward_waits_for_the_longest_output(self) -> None:
        load = load_of(decoding(64, tpot=15.0), 1000, 1000, ttft_ms=500)
        assert planner().plan(dataclasses.replace(load, steps_left=10)) == planner().plan(load)

    def test_a_middling_target_takes_a_mixed_chunk_of_a_few_hundred(self) -> None:
        plan = planner().plan(load_of(decoding(64, tpot=15.0), 1000, 1000, ttft_ms=500))
        assert (plan.policy, plan.bound) == ("mixed", "tpot")
        assert 128 <= plan.chunk_tokens <= 1024

    def test_where_no_mixed_step_holds_the_target_another_policy_must(self) -> None:
        slow = planner()
        correct(slow, "mixed", steps=2.0)
        plan = slow.plan(load_of(decoding(64, tpot=12.0), 2000))
        assert not next(o for o in plan.options if o.policy == "mixed").holds_tpot
        assert plan.policy == "split"
        assert chosen(plan).holds_tpot

    def test_no_lane_of_its_own_for_prompts_that_take_longer_to_launch_than_to_run(self) -> None:
        small = auto_over(SmallModel(h200_table(), LLAMA_8B), 48, 64)
        # Without a target, with one that mixed steps hold, with one that they do not, and with time to spare.
        for decode in (decoding(64), *(decoding(64, tpot=t) for t in (15.0, 7.7)), decoding(64, tpot=8.0, slack=60.0)):
            plan = small.plan(load_of(decode, 1500, ttft_ms=60.0))
            assert {o.policy for o in plan.options} <= {"solo", "mixed"}
            assert plan.prefill_lane == "decode"
        # A chunk that is on the lane ends there.
        ending = small.plan(load_of(decoding(64), chunk=chunk_of(2048, 3)))
        assert (ending.prefill_lane, ending.slice_layers > 0) == ("prefill", True)

    def test_targets_that_nothing_holds_count_for_nothing(self) -> None:
        plan = planner().plan(load_of(decoding(64, tpot=4.0), 8192))
        free = planner().plan(load_of(decoding(64), 8192))
        hurried = planner().plan(load_of(decoding(64, tpot=4.0), 8192, ttft_ms=280.0))
        assert plan.bound == hurried.bound == "throughput"
        assert dataclasses.replace(plan, options=free.options, decode_ms=free.decode_ms) == free
        assert not any(o.holds_tpot for o in plan.options)

    def test_prefill_pauses_while_decode_catches_up(self) -> None:
        auto = planner()
        plan = auto.plan(load_of(decoding(64, tpot=15.0, budget=4.0), 4000))
        assert (plan.policy, plan.decode, plan.chunk_tokens, plan.bound) == ("solo", True, 0, "tpot")
        with_chunk = auto.plan(load_of(decoding(64, tpot=15.0, budget=4.0), chunk=chunk_of(2048, 9)))
        assert (with_chunk.prefill_lane, with_chunk.slice_layers, with_chunk.chunk_tokens) == ("prefill", 0, 0)

    def test_a_pause_ends_and_the_prompts_are_not_forgotten_by_a_gap(self) -> None:
        auto = planner()
        late = decoding(64, tpot=15.0, budget=4.0)
        assert not any(auto.plan(load_of(late, 4000, now_s=50.0 + i * 0.1)).chunk_tokens for i in range(10))
        auto.plan(load_of(late, now_s=51.0))  # nothing waits: the count begins anew
        paused = [auto.plan(load_of(late, 4000, now_s=51.1 + i * 0.1)).chunk_tokens == 0 for i in range(30)]
        assert all(paused[:10])
        assert paused[12:].count(False) >= 8

    def test_slices_are_no_pause_and_a_chunk_under_way_is_weighed_whole(self) -> None:
        auto, chunk = planner(), chunk_of(4096, 9)
        for i in range(20):
            plan = auto.plan(load_of(decoding(64), chunk=chunk, now_s=50.0 + i * 0.1))
            assert {option.chunk_tokens for option in plan.options if option.slice_layers} == {4096}
        plan = auto.plan(load_of(decoding(64, tpot=15.0, budget=4.0), chunk=chunk, now_s=52.0))
        assert (plan.slice_layers, plan.bound) == (0, "tpot")

    def test_after_a_pause_prefill_goes_on_with_the_shortest_interval(self) -> None:
        auto, late = planner(), decoding(256, tpot=17.0, budget=4.0)
        plans = [auto.plan(load_of(late, 8000, now_s=50.0 + i * 0.1)) for i in range(11)]
        assert not any(plan.chunk_tokens for plan in plans[:10])
        resumed = chosen(plans[10])
        assert resumed.chunk_tokens
        assert resumed.interval_ms == min(o.interval_ms for o in plans[10].options if o.chunk_tokens)

    def test_time_with_prefill_earns_the_next_pause(self) -> None:
        auto = planner()
        late, calm = decoding(64, tpot=15.0, budget=4.0), decoding(64, tpot=15.0)
        paused = [auto.plan(load_of(late, 4000, now_s=50.0 + i * 0.1)).chunk_tokens == 0 for i in range(11)]
        assert paused == [True] * 10 + [False]
        for i in range(5):  # half a second with prefill ...
            assert auto.plan(load_of(calm, 4000, now_s=51.1 + i * 0.1)).chunk_tokens
        # ... allows half a second without.
        paused = [auto.plan(load_of(late, 4000, now_s=51.6 + i * 0.1)).chunk_tokens == 0 for i in range(8)]
        assert 4 <= paused.index(False) <= 6

    def test_a_lead_is_not_spent_on_longer_intervals(self) -> None:
        plan = planner().plan(load_of(decoding(64, tpot=15.0, budget=200.0), 8000))
        assert 15.0 < next(o for o in plan.options if o.policy == "mixed").interval_ms <= TUNING.budget_cap * 15.0
        assert chosen(plan).interval_ms <= TUNING.budget_cap * 15.0

    @pytest.mark.parametrize("policy", ["auto", "mixed"])
    def test_a_burst_is_taken_where_it_is_cheaper_and_all_have_the_slack(self, policy: str) -> None:
        def plan_with(slack: float, device: Any) -> Plan:
            load = load_of(decoding(16, tpot=15.0, slack=slack), *[500] * 2, ttft_ms=500)
            return auto_over(device, policy=policy).plan(load)

        experts = ExpertModel(h200_table(), LLAMA_8B)
        plans = [plan_with(slack, experts) for slack in (20.0, 30.0, 40.0)]
        assert chosen(plans[0]).interval_ms <= TUNING.budget_cap * 15.0
        # Half of the rows fill 512 with those that decode; all of them are no more.
        assert [plan.chunk_tokens for plan in plans[1:]] == [512 - 16, 1000]
        for slack, option in zip((30.0, 40.0), map(chosen, plans[1:]), strict=True):
            assert TUNING.budget_cap * 15.0 < option.interval_ms <= slack
            assert option.holds_tpot
        # However much slack there is, no token waits for more than three targets.
        assert chosen(plan_with(math.inf, experts)).interval_ms <= TUNING.burst_targets * 15.0
        # Rows of a dense model cost much the same in any chunk.
        assert [o.policy for o in plan_with(math.inf, model()).options] == ["solo", "mixed"]

    def test_urgent_prompts_get_the_prefill_rate_that_they_need(self) -> None:
        calm = planner().plan(load_of(decoding(2, tpot=12.0, slack=400.0), 2000, 1000))

        def plan_with(share: float, slack: float = 400.0, rows: int = 2) -> Plan:
            ttft_ms = share * TUNING.urgent_margin * 3000 / chosen(calm).prefill_tokens_per_s * 1e3
            return planner().plan(load_of(decoding(rows, tpot=12.0, slack=slack), 2000, 1000, ttft_ms=ttft_ms))

        # Other prompts may come first, so it is not left at the last moment. One that is late in any case hurries none.
        assert plan_with(1.01) == plan_with(0.0) == calm
        enough, more, in_vain = map(plan_with, (0.99, 0.9, 0.8))
        rates = [chosen(plan).prefill_tokens_per_s for plan in (calm, enough, more)]
        assert (enough.bound, more.bound, sorted(set(rates))) == ("ttft", "ttft", rates)
        assert (in_vain.bound, chosen(in_vain)) == ("tpot", chosen(calm))
        # As many as serve both, with decode steps between them, must leave all on target.
        burst, step_ms = chosen(more), more.options[0].interval_ms
        assert TUNING.budget_cap < max(o.interval_ms for o in more.options) / 12.0 <= TUNING.burst_targets
        needed_ms = -(-3000 // burst.chunk_tokens) * (burst.interval_ms - step_ms) + step_ms
        assert burst in plan_with(0.6, 1.01 * needed_ms).options
        assert burst not in plan_with(0.6, 0.99 * needed_ms).options
        # Where it costs more than 5 % of the throughput, no prompt is hurried.
        assert plan_with(0.9, rows=8).bound == "tpot"

    def test_the_best_chunk_is_taken_not_the_largest(self) -> None:
        # Targets that nothing can hold limit no chunk.
        plan = planner().plan(load_of(decoding(256, tpot=1.0), *[4000] * 3))
        assert plan.policy == "mixed"
        sizes = [option for option in plan.options if option.policy == "mixed"]
        best = max(sizes, key=lambda option: option.throughput)
        assert best.chunk_tokens < max(option.chunk_tokens for option in sizes)
        assert plan.chunk_tokens == best.chunk_tokens

    def test_without_targets_prompts_come_first_unless_steps_beside_them_pay(self) -> None:
        auto, prompts = planner(), [2000] * 8
        load = load_of(decoding(64), *prompts)
        paid = auto.plan(load)
        assert (paid.policy, paid.decode) == ("mixed", True)
        first = next(option for option in paid.options if option.interval_ms == math.inf)
        for policy, share in (("mixed", 1.0), ("split", TUNING.lane_share)):
            beside = max((o for o in paid.options if o.policy == policy), key=lambda o: o.throughput)
            slower = 1.01 * share * beside.throughput / (TUNING.beside_gain * first.throughput)
            correct(auto, policy, steps=slower, slices=slower)
        plan = auto.plan(load)
        assert (plan.policy, plan.decode, plan.bound) == ("solo", False, "throughput")
        assert plan.chunk_tokens == first.chunk_tokens > 2000
        assert plan.decode_ms == pytest.approx(first.chunk_tokens * 1e3 / first.prefill_tokens_per_s)
        # A target keeps decode going.
        assert auto.plan(load_of(decoding(64, tpot=30.0), *prompts)).decode

    @pytest.mark.parametrize("tpot", [math.inf, 30.0])
    @pytest.mark.parametrize("ttft_ms", [math.inf, 200.0, 0.0])
    def test_prompts_that_can_be_on_time_go_first_where_sequences_have_no_target(
        self, ttft_ms: float, tpot: float
    ) -> None:
        plan = planner().plan(load_of(decoding(64, tpot=tpot), *[2000] * 8, ttft_ms=ttft_ms))
        go_first = (ttft_ms, tpot) == (200.0, math.inf)
        assert (plan.decode, plan.bound == "ttft") == (not go_first, go_first)
        if go_first:
            pairs = plan.chunk_tokens // 2000 * attention_pairs(2000) + attention_pairs(plan.chunk_tokens % 2000)
            assert plan.decode_ms == pytest.approx(model().prefill(plan.chunk_tokens, pairs).ms)

    def test_a_plan_costs_few_predictions(self) -> None:
        class Counting:
            calls = 0

            def __getattr__(self, name: str) -> object:
                value = getattr(model(), name)
                if callable(value):
                    Counting.calls += 1
                return value

        counting = auto_over(Counting(), *model().decode_sms)
        Counting.calls = 0
        counting.plan(load_of(decoding(64, tpot=15.0), *[2000] * 64, ttft_ms=500))
        assert Counting.calls <= 30


decodes = st.one_of(
    st.none(),
    st.builds(
        lambda n, context, tpot, lead, slack: DecodeLoad(n, n * context, tpot + lead, tpot + lead + slack, tpot),
        st.integers(1, 256),
        st.integers(1, 3000),
        st.one_of(st.just(math.inf), st.floats(1.0, 100.0)),
        st.floats(-20.0, 60.0),
        st.floats(0.0, 300.0),
    ),
)
deadlines = st.one_of(st.just(math.inf), st.floats(45.0, 60.0))
loads = st.builds(
    lambda decode, prompts, chunk: Load(50.0, decode, tuple(prompts), sum(p.tokens_left for p in prompts), chunk),
    decodes,
    st.lists(st.builds(PromptLoad, st.integers(1, 9000), st.integers(0, 9000), deadlines), max_size=5),
    st.one_of(st.none(), st.builds(chunk_of, st.integers(1, 4096), st.integers(1, LAYERS), deadlines)),
)


@given(st.sampled_from(POLICIES), loads)
def test_plans_are_consistent(policy: str, load: Load) -> None:
    if policy.startswith(("serial", "mixed")):
        load = dataclasses.replace(load, chunk=None)
    plan = planner(policy).plan(load)
    assert plan.chunk_tokens <= max(sum(p.tokens_left for p in load.prompts), 0)
    if load.chunk is not None:
        assert (plan.prefill_lane, plan.chunk_tokens) == ("prefill", 0)
        assert plan.policy in ("split", "solo")
    assert 0 <= plan.slice_layers <= (LAYERS if load.chunk is None else load.chunk.layers_left)
    if plan.prefill_lane == "prefill" and (plan.chunk_tokens or load.chunk) and plan.bound != "tpot":
        assert plan.slice_layers >= 1
    if plan.policy == "split":
        assert plan.partition in [partition_of(sms, num_sms=132) for sms in model().decode_sms]
        assert (plan.prefill_lane, plan.slice_layers >= 1) == ("prefill", True)
    else:
        assert plan.partition == WHOLE_GPU
    if plan.policy == "mixed":
        assert (plan.prefill_lane, plan.slice_layers) == ("decode", 0)
        assert 0 < plan.chunk_tokens <= MAX_CHUNK - load.decode.batch_size
    assert (plan.slice_ms is not None) == (plan.slice_layers > 0)
    prompts_first = policy == "auto" and load.chunk is None and load.decode and load.decode.budget_ms == math.inf
    if load.decode is None or (policy.startswith("serial") and load.prompts):
        assert not plan.decode
    elif not plan.decode:
        assert prompts_first
        assert (plan.policy, plan.prefill_lane, plan.slice_layers, plan.chunk_tokens > 0) == ("solo", "decode", 0, True)
    assert not plan.decode or plan.decode_ms > 0


@given(loads)
@example(
    Load(50.0, decoding(152, context=1, tpot=6.0, budget=7.0, slack=13.0), (PromptLoad(269, 417, math.inf),), 269, None)
)
def test_tpot_is_not_planned_over_target_where_an_option_holds_it(load: Load) -> None:
    plan = planner().plan(load)
    if not any(o.holds_tpot for o in plan.options):
        return
    option = chosen(plan)
    if option.policy == "mixed" and option != next(o for o in plan.options if o.policy == "mixed"):
        # A burst; the first mixed forward is the one within the budget.
        assert option.interval_ms <= min(load.decode.slack_ms, TUNING.burst_targets * load.decode.target_ms)
    else:
        assert option.interval_ms <= load.decode.budget_ms


@given(loads)
def test_under_a_tpot_target_the_highest_throughput_that_holds_it_is_taken(load: Load) -> None:
    plan = planner().plan(load)

    def worth(option: Option) -> float:
        return option.throughput * (TUNING.lane_share if option.slice_layers else 1.0)

    holding = [option for option in plan.options if option.holds_tpot and option.prefill_tokens_per_s]
    if plan.bound in ("tpot", "ttft") and plan.decode and holding:
        least = TUNING.urgent_throughput if plan.bound == "ttft" else 1.0
        assert worth(chosen(plan)) >= least * max(map(worth, holding))


def test_a_lead_counts_though_decode_alone_misses_the_target() -> None:
    # A step of 64 rows takes 7.3 ms. Only without the lead does the target count for nothing.
    for budget_ms, bound in ((8.0, "tpot"), (None, "throughput")):
        assert planner().plan(load_of(decoding(64, tpot=7.0, budget=budget_ms), 4000)).bound == bound


def test_a_step_is_worth_its_rows_in_a_step_of_all_once_the_prompts_have_joined() -> None:
    auto, load = planner(), load_of(decoding(64, tpot=15.0), 500, 500)
    before_ms, joined_ms = (model().decode(rows, rows * 1000).ms for rows in (64, 66))
    assert auto.plan(load).options[0].throughput == pytest.approx(joined_ms * 64 / 66 / before_ms)
    # Larger batches are measured to take twice as long: then no step is worth more than it takes.
    auto.corrections["solo", "step", 128] = 2.0
    assert auto.plan(load).options[0].throughput == 1.0


def test_the_rest_of_a_prompt_under_way_is_paced_too() -> None:
    load = dataclasses.replace(load_of(decoding(64), 6000), queued_tokens=0, steps_left=2)
    assert planner().plan(load).chunk_tokens == 2 * TUNING.paced_rows - 64
