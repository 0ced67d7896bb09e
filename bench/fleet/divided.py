"""A fleet that is divided in virtual time: some machines prefill, the others decode, and KV blocks go over links.

Three simplifications favour dividing: launches cost the host nothing, prefill machines never evict a prefix, and decode
machines reserve blocks as if they knew each output's length. A prefix counts only on the machine that the router chose
for it. No torch.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop
from itertools import islice
from typing import Any

import numpy as np

from bench.fleet.shared import Fleet, Outcome, Traffic, in_processes
from bullet_graph.engine.replay import Replay, require_forced_length
from bullet_graph.errors import ConfigError, RequestError
from bullet_graph.perf.metrics import RequestMetrics, ServedRequest
from bullet_graph.perf.performance import PerformanceModel, attention_pairs
from bullet_graph.planner.plan import PromptLoad
from bullet_graph.planner.slack import order_prompts
from bullet_graph.workloads import WorkloadRequest

_IN_SIGHT = 128
"""Prompts that a prefill machine ranks at once: one with a longer queue is lost anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Of each machine to all others, each way: bandwidth in GB/s (10⁹ bytes), and the latency of a transfer."""

    gb_per_s: float
    latency_ms: float = 0.5

    def __post_init__(self) -> None:
        if not self.gb_per_s > 0 or not 0 <= self.latency_ms < math.inf:
            raise ConfigError(
                f"a link needs a bandwidth above 0 GB/s and a latency of at least 0 ms, got {self.gb_per_s} and "
                f"{self.latency_ms}"
            )


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts that are served, and where they go on.

    Attributes:
        order: indices of all requests in the order of their first tokens.
        source, target: by request, the machine that prefills it, and the one that decodes it.
        arrivals_s, first_s: by request, when it arrives and when its first token is out.
        lacking: by request, tokens of its prompt that the target has not.
        prompt_tokens, cached_tokens: of all prompts, and of these those that their source had already.
        refused: requests that no engine could serve, by index.
    """

    prefill_machines: int
    order: Sequence[int]
    source: Sequence[int]
    target: Sequence[int]
    arrivals_s: Sequence[float]
    first_s: Sequence[float]
    lacking: Sequence[int]
    prompt_tokens: int
    cached_tokens: int
    refused: Mapping[int, ServedRequest]


def require_both_kinds(machines: int, prefill_machines: int) -> None:
    """ConfigError where no machine is left to prefill or decode."""
    if not 0 < prefill_machines < machines:
        raise ConfigError(
            f"a divided fleet needs at least one machine of each kind: prefill_machines={prefill_machines} must be "
            f"from 1 to {machines - 1}"
        )


def prefill(fleet: Fleet, traffic: Traffic, prefill_machines: int) -> Prefilled:
    """Serve the prompts of a workload on so many machines of a fleet, all of which are simulated.

    A later turn comes when its turn before ends by the router's estimate. Prefill machines have the prompts of earlier
    turns, and not the tokens that were generated elsewhere. ConfigError where no machine is left to prefill or decode.
    """
    require_both_kinds(fleet.machines, prefill_machines)
    prefill_s, tpot_s = fleet.prefill_s_per_token, fleet.tpot_s
    free_s = [0.0] * prefill_machines

    def estimate(machine: int, now_s: float, request: WorkloadRequest, cached: int) -> tuple[float, float, float]:
        load = (request.prompt_tokens - cached) * prefill_s
        free_s[machine] = first_s = max(free_s[machine], now_s) + load
        return load, first_s, first_s + request.output_tokens * tpot_s

    requests = traffic.workload.requests
    router = fleet.make_router(prefill_machines, [r.prompt_tokens * prefill_s for r in requests])
    routes = traffic.route(router, estimate, with_outputs=False)
    refused: dict[int, ServedRequest] = {}
    prompts: list[list[tuple[float, int, int, float]]] = [[] for _ in range(prefill_machines)]
    indices: list[list[int]] = [[] for _ in range(prefill_machines)]
    sent = [index for index, machine in enumerate(routes.machine) if machine >= 0]
    sent.sort(key=routes.arrivals_s.__getitem__)
    for index in sent:
        request, arrival_s = requests[index], routes.arrivals_s[index]
        try:
            require_forced_length(request.prompt_tokens, request.output_tokens, fleet.engine.max_model_len)
        except RequestError as error:
            metrics = RequestMetrics(arrival_s, None, ())
            refused[index] = ServedRequest(request.prompt_tokens, 0, metrics, fleet.slo, str(error))
            continue
        deadline_s = arrival_s + fleet.slo.ttft_limit_ms(request.prompt_tokens) / 1e3
        cached = routes.cached[index]
        indices[routes.machine[index]].append(index)
        prompts[routes.machine[index]].append((arrival_s, request.prompt_tokens - cached, cached, deadline_s))
    times = np.zeros(len(requests))

    def serve(machine: int) -> tuple[int, Sequence[float]]:
        most = fleet.engine.config.max_num_batched_tokens
        return machine, prefill_machine(fleet.model, prompts[machine], most, prefill_s * 1e3)

    for machine, first_s in in_processes(serve, range(prefill_machines), fleet.processes):
        times[indices[machine]] = first_s
    done = np.array([index for index in sent if index not in refused], dtype=np.int64)
    order, out_s = done[np.argsort(times[done], kind="stable")].tolist(), times.tolist()
    # Where each goes on is decided once its first token is out, whatever the link is.
    contexts = [r.prompt_tokens + r.output_tokens for r in requests]
    router = fleet.make_router(fleet.machines - prefill_machines, contexts)
    target, lacking = [-1] * len(requests), [0] * len(requests)
    for index in order:
        request, keys = requests[index], traffic.keys(index)
        target[index], depth = router.choose(out_s[index], keys)
        cached = traffic.cached(index, depth, with_outputs=True) if depth else 0
        lacking[index] = request.prompt_tokens - cached
        end_s = out_s[index] + request.output_tokens * tpot_s
        router.take(target[index], traffic.held(index), contexts[index], end_s)
    return Prefilled(
        prefill_machines,
        order,
        routes.machine,
        target,
        routes.arrivals_s,
        out_s,
        lacking,
        sum(requests[index].prompt_tokens for index in sent),
        sum(routes.cached[index] for index in sent),
        refused,
    )


