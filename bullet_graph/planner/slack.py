"""How much time running sequences have for their next tokens, and the order in which prompts are served."""

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappush, heappushpop
from typing import NamedTuple

from bullet_graph.planner.plan import DecodeLoad

BUDGET_HORIZON_TOKENS = 32
"""A lead or lag of a sequence is spread over so many tokens: soon enough for short outputs, without jumps."""

SLACK_HORIZON_TOKENS = 64
"""A long wait must be made good within so many tokens: an output may end before the most it is allowed."""

RESCUE_HORIZON_TOKENS = 256
"""A sequence counts as lost when it cannot be back on target within so many tokens, decoding alone."""

SAFETY_MARGIN = 0.03
"""Share of the time due that is kept in reserve, since a target missed by little is missed."""

SAFETY_TOKENS = 64
"""The reserve grows no further than that of so many tokens: errors of single steps even out."""

SAFETY_MS = 3.0
"""Kept in reserve besides: a single late token weighs on the TPOT of a short output, and cannot be made good."""

PATIENCE_S = 20.0
"""A late prompt waits at least so long before it goes ahead of those on time."""

PATIENCE_ALLOWANCES = 20.0
"""A late prompt waits at least so many times what its target allows before it goes ahead of those on time."""


class RowProgress(NamedTuple):
    """How far a sequence that decodes has come.

    Attributes:
        first_token_s: when its first token was out, on the engine's clock.
        num_tokens: output tokens so far, those in flight included; at least 1.
        tokens_left: most that may follow; None where unknown.
        tpot_ms: its target, None without one.
    """

    first_token_s: float
    num_tokens: int
    tokens_left: int | None
    tpot_ms: float | None


class QueuedPrompt(NamedTuple):
    """A prompt, or the rest of one, that waits.

    Attributes:
        tokens_left: tokens still to prefill.
        arrival_s: when it came, on the engine's clock.
        deadline_s: when its first token is due; infinite without a target.
        started: part of it is prefilled.
        resumed: it has emitted tokens before and is recomputed after a preemption.
    """

    tokens_left: int
    arrival_s: float
    deadline_s: float
    started: bool
    resumed: bool


def decode_load(
    rows: Iterable[tuple[float, int, int | None, float | None]],
    batch_size: int,
    kv_tokens: int,
    now_s: float,
    *,
    solo_ms: Callable[[int, int], float] | None,
) -> DecodeLoad:
    """Sum up the sequences that decode and what their TPOT targets leave them.

    Token k of a sequence (the first is 0) is on target while it is out by ``first_token_s + k · tpot``. Sequences that
    would miss their target even if nothing but decode ran from now on bind nothing: neither budget, nor slack, nor
    the tightest target.

    Args:
        rows: those with a target, at least; each as a :class:`RowProgress` is, which costs more to make than to use.
        batch_size: all that decode.
        kv_tokens: tokens that all of them attend to.
        now_s: when the interval to the next token begins: now, or when the tokens in flight are expected.
        solo_ms: time of a decode step of (batch size, tokens attended to) alone on the whole GPU; None where it is
            unknown: then no sequence is lost, and there is no slack beyond the budget.
    """
    solo = None if solo_ms is None else solo_ms(batch_size, kv_tokens)
    budget = slack = target = math.inf
    for first_token_s, num_tokens, left, tpot in rows:
        if tpot is None:
            continue
        far = RESCUE_HORIZON_TOKENS if left is None or left > RESCUE_HORIZON_TOKENS else left
        if far < 1:
            continue
        done = num_tokens - 1
        lag = (now_s - first_token_s) * 1e3 - done * tpot
        if solo is not None and lag + far * (solo - tpot) > 0:
            continue
        near = far if far < BUDGET_HORIZON_TOKENS else BUDGET_HORIZON_TOKENS
        due = done + near
        lag += (due if due < SAFETY_TOKENS else SAFETY_TOKENS) * tpot * SAFETY_MARGIN + SAFETY_MS
        interval = tpot - lag / near
        if interval < budget:
            budget = interval
        if tpot < target:
            target = tpot
        if solo is not None:
            far = far if far < SLACK_HORIZON_TOKENS else SLACK_HORIZON_TOKENS
            wait = far * tpot - lag - (far - 1) * solo
            if wait < slack:
                slack = wait
    return DecodeLoad(batch_size, kv_tokens, budget, budget if solo is None else slack, target)


def order_prompts(prompts: Sequence[QueuedPrompt], now_s: float, ms_per_token: float) -> list[int]:
    """Indices of the prompts in the order to serve them.

    Resumed prompts go first. Without deadlines the others follow first come, first served, those started before
    the rest. With deadlines: those that have waited beyond all patience, oldest first, so that nobody starves
    however many prompts on time keep coming; then as many as can meet their deadlines (Moore and Hodgson's choice:
    where one would be late, the longest so far is given up), earliest deadline first; then the late ones by arrival.

    Args:
        ms_per_token: prefill time of a token, at the rate that prompts are really served.
    """
    arrival = [p.arrival_s for p in prompts]
    resumed = sorted((i for i, p in enumerate(prompts) if p.resumed), key=arrival.__getitem__)
    others = [i for i, p in enumerate(prompts) if not p.resumed]
    if all(prompts[i].deadline_s == math.inf for i in others):
        return resumed + sorted(others, key=lambda i: (not prompts[i].started, arrival[i]))
    starving: list[int] = []
    patient: list[int] = []
    for i in others:
        waited_s = now_s - arrival[i]
        (starving if waited_s > PATIENCE_S and waited_s > _patience_s(prompts[i]) else patient).append(i)
    urgency = [(p.deadline_s, not p.started, p.arrival_s) for p in prompts]
    patient.sort(key=urgency.__getitem__)
    longest_first: list[tuple[int, int]] = []
    late: set[int] = set()
    end_s = now_s + sum(prompts[i].tokens_left for i in resumed + starving) * ms_per_token / 1e3
    for i in patient:
        tokens = prompts[i].tokens_left
        end_s += tokens * ms_per_token / 1e3
        if end_s <= prompts[i].deadline_s:
            heappush(longest_first, (-tokens, i))
        else:
            tokens, dropped = heappushpop(longest_first, (-tokens, i))
            end_s += tokens * ms_per_token / 1e3
            late.add(dropped)
    return (
        resumed
        + sorted(starving, key=arrival.__getitem__)
        + [i for i in patient if i not in late]
        + sorted(sorted(late), key=arrival.__getitem__)
    )


def _patience_s(prompt: QueuedPrompt) -> float:
    if prompt.deadline_s == math.inf:
        return PATIENCE_S
    return max(PATIENCE_S, PATIENCE_ALLOWANCES * (prompt.deadline_s - prompt.arrival_s))
