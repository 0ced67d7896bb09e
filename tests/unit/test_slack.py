"""Slack of running sequences against a loop over their tokens, and the order of prompts against brute force."""

import math
from itertools import permutations
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bullet_graph.planner.plan import DecodeLoad, PromptLoad
from bullet_graph.planner.slack import decode_load, have_room, next_deadlines, order_prompts, rank_prompts, wait_ms
from bullet_graph.planner.tuning import TUNING


class RowProgress(NamedTuple):
    """How far a sequence that decodes has come."""

    first_token_s: float
    num_tokens: int
    tokens_left: int
    tpot_ms: float


SOLO_MS = 5.0
MANY = 10**6


def solo(batch_size: int, kv_tokens: int) -> float:
    assert kv_tokens == 1000 * batch_size
    return SOLO_MS


def load_of(*rows: RowProgress, now_s: float = 10.0, solo_ms=solo):
    return decode_load(rows, len(rows), 1000 * len(rows), now_s, solo_ms=solo_ms)


def average_ms(row: RowProgress, now_s: float, intervals_ms: list[float]) -> float:
    """TPOT of the row if its next tokens come at these intervals from now on."""
    return ((now_s - row.first_token_s) * 1e3 + sum(intervals_ms)) / (row.num_tokens - 1 + len(intervals_ms))


class TestDecodeLoad:
    @pytest.mark.parametrize(
        "row",
        [
            RowProgress(10.0, 1, MANY, 4.0),  # below the solo step, so lost from the start
            RowProgress(10.0, 5, 0, 15.0),  # wants no more tokens
            RowProgress(9.7, 1, MANY, 6.0),  # back on target after 300 tokens at the earliest
        ],
    )
    def test_rows_that_bind_nothing(self, row: RowProgress) -> None:
        load = load_of(row)
        assert (load.batch_size, load.kv_tokens) == (1, 1000)
        assert load.budget_ms == load.slack_ms == load.target_ms == math.inf

    def test_the_reserve_stops_growing(self) -> None:
        level = load_of(RowProgress(10.0 - 0.015 * 999, 1000, MANY, 15.0))
        reserve_ms = TUNING.reserve_share * TUNING.reserve_tokens * 15.0 + TUNING.reserve_ms
        assert level.budget_ms == pytest.approx(15.0 - reserve_ms / TUNING.budget_horizon_tokens)

    def test_slack_is_one_long_wait_and_then_solo_steps(self) -> None:
        assert load_of(RowProgress(10.0, 1, 10, 15.0)).slack_ms == pytest.approx(
            10 * 15.0 * (1 - TUNING.reserve_share) - TUNING.reserve_ms - 9 * SOLO_MS
        )
        far = load_of(RowProgress(10.0, 1, MANY, 15.0)).slack_ms
        reach = TUNING.slack_horizon_tokens
        reserve_ms = TUNING.budget_horizon_tokens * 15.0 * TUNING.reserve_share + TUNING.reserve_ms
        assert far == pytest.approx(reach * 15.0 - reserve_ms - (reach - 1) * SOLO_MS)

    def test_the_tightest_row_binds(self) -> None:
        load = load_of(*[RowProgress(10.0, 1, MANY, tpot) for tpot in (30.0, 12.0, 20.0)])
        assert load.target_ms == 12.0
        assert load.budget_ms == pytest.approx(
            12.0 * (1 - TUNING.reserve_share) - TUNING.reserve_ms / TUNING.budget_horizon_tokens
        )

    def test_a_lost_row_binds_nothing(self) -> None:
        lost = RowProgress(8.0, 3, 20, 15.0)  # two seconds late, and 20 tokens win back 200 ms at most
        assert load_of(lost).budget_ms == load_of(lost).slack_ms == load_of(lost).target_ms == math.inf
        kept = RowProgress(10.0, 1, MANY, 20.0)
        assert load_of(lost, kept) == decode_load([kept], 2, 2000, 10.0, solo_ms=solo)

    def test_without_a_solo_time_no_row_is_lost_and_slack_is_the_budget(self) -> None:
        load = load_of(RowProgress(8.0, 3, 20, 15.0), solo_ms=None)
        assert load.slack_ms == load.budget_ms < 0

    rows = st.builds(
        RowProgress,
        first_token_s=st.floats(9.0, 10.0),
        num_tokens=st.integers(1, 300),
        tokens_left=st.integers(1, 500),
        tpot_ms=st.floats(1.0, 100.0),
    )

    @given(st.lists(rows, min_size=1, max_size=6))
    def test_keeping_to_the_budget_keeps_every_row_on_target_that_decode_alone_could_keep(
        self, rows: list[RowProgress]
    ) -> None:
        load = load_of(*rows)
        for row in rows:
            far = min(row.tokens_left, TUNING.lost_horizon_tokens)
            if average_ms(row, 10.0, [SOLO_MS] * far) > row.tpot_ms:
                continue
            near = min(far, TUNING.budget_horizon_tokens)
            assert average_ms(row, 10.0, [load.budget_ms] * near) <= row.tpot_ms + 1e-6
            wait = [load.slack_ms] + [SOLO_MS] * (min(far, TUNING.slack_horizon_tokens) - 1)
            assert average_ms(row, 10.0, wait) <= row.tpot_ms + 1e-6

    @given(rows)
    def test_the_budget_is_no_tighter_than_the_margin_asks(self, row: RowProgress) -> None:
        load = load_of(row)
        if load.budget_ms < math.inf:
            near = min(row.tokens_left, TUNING.budget_horizon_tokens)
            average = average_ms(row, 10.0, [load.budget_ms] * near)
            tokens = row.num_tokens - 1 + near
            assert average >= row.tpot_ms * (1 - TUNING.reserve_share) - TUNING.reserve_ms / tokens - 1e-6