def decode(fleet: Fleet, traffic: Traffic, prefilled: Prefilled, link: Link, kv_bytes_per_token: int) -> Outcome:
    """Send the prompts' KV blocks to the fleet's other machines, a sample of which then decodes to the end.

    A first token goes to the user when its prefill ends, so a transfer delays the second one. Each machine sends, and
    each receives, one transfer after the other. A decode machine that has the turn before gets only what it lacks.
    """
    requests, machines = traffic.workload.requests, fleet.machines - prefilled.prefill_machines
    sampled = {machine: number for number, machine in enumerate(fleet.sampled(machines))}
    rows: list[list[tuple[float, int, int]]] = [[] for _ in sampled]
    indices: list[list[int]] = [[] for _ in sampled]
    out_s, in_s = [0.0] * prefilled.prefill_machines, [0.0] * machines
    s_per_token, latency_s, waited_s = kv_bytes_per_token / link.gb_per_s / 1e9, link.latency_ms / 1e3, 0.0
    source, target, lacking, first_s = prefilled.source, prefilled.target, prefilled.lacking, prefilled.first_s
    for index in prefilled.order:
        sender, receiver, seconds = source[index], target[index], lacking[index] * s_per_token
        # A transfer that waits for its receiver does not hold up the sender.
        begin_s = max(first_s[index], out_s[sender])
        out_s[sender] = begin_s + seconds
        in_s[receiver] = max(begin_s, in_s[receiver]) + seconds
        ready_s = max(out_s[sender], in_s[receiver]) + latency_s
        waited_s += ready_s - first_s[index]
        if receiver in sampled:
            request = requests[index]
            indices[sampled[receiver]].append(index)
            rows[sampled[receiver]].append((ready_s, request.prompt_tokens, request.output_tokens - 1))

    def serve(number: int) -> tuple[int, list[Sequence[float]]]:
        engine = fleet.engine
        return number, decode_machine(fleet.model, rows[number], engine.config.max_num_seqs, engine.kv_cache_tokens)

    refused = enumerate(prefilled.refused.items())
    served = {index: request for place, (index, request) in refused if place % machines in sampled}
    for number, times in in_processes(serve, range(len(rows)), fleet.processes):
        for index, later_s in zip(indices[number], times, strict=True):
            request = requests[index]
            metrics = RequestMetrics(prefilled.arrivals_s[index], None, (first_s[index], *later_s))
            served[index] = ServedRequest(request.prompt_tokens, request.output_tokens, metrics, fleet.slo)
    order = tuple(sorted(served))
    counters: dict[str, Any] = {
        "simulated_machines": prefilled.prefill_machines + len(sampled),
        "prefill_machines": prefilled.prefill_machines,
        "prefix_cache_queries": prefilled.prompt_tokens,
        "prefix_cache_hits": prefilled.cached_tokens,
        "mean_transfer_ms": waited_s / max(len(prefilled.order), 1) * 1e3,
    }
    return Outcome(order, Replay(tuple(served[index] for index in order), 0.0), counters)


# ---- machines of one kind ----


