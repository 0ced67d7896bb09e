"""A fleet in virtual time: which machine gets which request, by estimates, and machines that each share their GPU.

Routing needs no simulation, only estimates of how busy each machine is. Then every machine is simulated by itself, in
several processes, and a sample of the machines stands for a large fleet. No torch.
"""

import dataclasses
import itertools
import math
import multiprocessing
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.engine.replay import Replay
from bullet_graph.engine.simulation import Simulation, SimulationSettings, simulate
from bullet_graph.errors import ConfigError, InsufficientMemoryError
from bullet_graph.perf.metrics import ServedRequest
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.routing import PrefixHolders
from bullet_graph.slo import Slo
from bullet_graph.workloads import Workload, WorkloadRequest
from bullet_graph.workloads.workload import Times, TurnBefore

RouterName = Literal["prefix", "least-load"]
_SLACK_REQUESTS = 16.0
"""Load, in mean requests, by which a machine that holds a prefix may be ahead of the least busy one."""

_TPOT_SHARE = 0.8
"""Of the TPOT target, that tokens take in estimates."""
_USUAL_ROWS, _USUAL_CONTEXT = 64, 1000
"""Of a decode step, in estimates without a TPOT target."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """``machines`` alike, of one GPU each, behind a router; ``sample`` of them (None: all) are simulated.

    ``processes`` simulate at once. ConfigError for fewer than one machine, or a sample that is no part of them.
    """

    model: PerformanceModel
    engine: SimulationSettings
    slo: Slo
    machines: int
    router: RouterName = "prefix"
    sample: int | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        if self.machines < 1 or (self.sample is not None and not 1 <= self.sample <= self.machines):
            raise ConfigError(
                f"a fleet needs at least 1 machine, and a sample of 1 to all of them, got machines={self.machines} "
                f"and sample={self.sample}"
            )

    def sampled(self, machines: int) -> list[int]:
        """The machines, of so many, that are simulated."""
        count = machines if self.sample is None else min(self.sample, machines)
        return sorted(random.Random(self.engine.config.seed).sample(range(machines), count))

    @property
    def finds_prefixes(self) -> bool:
        """Whether requests go where a prefix is, and find it there."""
        return self.router == "prefix" and self.engine.config.prefix_caching

    def make_router(self, machines: int, loads: Sequence[float]) -> "Router":
        """A router to so many machines, for requests of these loads."""
        return Router(machines, self.finds_prefixes, _SLACK_REQUESTS * float(np.mean(loads)))

    @property
    def prefill_s_per_token(self) -> float:
        """Of a prompt in whole chunks, alone."""
        rows = self.model.wave_chunk_tokens(self.engine.config.max_num_batched_tokens)
        return self.model.prefill(rows, rows * rows / 2).ms / rows / 1e3

    @property
    def decode_s_per_token(self) -> float:
        """What one more row adds to a decode step."""
        few, many = (self.model.decode(n, n * _USUAL_CONTEXT).ms for n in (_USUAL_ROWS, 2 * _USUAL_ROWS))
        return (many - few) / _USUAL_ROWS / 1e3

    @property
    def tpot_s(self) -> float:
        """Time between two tokens, estimated."""
        if self.slo.tpot_ms is not None:
            return _TPOT_SHARE * self.slo.tpot_ms / 1e3
        return self.model.decode(_USUAL_ROWS, _USUAL_ROWS * _USUAL_CONTEXT).ms / 1e3


class Routes(NamedTuple):
    """By request: its machine (-1: not sent, as it would come after the last conversation begins), and estimates.

    ``arrivals_s`` is when it comes, and ``cached`` the tokens of its prompt that the machine has.
    """

    machine: list[int]
    arrivals_s: list[float]
    cached: list[int]


class Outcome(NamedTuple):
    """Requests of a sample of machines by their index in the workload, as :class:`Replay` has them, and counters."""

    indices: tuple[int, ...]
    replay: Replay
    counters: Mapping[str, Any]


# ---- routing ----


class Router:
    """Chooses machines by the prompts that they hold and by their load, which is estimated: when each request ends."""

    def __init__(self, machines: int, by_prefix: bool, slack: float) -> None:
        self.load = [0.0] * machines
        self._holders = PrefixHolders[int](most_keys=1 << 62) if by_prefix else None
        self._slack = slack
        self._turn = itertools.count()
        # Of equals, the one that has waited longest for work; entries with another load than the present are void.
        self._least = [(0.0, next(self._turn), machine) for machine in range(machines)]
        self._ends: list[tuple[float, int, float]] = []

    def choose(self, now_s: float, keys: Sequence[Hashable]) -> tuple[int, int]:
        """The machine for a request that comes now, and how many of the keys it holds; times never fall."""
        while self._ends and self._ends[0][0] <= now_s:
            _, machine, load = heappop(self._ends)
            self._change(machine, -load)
        while self._least[0][0] != self.load[self._least[0][2]]:
            heappop(self._least)
        least = self._least[0][2]
        if self._holders is None or not keys:
            return least, 0
        return self._holders.choose(keys, least, self.load.__getitem__, self._slack)

    def take(self, machine: int, keys: Sequence[Hashable], load: float, end_s: float) -> None:
        """Note that a machine has a request until a time, and holds its prefixes from now on."""
        if self._holders is not None:
            self._holders.add(keys, machine)
        self._change(machine, load)
        heappush(self._ends, (end_s, machine, load))

    def _change(self, machine: int, load: float) -> None:
        self.load[machine] += load
        heappush(self._least, (self.load[machine], next(self._turn), machine))


def repeated(workload: Workload, num_requests: int, most_new: int) -> Workload:
    """So many requests: up to ``most_new`` of the workload's, then the same lengths again, with prompts of their own.

    Conversations begin anew. Recorded prompts, and pieces that have names, come again as they are.
    """
    own = workload.first(min(num_requests, most_new)).requests
    requests = list(own)
    while len(requests) < num_requests:
        offset = len(requests)
        for request in own[: num_requests - offset]:
            if (before := request.follows) is not None:
                follows = TurnBefore(before.index + offset, before.num_tokens, before.think_s)
                request = dataclasses.replace(request, follows=follows)
            requests.append(request)
    return Workload(workload.name, tuple(requests))


@dataclass(frozen=True)
class Traffic:
    """A workload and when its first turns arrive, seconds from the start: what is routed."""

    workload: Workload
    times: Times

    @cached_property
    def roots(self) -> list[int]:
        """Each request's first turn."""
        roots: list[int] = []
        for index, request in enumerate(self.workload.requests):
            roots.append(index if request.follows is None else roots[request.follows.index])
        return roots

    @cached_property
    def followers(self) -> Mapping[int, list[int]]:
        """The turns that follow each turn."""
        found = defaultdict(list)
        for index, request in enumerate(self.workload.requests):
            if request.follows is not None:
                found[request.follows.index].append(index)
        return found

    @cached_property
    def shares_prefixes(self) -> bool:
        return self.workload.shares_prefixes

    def keys(self, index: int) -> list[Hashable]:
        """Of what a request's prompt begins with: its first turn's pieces, then the turn before."""
        if not self.shares_prefixes:
            return []
        request, root = self.workload.requests[index], self.workload.requests[self.roots[index]]
        pieces = root.prefix_ids
        keys: list[Hashable] = [pieces[: depth + 1] for depth in range(len(pieces))]
        return keys if request.follows is None else [*keys, request.follows.index]

    def held(self, index: int) -> list[Hashable]:
        """What a machine holds that has served a request: also the turn itself, if another follows."""
        keys = self.keys(index)
        return [*keys, index] if index in self.followers else keys

    def cached(self, index: int, depth: int, *, with_outputs: bool) -> int:
        """Prompt tokens, in whole blocks, that a machine has which holds so many of the keys.

        ``with_outputs``: it has the tokens that the turn before generated, too.
        """
        request, root = self.workload.requests[index], self.workload.requests[self.roots[index]]
        tokens = depth * root.prefix_tokens
        if depth > len(root.prefix_ids) and request.follows is not None:
            before = self.workload.requests[request.follows.index]
            tokens = request.follows.num_tokens - 1 if with_outputs else before.prompt_tokens
        return min(tokens, request.prompt_tokens - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS

    def route(
        self,
        router: Router,
        estimate: Callable[[int, float, WorkloadRequest, int], tuple[float, float, float]],
        *,
        with_outputs: bool,
    ) -> Routes:
        """Give each request to a machine, in the order in which they come by estimates.

        ``estimate`` says what a request (machine, time in s, request, cached tokens) adds to the machine's load, until
        when, and when its last token is out. A later turn comes once its user has thought after that.
        """
        requests = self.workload.requests
        routes = Routes([-1] * len(requests), [math.inf] * len(requests), [0] * len(requests))
        firsts = iter([(float(self.times[i]), i) for i, r in enumerate(requests) if r.follows is None])
        last_s = float(self.times[-1]) or math.inf
        later: list[tuple[float, int]] = []
        first = next(firsts, None)
        while first is not None or later:
            if first is not None and (not later or first <= later[0]):
                (now_s, index), first = first, next(firsts, None)
            else:
                now_s, index = heappop(later)
            request, keys = requests[index], self.keys(index)
            machine, depth = router.choose(now_s, keys)
            cached = self.cached(index, depth, with_outputs=with_outputs) if depth else 0
            load, until_s, end_s = estimate(machine, now_s, request, cached)
            router.take(machine, self.held(index), load, until_s)
            routes.machine[index], routes.arrivals_s[index], routes.cached[index] = machine, now_s, cached
            for follower in self.followers.get(index, ()):
                follows = requests[follower].follows
                assert follows is not None
                if (arrival_s := end_s + follows.think_s) <= last_s:
                    heappush(later, (arrival_s, follower))
        return routes


# ---- machines that share their GPU ----


def share(fleet: Fleet, traffic: Traffic) -> Outcome:
    """Serve a workload on machines that each prefill and decode: one engine's simulation for each of the sample.

    A machine's later turns come when its own turns before have ended. A turn that the router moves to another machine
    comes there by the router's estimate. One machine gives what :func:`~bullet_graph.engine.simulation.simulate` does.
    """
    prefill_s, decode_s, tpot_s = fleet.prefill_s_per_token, fleet.decode_s_per_token, fleet.tpot_s

    def estimate(_: int, now_s: float, request: WorkloadRequest, cached: int) -> tuple[float, float, float]:
        first_s, tokens = (request.prompt_tokens - cached) * prefill_s, request.output_tokens
        end_s = now_s + first_s + tokens * tpot_s
        return first_s + tokens * decode_s, end_s, end_s

    loads = [r.prompt_tokens * prefill_s + r.output_tokens * decode_s for r in traffic.workload.requests]
    routes = traffic.route(fleet.make_router(fleet.machines, loads), estimate, with_outputs=True)
    indices_of = _by_machine(traffic, routes, fleet.machines)

    def serve(machine: int) -> tuple[list[int], Simulation] | None:
        indices, workload, times = _part(traffic, routes, indices_of[machine])
        return (indices, simulate(fleet.model, workload, times, fleet.engine, slo=fleet.slo)) if indices else None

    machines = fleet.sampled(fleet.machines)
    served: dict[int, ServedRequest] = {}
    unsent: list[int] = []
    counters = dict.fromkeys(("num_steps", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"), 0)
    for indices, (replayed, stats) in filter(None, in_processes(serve, machines, fleet.processes)):
        unsent += [indices[local] for local in replayed.unsent]
        left = set(unsent)
        served.update(zip((index for index in indices if index not in left), replayed.served, strict=True))
        counters = {name: value + getattr(stats, name) for name, value in counters.items()}
    order = tuple(sorted(served))
    replay = Replay(tuple(served[index] for index in order), 0.0, tuple(sorted(unsent)))
    return Outcome(order, replay, {"simulated_machines": len(machines), **counters})


def _by_machine(traffic: Traffic, routes: Routes, machines: int) -> list[list[int]]:
    """Each machine's requests, in the workload's order; one that is not sent is its turn before's machine's."""
    found: list[list[int]] = [[] for _ in range(machines)]
    for index, request in enumerate(traffic.workload.requests):
        if routes.machine[index] < 0:
            assert request.follows is not None
            routes.machine[index] = routes.machine[request.follows.index]
        found[routes.machine[index]].append(index)
    return found


def _part(traffic: Traffic, routes: Routes, indices: Sequence[int]) -> tuple[list[int], Workload, Times]:
    """A machine's requests in order of arrival, as a workload of their own, and when they arrive."""
    requests, here = traffic.workload.requests, set(indices)
    begins: dict[int, int] = {}
    for index in indices:
        follows = requests[index].follows
        begins[index] = index if follows is None or follows.index not in here else begins[follows.index]

    def time_s(index: int) -> float:
        first = begins[index]
        return float(traffic.times[first]) if requests[first].follows is None else routes.arrivals_s[first]

    ordered = sorted(indices, key=lambda index: (time_s(index), begins[index], index))
    local = {index: number for number, index in enumerate(ordered)}
    part = []
    for index in ordered:
        request = requests[index]
        if request.follows is not None and begins[index] == index:
            # It has come from another machine, with nothing but the pieces that all prompts may share.
            root = requests[traffic.roots[index]]
            lengths = request.prompt_tokens, request.output_tokens
            request = WorkloadRequest(*lengths, None, None, root.prefix_ids, root.prefix_tokens)
        elif request.follows is not None:
            follows = dataclasses.replace(request.follows, index=local[request.follows.index])
            request = dataclasses.replace(request, follows=follows)
        part.append(request)
    return ordered, Workload(traffic.workload.name, tuple(part)), np.array([time_s(index) for index in ordered])


# ---- processes ----


def in_processes(work: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[R]:
    """The results of all items, in no order, from so many processes at once; an error there is raised here."""
    count = min(processes, len(items))
    if count <= 1:
        yield from map(work, items)
        return
    # Forked: they see the models and the workload as they are, and none of it is sent.
    context = multiprocessing.get_context("fork")

    def serve(part: Sequence[T], results: Connection) -> None:
        try:
            results.send((list(map(work, part)), None))
        except Exception as error:
            results.send(([], error))

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interrupt ends the workers, too
    workers = {}
    for number in range(count):
        here, there = context.Pipe(duplex=False)
        workers[here] = context.Process(target=serve, args=(items[number::count], there), daemon=True)
        workers[here].start()
        there.close()
    try:
        for here in workers:
            found, error = here.recv()
            if error is not None:
                raise error
            yield from found
    except EOFError:
        raise InsufficientMemoryError("a simulating process died (out of memory?): give fewer --processes") from None
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()
