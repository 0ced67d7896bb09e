"""Plans of each forced policy over a table like an H200's, and corrections."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_loads import LAYERS, MAX_CHUNK, POLICIES, chunk_of, correct, decoding, load_of, model, modelless, planner

from bullet_graph.config import Policy
from bullet_graph.errors import ConfigError
from bullet_graph.hardware import GENERIC
from bullet_graph.partition.masks import WHOLE_GPU, partition_of
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.predict import TableModel
from bullet_graph.planner.options import Backlog, Corrections, ForwardKind
from bullet_graph.planner.plan import Load, Plan, PolicyName, PromptLoad
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.tuning import TUNING


class TestWithoutChoice:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_nothing_to_do(self, policy: str) -> None:
        assert planner(policy).plan(load_of()) == Plan("solo", decode=False)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_decode_only(self, policy: str) -> None:
        plan = planner(policy).plan(load_of(decoding(64, tpot=200.0)))
        assert (plan.policy, plan.decode, plan.chunk_tokens) == ("solo", True, 0)
        assert plan.decode_ms == pytest.approx(7.32, abs=0.1)
        assert (plan.bound, plan.interval_ms) == ("nothing", 0.0)

    @pytest.mark.parametrize(
        ("tpot", "budget", "expected"),
        [
            (200.0, None, "a multiple of a step of one row"),
            (8.0, None, "a share of the target"),
            (15.0, 8.0, "a share of the budget"),
            (8.0, 20.0, "a share of the target"),
            (15.0, 6.0, "none"),
            (200.0, -5.0, "none"),
            (math.inf, None, "none"),
        ],
    )
    def test_decode_alone_takes_the_time_targets_allow(self, tpot: float, budget: float | None, expected: str) -> None:
        load = load_of(decoding(32, tpot=tpot, budget=budget))
        plan = planner("auto").plan(load)
        assert plan.decode_ms == pytest.approx(6.08, abs=0.1)
        intervals = {
            "a multiple of a step of one row": TUNING.unhurried_ratio * model().decode(1, 1000).ms,
            "a share of the target": TUNING.unhurried_share * tpot,
            "a share of the budget": TUNING.unhurried_share * (budget or tpot),
            "none": 0.0,
        }
        assert plan.interval_ms == intervals[expected]
        assert planner("mixed").plan(load).interval_ms == 0.0
        assert planner("auto").plan(load_of(decoding(32, tpot=tpot), 100)).interval_ms == 0.0

    @pytest.mark.parametrize(("batch_size", "tpot"), [(1, 15.0), (1, 6.0), (1, 5.1), (2, 15.0), (1, math.inf)])
    def test_an_unhurried_sequence_alone_is_padded_if_there_is_time(self, batch_size: int, tpot: float) -> None:
        load = load_of(decoding(batch_size, tpot=tpot))
        plan, unpadded = planner(lone_rows=2).plan(load), planner().plan(load)
        ms, padded_ms = (model().decode(max(rows, batch_size), batch_size * 1000).ms for rows in (1, 2))
        is_padded = batch_size == 1 and padded_ms <= TUNING.unhurried_share * tpot < math.inf
        assert plan.decode_ms == (padded_ms if is_padded else ms)
        assert plan.least_rows == (2 if is_padded else 1)
        assert (plan.interval_ms, unpadded.decode_ms) == (unpadded.interval_ms, ms)

    @pytest.mark.parametrize("policy", ["mixed", "split", "auto"])
    def test_prompts_only_run_as_whole_chunks_on_the_decode_lane(self, policy: str) -> None:
        corrected = planner(policy)
        corrected.corrections["solo", "slice", 4096] = 1.25
        plan = corrected.plan(load_of(None, 1000, 2000))
        assert (plan.policy, plan.decode, plan.prefill_lane) == ("solo", False, "decode")
        assert plan.chunk_tokens == 3000
        assert plan.decode_ms == 1.25 * model().prefill(3000, attention_pairs(1000) + attention_pairs(2000)).ms

    def test_they_have_the_size_with_the_highest_prefill_rate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TableModel, "wave_chunk_tokens", lambda _, most, *__: min(most, 2048))
        assert planner().plan(load_of(None, 6000)).chunk_tokens == 2048

    @pytest.mark.parametrize("policy", ["split", "auto"])
    def test_a_chunk_under_way_goes_on_alone(self, policy: str) -> None:
        plan = planner(policy).plan(load_of(None, 500, chunk=chunk_of(2048, 3)))
        assert (plan.policy, plan.prefill_lane, plan.chunk_tokens) == ("solo", "prefill", 0)
        assert plan.slice_layers == 3
        assert plan.partition == WHOLE_GPU


class TestWithoutModel:
    @pytest.mark.parametrize(
        ("policy", "decode", "prompts", "plan"),
        [
            ("serial:512", 8, (100,), Plan("serial", decode=False, chunk_tokens=512, bound="forced")),
            ("serial", 8, (100,), Plan("serial", decode=False, chunk_tokens=2048, bound="forced")),
            # A mixed forward takes the prompt rows that decode rows leave, whatever the target, but always some.
            ("mixed:512", 100, (1000,), Plan("mixed", decode=True, chunk_tokens=412, bound="forced")),
            ("mixed", 100, (1000,), Plan("mixed", decode=True, chunk_tokens=1948, bound="forced")),
            ("auto", 100, (1000,), Plan("mixed", decode=True, chunk_tokens=1948, bound="forced")),
            ("mixed:64", 60, (1000,), Plan("mixed", decode=True, chunk_tokens=16, bound="forced")),
            ("mixed", 4, (), Plan("solo", decode=True)),
            ("mixed:512", 0, (100,), Plan("solo", decode=False, chunk_tokens=512)),
        ],
    )
    def test_plans_have_no_predictions(self, policy: str, decode: int, prompts: tuple[int, ...], plan: Plan) -> None:
        assert modelless(policy).plan(load_of(decoding(decode, tpot=1.0) if decode else None, *prompts)) == plan
        assert modelless(policy).prefill_ms_per_token == 0.0

    @pytest.mark.parametrize("policy", ["split", "split:48"])
    def test_other_policies_ask_for_a_table(self, policy: str) -> None:
        with pytest.raises(ConfigError, match=f"policy {policy} needs a performance table.*profile"):
            modelless(policy)


class TestSizesOfTheDecodeLane:
    @pytest.mark.parametrize(
        ("policy", "decode_sms", "message"),
        [("split:40", (16, 48), r"split:40 needs .* 40 SMs.* 16, 48"), ("split", (), r"some SMs.* none")],
    )
    def test_those_not_captured_are_refused(self, policy: str, decode_sms: tuple[int, ...], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Planner(Policy.parse(policy), max_chunk_tokens=8, decode_sms=decode_sms, model=model())

    def test_auto_does_without_splits(self) -> None:
        lone = Planner(Policy("auto"), max_chunk_tokens=2048, decode_sms=(), model=model())
        assert {o.policy for o in lone.plan(load_of(decoding(64, tpot=20.0), 4000)).options} == {"solo", "mixed"}


class TestSerialAndMixed:
    def test_serial_predicts_its_chunk(self) -> None:
        plan = planner("serial").plan(load_of(decoding(8), 1000))
        assert (plan.decode, plan.chunk_tokens, plan.bound) == (False, 1000, "forced")
        assert plan.decode_ms == model().prefill(1000, attention_pairs(1000)).ms

    def test_a_fixed_chunk_ignores_targets(self) -> None:
        plan = planner("mixed:512").plan(load_of(decoding(64, tpot=1.0), 4000))
        assert (plan.policy, plan.decode, plan.chunk_tokens) == ("mixed", True, 448)
        assert plan.decode_ms == model().mixed(448, attention_pairs(448), 64, 64000).ms

    def test_without_targets_all_rows_are_used(self) -> None:
        assert planner("mixed").plan(load_of(decoding(64), 20000)).chunk_tokens == MAX_CHUNK - 64

    def test_a_chunk_is_cut_across_prompts_with_their_contexts(self) -> None:
        load = Load(0.0, decoding(16), (PromptLoad(300, 700, math.inf), PromptLoad(5000, 0, math.inf)), 5300, None)
        backlog = Backlog(load, planner().predictor)
        assert backlog.pairs(200) == attention_pairs(200, 700)
        assert backlog.pairs(300) == attention_pairs(300, 700)
        assert backlog.pairs(1000) == attention_pairs(300, 700) + attention_pairs(700)
        assert planner("mixed:1000").plan(load).decode_ms == model().mixed(984, backlog.pairs(984), 16, 16000).ms

    @given(st.integers(1, 256), st.floats(8.0, 60.0), st.integers(16, 20000), st.sampled_from([0.8, 1.0, 1.25]))
    def test_the_chunk_is_the_largest_that_fits_the_target(
        self, batch_size: int, tpot: float, tokens: int, measured: float
    ) -> None:
        """``measured``: ratio of measured to predicted times."""
        decode, mixed = decoding(batch_size, tpot=tpot), planner("mixed")
        correct(mixed, "mixed", steps=measured)
        correct(mixed, "solo", steps=measured)
        plan = mixed.plan(load_of(decode, tokens))

        def step_ms(rows: int) -> float:
            return measured * model().mixed(rows, attention_pairs(rows), batch_size, decode.kv_tokens).ms

        if plan.chunk_tokens == 0:
            assert step_ms(min(TUNING.row_step, tokens)) > tpot
        elif plan.options[0].holds_tpot:
            assert step_ms(plan.chunk_tokens) <= tpot
            more = (plan.chunk_tokens // TUNING.row_step + 1) * TUNING.row_step
            if more <= min(tokens, MAX_CHUNK - batch_size):
                assert step_ms(more) > tpot
        else:  # nothing could hold the target, so it counts for nothing
            assert measured * model().decode(batch_size, decode.kv_tokens).ms > tpot
            assert plan.chunk_tokens == min(tokens, MAX_CHUNK - batch_size)

    def test_prefill_pauses_for_decode_to_catch_up_but_not_for_ever(self) -> None:
        mixed = planner("mixed")
        late = decoding(64, tpot=15.0, budget=4.0)
        rows = [
            mixed.plan(load_of(late, 4000, now_s=50.0 + i * TUNING.pause_patience_s / 5)).chunk_tokens for i in range(8)
        ]
        assert rows[:5] == [0] * 5
        assert TUNING.floor_tokens in rows[5:]


class TestSplit:
    @given(st.integers(1, 256), st.floats(5.0, 80.0))
    def test_the_fewest_sms_that_hold_the_target(self, batch_size: int, tpot: float) -> None:
        decode = decoding(batch_size, tpot=tpot)
        plan = planner("split").plan(load_of(decode, 8000))
        assert plan.policy == "split"
        option = plan.options[0]

        def step_ms(sms: int) -> float:
            rows = planner("split").predictor.lane_chunks[sms]
            return model().split(sms, batch_size, decode.kv_tokens, rows, attention_pairs(rows)).decode_ms

        smaller = [sms for sms in model().decode_sms if sms < option.decode_sms]
        if option.holds_tpot:
            assert step_ms(option.decode_sms) <= tpot
            assert all(step_ms(sms) > tpot for sms in smaller)
        else:
            assert all(step_ms(sms) >= option.interval_ms - 1e-9 for sms in model().decode_sms)

    def test_a_forced_size(self) -> None:
        plan = planner("split:48").plan(load_of(decoding(64, tpot=1.0), 8000))
        assert plan.partition == partition_of(48, num_sms=132)
        assert plan.prefill_lane == "prefill"

    def test_a_queue_is_cut_to_the_chunk_of_the_lane(self) -> None:
        rows = planner("split:48").predictor.lane_chunks[48]
        for queued in (rows - 1, rows, rows + 1, 2 * rows):
            assert planner("split:48").plan(load_of(decoding(8), queued)).chunk_tokens == min(queued, rows)

    def test_slices_are_short_and_chunks_follow_the_sms(self) -> None:
        few, many = (planner(f"split:{sms}").plan(load_of(decoding(64), 8000)) for sms in (96, 16))
        assert few.chunk_tokens < many.chunk_tokens <= 2048
        for plan in (few, many):
            assert 2.5 <= plan.slice_ms <= 7.5

    def test_a_slice_is_launched_soon_however_short_it_is(self) -> None:
        plan = planner("split:48").plan(load_of(decoding(64), 16))
        assert plan.slice_layers * GENERIC.eager_layer_ms == pytest.approx(TUNING.split_launch_ms)
        assert plan.slice_layers < LAYERS


class TestCorrections:
    def test_they_follow_measurements_slowly_within_limits(self) -> None:
        learned = Corrections()
        learned.observe("split", "step", 64, 10.0, 12.0)
        learned.observe("solo", "step", 64, 1.0, 1000.0)  # counts no further than the limit
        for predicted_ms, measured_ms in ((0.0, 5.0), (5.0, 0.0)):  # times of nothing say nothing
            learned.observe("solo", "slice", 64, predicted_ms, measured_ms)
        assert learned == pytest.approx({("split", "step", 64): 1.2**0.05, ("solo", "step", 64): 2.0**0.05})
        for _ in range(1000):
            learned.observe("split", "step", 64, 10.0, 1000.0)
            learned.observe("solo", "step", 64, 10.0, 0.001)
        assert list(learned.values()) == [2.0, 0.5]

    @pytest.mark.parametrize(("rows", "least", "most"), [(1, 0, 64), (64, 0, 64), (65, 65, 128), (600, 513, 1024)])
    def test_forwards_of_one_size_share_one(self, rows: int, least: int, most: int) -> None:
        corrections = Corrections()
        corrections.observe("mixed", "step", rows, 10.0, 12.0)
        assert [n for n in range(2000) if corrections.of("mixed", "step", n) > 1] == list(range(least, most + 1))

    def test_each_policy_and_kind_has_its_own(self) -> None:
        """Every predicted time takes the factor of its policy and kind, and no other."""
        corrected, load = planner("split:48"), load_of(decoding(64), 8000)
        correct(corrected, "split", steps=1.5, slices=0.75)
        (before,), (after,) = planner("split:48").plan(load).options, corrected.plan(load).options
        assert after.interval_ms == pytest.approx(1.5 * before.interval_ms)
        assert after.prefill_tokens_per_s == pytest.approx(before.prefill_tokens_per_s / 0.75)
        plain, mixed = planner("mixed:512"), planner("mixed:512")
        correct(mixed, "mixed", steps=1.5, slices=0.75)
        assert mixed.plan(load).decode_ms == pytest.approx(1.5 * plain.plan(load).decode_ms)

    def test_each_prediction_takes_that_of_its_rows(self) -> None:
        load, changed = load_of(decoding(64, tpot=20.0), 6000, ttft_ms=1e3), []
        for key in [(p, k, 1 << b) for p in get_args(PolicyName) for k in get_args(ForwardKind) for b in range(6, 15)]:
            auto = planner()
            auto.corrections[key] = 1.5
            changed += [" ".join(map(str, key))] * (auto.plan(load) != planner().plan(load))
        steps = ["mixed step 512", "mixed step 1024", "solo step 64", "solo step 128", "split step 64"]
        assert set(changed) == {"solo slice 8192", *steps, *(f"split slice {256 << bits}" for bits in range(4))}

    def test_they_converge_on_the_ratio(self) -> None:
        auto = planner()
        for _ in range(300):
            auto.corrections.observe("solo", "step", 64, auto.predictor.decode_ms(64, 64000), 9.0)
        assert auto.plan(load_of(decoding(64))).decode_ms == pytest.approx(9.0, rel=0.01)
        assert auto.predictor.decode_ms(64, 64000) == pytest.approx(9.0, rel=0.01)

    def test_a_size_that_is_slow_is_avoided(self) -> None:
        mixed, load = planner("mixed"), load_of(decoding(64, tpot=20.0), 8000)
        assert mixed.plan(load).chunk_tokens > 512
        mixed.corrections["mixed", "step", 1024] = 1.5
        plan, ms = mixed.plan(load), model().mixed(448, attention_pairs(448), 64, 64000).ms
        assert (plan.chunk_tokens, plan.decode_ms) == (448, ms)


def test_the_rate_for_ordering_prompts_follows_the_plans() -> None:
    mixed = planner("mixed")
    alone = mixed.prefill_ms_per_token
    assert alone == pytest.approx(1 / 42, rel=0.15)
    for _ in range(100):
        plan = mixed.plan(load_of(decoding(128, tpot=15.0), 8000))
    assert mixed.prefill_ms_per_token == pytest.approx((plan.decode_ms or 0.0) / plan.chunk_tokens, rel=0.01)
    assert mixed.prefill_ms_per_token > 1.5 * alone


def test_a_large_chunk_weighs_more_in_the_prefill_rate_than_a_small_one() -> None:
    mixed = planner("mixed")
    for _ in range(100):
        plans = [mixed.plan(load_of(decode, tokens)) for decode, tokens in ((decoding(64), 16), (None, 4000))]
    tokens, ms = (sum(of) for of in zip(*((p.chunk_tokens, p.decode_ms or 0.0) for p in plans), strict=True))
    assert mixed.prefill_ms_per_token == pytest.approx(ms / tokens, rel=0.1)
    assert mixed.prefill_ms_per_token < sum((p.decode_ms or 0.0) / p.chunk_tokens for p in plans) / 4


def test_a_chunk_has_some_rows_however_many_decode_and_no_more_where_none_does() -> None:
    for decode_rows in (250, 256):
        plan = planner("mixed", max_chunk_tokens=256).plan(load_of(decoding(decode_rows), 1000))
        assert (plan.policy, plan.chunk_tokens) == ("mixed", TUNING.row_step)
    assert planner("mixed:512").plan(load_of(None, 4000)).chunk_tokens == 512
    assert planner("serial:512", max_chunk_tokens=256).plan(load_of(None, 4000)).chunk_tokens == 256
