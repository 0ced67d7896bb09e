"""How much time sequences, prompts and the loop have to spare, and the order in which prompts are served."""

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from bullet_graph.planner.plan import DecodeLoad, Load, PromptLoad
from bullet_graph.planner.tuning import TUNING

Progress = tuple[float, int, int, float]
"""A sequence that decodes: when its first token was out (s), output tokens so far with those in flight (at least 1),
most tokens that may follow, and its TPOT target (ms)."""

PREPARE_MS = 20.0
"""Longest time to capture one graph of 32 layers on an H200."""

PREPARE_SHARE = 0.25
"""Largest share of the time that captures may take while there is work."""

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def decode_load(
    rows: Iterable[Progress],
    batch_size: int,
    kv_tokens: int,
    now_s: float,
    *,
    solo_ms: Callable[[int, int], float] | None,
) -> DecodeLoad:
    """Sum up the sequences that decode and the time that their TPOT targets leave.

    Token k of a sequence (the first is 0) is on target if it is out by ``first_token_s + k · tpot``. A sequence that
    would miss its target even if nothing but decode ran is lost: it limits neither budget nor slack.

    ``rows`` are the sequences with a target; ``batch_size`` and ``kv_tokens`` are of all that decode. The interval to
    the next token begins at ``now_s``: now, or when the tokens in flight are expected. ``solo_ms`` is the time of a
    decode step of (batch size, tokens attended to) alone; with None, no sequence is lost, and the slack is the budget.
    """
    budget_horizon, slack_horizon = TUNING.budget_horizon_tokens, TUNING.slack_horizon_tokens
    lost_horizon, reserve_tokens = TUNING.lost_horizon_tokens, TUNING.reserve_tokens
    reserve_share, reserve_ms = TUNING.reserve_share, TUNING.reserve_ms
    solo = None if solo_ms is None else solo_ms(batch_size, kv_tokens)
    budget = slack = target = math.inf
    for first_token_s, num_tokens, left, tpot in rows:
        far = lost_horizon if left > lost_horizon else left
        if far < 1:
            continue
        done = num_tokens - 1
        lag = (now_s - first_token_s) * 1e3 - done * tpot
        if solo is not None and lag + far * (solo - tpot) > 0:
            continue
        near = far if far < budget_horizon else budget_horizon
        due = done + near
        lag += (due if due < reserve_tokens else reserve_tokens) * tpot * reserve_share + reserve_ms
        interval = tpot - lag / near
        if interval < budget:
            budget = interval
        if tpot < target:
            target = tpot
        if solo is not None:
            far = far if far < slack_horizon else slack_horizon
            wait = far * tpot - lag - (far - 1) * solo
            if wait < slack:
                slack = wait
    return DecodeLoad(batch_size, kv_tokens, budget, budget if solo is None else slack, target)


def have_room(
    prompts: Sequence[PromptLoad], decode: DecodeLoad, now_s: float, *, solo_ms: Callable[[int, int], float]
) -> list[bool]:
    """Which prompts, in serving order, may run: a sequence more must not cost all others their TPOT targets.

    There is room while a decode step alone takes at most ``room_share`` of the tightest target that can be held.
    Prompts that have started, are resumed or past their last deadline always run. ``solo_ms`` is :func:`decode_load`'s.
    """
    if not prompts or decode.target_ms == math.inf:
        return [True] * len(prompts)
    most_ms, rows, kv_tokens = TUNING.room_share * decode.target_ms, decode.batch_size, decode.kv_tokens
    room: list[bool] = []
    is_full = solo_ms(rows + 1, kv_tokens) > most_ms
    for prompt in prompts:
        tokens = prompt.tokens_cached + prompt.tokens_left
        fits = not is_full and solo_ms(rows + 1, kv_tokens + tokens) <= most_ms
        room.append(fits or prompt.started or prompt.resumed or now_s >= next_deadlines(prompt, now_s)[1])
        if room[-1]:
            rows, kv_tokens = rows + 1, kv_tokens + tokens
    return room


class Ranking(NamedTuple):
    """Indices of prompts, each group in the order to serve it.

    The ``late`` go ahead of the ``kept`` for ``late_share`` of the time, else behind. Resumed prompts precede both.
    """

    resumed: list[int]
    kept: list[int]
    late: list[int]
    late_share: float


def order_prompts(prompts: Sequence[PromptLoad], now_s: float, ms_per_token: float) -> list[int]:
    """Indices of the prompts in the order to serve them now; :func:`rank_prompts` tells the rule."""
    resumed, kept, late, late_share = rank_prompts(prompts, now_s, ms_per_token)
    if late:
        # Multiples of the golden ratio spread evenly, however many periods a forward lasts.
        period = (now_s - prompts[late[0]].arrival_s) // TUNING.late_period_s
        if period * _GOLDEN_RATIO % 1 < late_share:
            return resumed + late + kept
    return resumed + kept + late