def prompt(
    tokens: int, arrival: float, allowance: float = math.inf, *, started: bool = False, resumed: bool = False
) -> PromptLoad:
    return PromptLoad(tokens, 0, arrival + allowance, arrival, started, resumed)


def num_on_time(prompts: list[PromptLoad], order: list[int], now_s: float, ms_per_token: float) -> int:
    count, end_s = 0, now_s
    for i in order:
        end_s += prompts[i].tokens_left * ms_per_token / 1e3
        count += end_s <= prompts[i].deadline_s
    return count


class TestOrderPrompts:
    def test_without_deadlines_resumed_then_started_then_by_arrival(self) -> None:
        prompts = [
            prompt(10, 3.0),
            prompt(10, 1.0),
            prompt(10, 2.5, started=True),
            prompt(10, 2.0, resumed=True),
            prompt(10, 0.5, resumed=True),
        ]
        assert order_prompts(prompts, 4.0, 0.02) == [4, 3, 2, 1, 0]

    def test_earliest_deadline_first_where_all_can_be_met(self) -> None:
        prompts = [prompt(100, 0.0, 3.0), prompt(100, 0.0, 1.0), prompt(100, 0.0), prompt(100, 0.0, 2.0)]
        assert order_prompts(prompts, 0.0, 1.0) == [1, 3, 0, 2]

    def test_the_longest_is_given_up_and_the_late_go_behind_those_on_time(self) -> None:
        prompts = [prompt(600, 0.2, 1.0), prompt(100, 0.3, 1.0), prompt(200, 0.4, 0.9), prompt(50, 0.1, 0.2)]
        # At 1 ms a token from 0.55 s on: the first would be done at 1.15 s, and the others then not by 1.3 s. The
        # deadline of the last one has passed: its second one is far away.
        assert order_prompts(prompts, 0.55, 1.0) == [1, 2, 3, 0]

    def test_resumed_prompts_go_before_deadlines_and_take_their_time(self) -> None:
        prompts = [prompt(500, 0.05, 0.6), prompt(400, 0.0, resumed=True), prompt(100, 0.05, 0.9)]
        assert rank_prompts(prompts, 0.05, 1.0)[:3] == ([1], [2], [0])

    @pytest.mark.parametrize("allowance", [0.5, 2.0])
    def test_a_late_prompt_has_a_second_and_a_last_deadline(self, allowance: float) -> None:
        patience = max(TUNING.patience_s, TUNING.patience_allowances * allowance)
        second = TUNING.second_allowances * allowance
        assert next_deadlines(prompt(10, 5.0, allowance), 5.0) == (5.0 + allowance, 5.0 + patience)
        assert next_deadlines(prompt(10, 5.0, allowance), 5.1 + allowance) == (5.0 + second, 5.0 + patience)
        assert next_deadlines(prompt(10, 5.0, allowance), 5.1 + second) == (None, 5.0 + patience)

    def test_a_prompt_without_a_target_has_the_last_deadline_alone(self) -> None:
        last = 5.0 + TUNING.patience_s
        assert next_deadlines(prompt(10, 5.0), 5.0) == (last, last)
        assert next_deadlines(prompt(10, 5.0), last + 1) == (None, last)

    def test_a_second_deadline_counts_as_much_as_a_target(self) -> None:
        """Either the late prompt or the longer one on time can be met."""
        now = TUNING.second_allowances * 0.5 - 0.6
        late, fresh, short = prompt(400, 0.0, 0.5), prompt(500, now, 0.55), prompt(300, now, 0.55)
        assert rank_prompts([fresh, late], now, 1.0)[1:3] == ([1], [0])
        assert rank_prompts([short, late], now, 1.0)[1:3] == ([0], [1])

    def test_the_late_get_the_share_that_their_last_deadlines_require(self) -> None:
        """The first needs 0.2 s within 2 s; both need 0.6 s within 3 s."""
        now = TUNING.patience_s - 2.0
        first, then, fresh = prompt(200, 0.0, 0.5), prompt(400, 1.0, 0.5), prompt(50, now, 0.5)
        ranking = rank_prompts([then, fresh, first], now, 1.0)
        assert ranking.kept == [1]
        assert ranking.late == [2, 0]
        assert ranking.late_share == pytest.approx(0.2)
        times = [now + x * TUNING.late_period_s for x in range(10)]
        orders = [order_prompts([then, fresh, first], t, 1.0) for t in times]
        assert orders.count([2, 0, 1]) in (1, 2, 3)
        assert orders.count([2, 0, 1]) + orders.count([1, 2, 0]) == 10
        # Before 500 ms, 20 % of the time and two periods are the others'.
        assert rank_prompts([then, prompt(381, now, 0.5), first], now, 1.0).kept == []

    def test_the_share_of_the_late_is_limited(self) -> None:
        late = [prompt(1000, 0.1 * i, 0.5) for i in range(10)]
        assert rank_prompts(late, TUNING.patience_s - 1.0, 1.0).late_share == TUNING.late_share
        assert rank_prompts(late, TUNING.patience_s + 9.0, 0.0).late_share == TUNING.late_share

    def test_a_newcomer_waits_for_who_goes_first_and_for_the_late_no_longer_than_they_need(self) -> None:
        assert wait_ms([prompt(20, 0.0, 0.01)], prompt(400, 19.99, 0.5), 19.99, 1.0) == pytest.approx(420)
        assert wait_ms([prompt(4000, 0.0, 0.01)], prompt(300, 10.0, 1.0), 10.0, 1.0) == pytest.approx(300 / 0.6)
        queue = [prompt(400, 10.0, 1.0), prompt(100, 10.0, resumed=True)]
        assert wait_ms(queue, prompt(13_000, 10.0, 1.0), 10.0, 1.0) == pytest.approx(13_500)

    queues = st.lists(
        st.builds(
            prompt,
            tokens=st.integers(1, 500),
            arrival=st.floats(0.0, 1.0),
            allowance=st.one_of(st.just(math.inf), st.floats(0.1, 3.0)),
            started=st.booleans(),
            resumed=st.booleans(),
        ),
        max_size=6,
    )

    @given(queues, st.floats(0.0, 2.0))
    def test_every_prompt_once(self, prompts: list[PromptLoad], ms_per_token: float) -> None:
        order = order_prompts(prompts, 1.0, ms_per_token)
        assert sorted(order) == list(range(len(prompts)))
        resumed = [prompts[i].resumed for i in order]
        assert resumed == sorted(resumed, reverse=True)

    @given(queues, st.floats(0.1, 3.0))
    def test_no_order_meets_more_deadlines(self, prompts: list[PromptLoad], ms_per_token: float) -> None:
        """Of each prompt's own deadline and its second one, the first that it could meet alone."""
        prompts = [p for p in prompts if not p.resumed][:5]
        due = [next_deadlines(p, 1.0 + p.tokens_left * ms_per_token / 1e3)[0] for p in prompts]
        prompts = [p._replace(deadline_s=d) for p, d in zip(prompts, due, strict=True) if d is not None]
        order = rank_prompts(prompts, 1.0, ms_per_token).kept
        # A sum that ends on a deadline to the last bit depends on the order of its terms.
        least, most = (
            max(num_on_time(prompts, list(o), now_s, ms_per_token) for o in permutations(range(len(prompts))))
            for now_s in (1 + 1e-9, 1 - 1e-9)
        )
        assert num_on_time(prompts, order, 1 - 1e-9, ms_per_token) == len(order)
        assert least <= len(order) <= most

    @settings(max_examples=50)
    @given(
        late_tokens=st.integers(1, 4000),
        waited=st.floats(1.0, 40.0),
        fresh=st.lists(st.tuples(st.integers(1, 300), st.floats(0.2, 1.0)), min_size=1, max_size=8),
    )
    @example(late_tokens=337, waited=26.0625, fresh=[(95, 1.0), (273, 0.703125)])  # its share is more than it needs
    @example(late_tokens=479, waited=39.08895835217077, fresh=[(65, 0.796875), (255, 0.75)])  # 59 % in half a second
    def test_a_late_prompt_makes_no_prompt_late_that_is_kept(
        self, late_tokens: int, waited: float, fresh: list[tuple[int, float]]
    ) -> None:
        """In forwards of 2 ms, a prompt that is kept with five periods to spare is on time.

        In a second, the late may take two periods more than half of the time; the others then need four more.
        """
        start, forward = 100.0, 2
        late = prompt(late_tokens, start - waited, 0.01)
        queue = {i: prompt(tokens, start, due) for i, (tokens, due) in enumerate(fresh)} | {-1: late}
        names = list(queue)
        later = start + 5 * TUNING.late_period_s
        kept = {names[i] for i in rank_prompts(list(queue.values()), later, 1.0).kept}
        kept = {i for i in kept if later + queue[i].tokens_left / 1e3 <= queue[i].deadline_s}
        # Those given up as well would change the share later.
        queue = {name: p for name, p in queue.items() if name in kept or name == -1}
        now = start
        while queue.keys() & kept:
            budget = forward
            names = list(queue)
            for i in order_prompts(list(queue.values()), now, 1.0):
                p = queue[names[i]]
                rows = min(budget, p.tokens_left)
                budget -= rows
                queue[names[i]] = p._replace(tokens_left=p.tokens_left - rows)
            now += forward / 1e3
            for name in [name for name, p in queue.items() if not p.tokens_left]:
                assert name == -1 or now <= queue[name].deadline_s
                del queue[name]

    @settings(max_examples=30)
    @given(
        victims=st.lists(st.integers(50, 400), min_size=1, max_size=4),
        tokens=st.integers(10, 300),
        allowance=st.floats(0.2, 1.0),
        load=st.floats(0.8, 3.0),
    )
    @example([63, 50], 125, 1.0, 1.0)  # each prefill lasts whole periods
    def test_nobody_starves_in_an_endless_stream_of_prompts_on_time(
        self, victims: list[int], tokens: int, allowance: float, load: float
    ) -> None:
        """Prompts that can be met come at up to three times the rate at which they can be served."""
        now, ms_per_token = 1.0, 1.0
        queue = [prompt(n, 0.0, 0.01) for n in victims]  # late already
        waiting = set(map(id, queue))
        gap_s = tokens * ms_per_token / 1e3 / load
        next_s = now
        limit_s = now + max(TUNING.patience_s, TUNING.patience_allowances * allowance) + 2 * sum(victims) / 1e3 + 3.0
        while waiting:
            while next_s <= now:
                queue.append(prompt(tokens, next_s, allowance))
                next_s += gap_s
            served = queue.pop(order_prompts(queue, now, ms_per_token)[0]) if queue else None
            if served is None:
                now = next_s
                continue
            waiting.discard(id(served))
            now += served.tokens_left * ms_per_token / 1e3
            assert now <= limit_s