def prefill_machine(
    model: PerformanceModel, prompts: Sequence[tuple[float, int, int, float]], max_tokens: int, ms_per_token: float
) -> list[float]:
    """When each prompt's first token is out, in s. A prompt: arrival in s, tokens to compute, tokens cached, deadline.

    Prompts are in order of arrival. Forwards have at most ``max_tokens`` rows, in the order and of the size that the
    engine takes, which fills a forward while the one before it runs.
    """
    first_s, queue = [0.0] * len(prompts), dict[int, PromptLoad]()
    whole = model.wave_chunk_tokens(max_tokens)
    begin_s, end_s, coming, queued = 0.0, 0.0, 0, 0
    while coming < len(prompts) or queue:
        now_s = begin_s if queue else max(begin_s, prompts[coming][0])
        while coming < len(prompts) and prompts[coming][0] <= now_s:
            arrival_s, tokens, cached, deadline_s = prompts[coming]
            queue[coming] = PromptLoad(tokens, cached, deadline_s, arrival_s)
            queued += tokens
            coming += 1
        numbers = list(islice(queue, _IN_SIGHT))
        order = order_prompts([queue[number] for number in numbers], now_s, ms_per_token)
        budget = min(queued, whole)
        rows, pairs, ended = 0, 0.0, []
        for number in (numbers[place] for place in order):
            prompt = queue[number]
            taken = min(prompt.tokens_left, budget - rows)
            rows, pairs = rows + taken, pairs + attention_pairs(taken, prompt.tokens_cached)
            if taken == prompt.tokens_left:
                ended.append(number)
            else:
                left, cached = prompt.tokens_left - taken, prompt.tokens_cached + taken
                queue[number] = prompt._replace(tokens_left=left, tokens_cached=cached, started=True)
            if rows == budget:
                break
        begin_s = max(end_s, now_s)
        end_s = begin_s + model.prefill(rows, pairs).ms / 1e3
        queued -= rows
        for number in ended:
            first_s[number] = end_s
            del queue[number]
    return first_s


def decode_machine(
    model: PerformanceModel, rows: Sequence[tuple[float, int, int]], max_num_seqs: int, kv_cache_tokens: int
) -> list[Sequence[float]]:
    """When each token of each sequence is out, in s. A row: when its blocks are here, their tokens, tokens to generate.

    Sequences wait, in that order, while there are ``max_num_seqs`` or the KV cache is full.
    """
    coming = [(ready_s, number) for number, (ready_s, _, left) in enumerate(rows) if left]
    heapify(coming)
    waiting: deque[int] = deque()
    starts, ends = dict[int, int](), defaultdict[int, list[int]](list)
    times: list[Sequence[float]] = [()] * len(rows)
    steps_s: list[float] = []
    now_s, kv_tokens, reserved = 0.0, 0, 0
    while coming or waiting or starts:
        if not waiting and not starts:
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            waiting.append(heappop(coming)[1])
        while waiting and len(starts) < max_num_seqs:
            _, tokens, left = rows[waiting[0]]
            if starts and reserved + tokens + left > kv_cache_tokens:
                break
            number = waiting.popleft()
            starts[number] = len(steps_s)
            ends[len(steps_s) + left].append(number)
            kv_tokens, reserved = kv_tokens + tokens, reserved + tokens + left
        kv_tokens += len(starts)
        now_s += model.decode(len(starts), kv_tokens).ms / 1e3
        steps_s.append(now_s)
        for number in ends.pop(len(steps_s), ()):
            _, tokens, left = rows[number]
            times[number] = steps_s[starts.pop(number) :]
            kv_tokens, reserved = kv_tokens - tokens - left, reserved - tokens - left
    return times


# ---- how many of each kind ----


def balanced(fleet: Fleet, traffic: Traffic) -> int:
    """The number of prefill machines by arithmetic: their share is that of prefill in all work at the TPOT target."""
    requests, prompts = traffic.workload.requests, sum(r.prompt_tokens for r in traffic.workload.requests)
    outputs = sum(r.output_tokens for r in requests)
    context = (prompts + outputs / 2) / len(requests)
    if fleet.finds_prefixes and traffic.shares_prefixes:
        prompts -= traffic.workload.shareable_prompt_tokens
    sizes = (2**power for power in range(fleet.engine.config.max_num_seqs.bit_length()))
    steps = ((rows, fleet.model.decode(rows, int(rows * context)).ms / 1e3) for rows in sizes)
    rows, step_s = max((step for step in steps if step[1] <= fleet.tpot_s), default=(1, fleet.tpot_s))
    prefill_s, decode_s = prompts * fleet.prefill_s_per_token, outputs * step_s / rows
    return min(max(round(fleet.machines * prefill_s / (prefill_s + decode_s)), 1), fleet.machines - 1)


def best_split(share: Callable[[int], float], machines: int, first: int, step: int, enough: float = 1.0) -> int:
    """The number of prefill machines with the highest share of requests on time, by hill climbing from ``first``.

    Steps are halved down to 1 % of the machines; a share of ``enough`` ends the climb. The share must have one peak,
    or what is found may be a lower one.
    """
    best, known, least = first, {first: share(first)}, max(machines // 100, 1)
    step = max(step, least)
    while known[best] < enough:
        before = best
        for near in (best - step, best + step):
            if 0 < near < machines and near not in known:
                known[near] = share(near)
                if known[near] > known[best]:
                    best = near
                    break
        if best == before:
            if step == least:
                break
            step = max(step // 2, least)
    return best