def rank_prompts(prompts: Sequence[PromptLoad], now_s: float, ms_per_token: float) -> Ranking:
    """Which prompts are kept, which are late, and the share of the time that the late get.

    Without deadlines all are kept: started prompts go first, then the others, first come, first served.

    With deadlines, each prompt has three: its own, a second one, and a last one. The second counts once a prompt cannot
    meet its own. As many prompts as possible that meet one of these two are kept, earliest deadline first. (Moore and
    Hodgson: whenever one would be late, the longest so far is given up.) All others are late, and are served by their
    last deadlines, in the smallest share of the time that meets these, at most ``late_share``.

    ``ms_per_token`` is prefill time per token, at the rate at which prompts are really served.
    """
    arrival = [p.arrival_s for p in prompts]
    resumed = sorted((i for i, p in enumerate(prompts) if p.resumed), key=arrival.__getitem__)
    others = [i for i, p in enumerate(prompts) if not p.resumed]
    if all(prompts[i].deadline_s == math.inf for i in others):
        return Ranking(resumed, sorted(others, key=lambda i: (not prompts[i].started, arrival[i])), [], 0.0)
    seconds = [p.tokens_left * ms_per_token / 1e3 for p in prompts]
    in_time: list[tuple[float, bool, float, int]] = []
    last_s: dict[int, float] = {}
    late: list[tuple[float, int]] = []
    for i in others:
        due_s, last_s[i] = next_deadlines(prompts[i], now_s + seconds[i])
        if due_s is None:
            late.append((last_s[i], i))
        else:
            in_time.append((due_s, not prompts[i].started, arrival[i], i))
    in_time.sort()
    longest_first: list[tuple[int, int]] = []
    given_up: set[int] = set()
    rate, late_s = 1 - _late_share(late, seconds, now_s), sum(seconds[i] for _, i in late)
    start_s, work_s = now_s + sum(seconds[i] for i in resumed), 0.0
    for due_s, _, _, i in in_time:
        work_s += seconds[i]
        heappush(longest_first, (-prompts[i].tokens_left, i))
        # For a while, the late may have up to two periods more than their share, but never more than they need.
        if start_s + min(work_s / rate + 2 * TUNING.late_period_s, work_s + late_s) > due_s:
            _, dropped = heappop(longest_first)
            work_s -= seconds[dropped]
            given_up.add(dropped)
            late.append((last_s[dropped], dropped))
    kept = [i for *_, i in in_time if i not in given_up]
    return Ranking(resumed, kept, [i for _, i in sorted(late)], _late_share(late, seconds, now_s))


def wait_ms(prompts: Sequence[PromptLoad], newcomer: PromptLoad, now_s: float, ms_per_token: float) -> float:
    """Time until a prompt that comes now would be prefilled beside these, if no other came; its own time included."""
    resumed, kept, late, late_share = rank_prompts([*prompts, newcomer], now_s, ms_per_token)
    tokens = [p.tokens_left for p in (*prompts, newcomer)]
    is_kept = len(prompts) in kept
    order = kept if is_kept else kept + late
    before: float = sum(tokens[i] for i in order[: order.index(len(prompts)) + 1])
    if is_kept:  # the late get their share, but never more than they need
        before = min(before / (1 - late_share), before + sum(tokens[i] for i in late))
    return (sum(tokens[i] for i in resumed) + before) * ms_per_token


def next_deadlines(prompt: PromptLoad, earliest_s: float) -> tuple[float | None, float]:
    """A prompt's own or second deadline, the first that it can meet (None: neither), and its last one, in seconds."""
    allowance_s = prompt.deadline_s - prompt.arrival_s
    if allowance_s == math.inf:
        second_s = last_s = prompt.arrival_s + TUNING.patience_s
    else:
        last_s = prompt.arrival_s + max(TUNING.patience_s, TUNING.patience_allowances * allowance_s)
        if earliest_s <= prompt.deadline_s:
            return prompt.deadline_s, last_s
        second_s = prompt.arrival_s + TUNING.second_allowances * allowance_s
    return second_s if earliest_s <= second_s else None, last_s


def _late_share(late: list[tuple[float, int]], seconds: Sequence[float], now_s: float) -> float:
    """Share of the time with which prompts, each with its last deadline, would all end by then."""
    share = work_s = 0.0
    for last_s, i in sorted(late):
        work_s += seconds[i]
        if work_s >= TUNING.late_share * (last_s - now_s):
            return TUNING.late_share
        share = max(share, work_s / (last_s - now_s))
    return share


def spare_ms(load: Load, awaited_s: Iterable[tuple[float, float]], *, ms_per_token: float, layers: int) -> float:
    """Longest time that the loop may stop launching without missing a target that can be met; 0 for not at all.

    Sequences that decode can wait for their slack. A prompt can wait until it would end after its deadline, if prompts
    are served in their order at the recent rate. A prompt that is late in any case limits nothing.

    The load's slack must count every sequence with a target. ``awaited_s`` has, for each token in flight that it does
    not count, when it is expected and when it is due.
    """
    spare = math.inf if load.decode is None else load.decode.slack_ms
    ends = [(due_s - end_s) * 1e3 for end_s, due_s in awaited_s]
    end_ms = 0.0
    if load.chunk is not None:
        end_ms += load.chunk.tokens * load.chunk.layers_left / layers * ms_per_token
        ends.append((load.chunk.deadline_s - load.now_s) * 1e3 - end_ms)
    for prompt in load.prompts:
        end_ms += prompt.tokens_left * ms_per_token
        ends.append((prompt.deadline_s - load.now_s) * 1e3 - end_ms)
    return max(min([spare, *(left_ms for left_ms in ends if left_ms >= 0)]), 0.0)