class TestRoom:
    @staticmethod
    def room(prompts: list[PromptLoad], *, target_ms: float = 15.0, now_s: float = 10.0) -> list[bool]:
        """Beside 50 sequences of 5,000 tokens; a step takes 0.1 ms a sequence and 1 ms per 1,000 tokens."""
        decode = DecodeLoad(50, 5000, target_ms, target_ms, target_ms)
        return have_room(prompts, decode, now_s, solo_ms=lambda rows, tokens: rows / 10 + tokens / 1000)

    def test_as_many_run_as_leave_a_step_within_the_target(self) -> None:
        assert TUNING.room_share == 0.92  # of 15 ms: 13.8
        prompts = [PromptLoad(500, cached, 11.0, 9.0) for cached in (2500, 500, 100, 0)]
        # 5.1 + 8; 5.2 + 9 is too much; 5.2 + 8.6; then nothing fits.
        assert self.room(prompts) == [True, False, True, False]
        assert self.room([PromptLoad(500, 9000, 11.0, 9.0)]) == [False]

    @pytest.mark.parametrize("target_ms", [math.inf, 5.0])
    def test_some_run_in_any_case(self, target_ms: float) -> None:
        fresh, started = PromptLoad(9000, 0, 11.0, 9.0), PromptLoad(9000, 0, 11.0, 9.0, started=True)
        resumed, overdue = started._replace(started=False, resumed=True), PromptLoad(9000, 0, -10.0, -11.0)
        assert self.room([started, resumed, overdue], target_ms=target_ms) == [True, True, True]
        assert self.room([fresh], target_ms=target_ms) == [target_ms == math.inf]
        # They take room from the others.
        assert self.room([started, PromptLoad(10, 0, 11.0, 9.0)], target_ms=15.0) == [True, False]
