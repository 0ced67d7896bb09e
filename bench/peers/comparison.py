"""Runs of a comparison: all systems in turn at each rate, each run kept as soon as it has ended."""

import dataclasses
import gc
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime

from bench.peers.host import HostClock
from bench.peers.rates import Rates
from bench.peers.systems import Candidate, System
from bullet_graph.cli.bench.sweep_file import CellKey, SweepFile
from bullet_graph.engine.replay import Replay, TimedRequest, replay_async, timed_requests
from bullet_graph.errors import WorkloadError
from bullet_graph.perf.energy import DeviceMonitor, DeviceReport
from bullet_graph.perf.goodput_search import FASTEST_RATE
from bullet_graph.perf.replay_metrics import summarize_replay
from bullet_graph.slo import Slo
from bullet_graph.workloads import Workload
from bullet_graph.workloads.arrivals import arrival_times

_WARMUP_OUTPUT_TOKENS = 32
_MOST_RUNS = 1000
_MOST_REASONS_KEPT = 3


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and their targets.

    Attributes:
        workload: the requests, served at several rates.
        slo: their targets.
        new_rates: makes the rates of one system.
    """

    workload: Workload
    slo: Slo
    new_rates: Callable[[], Rates]


class Comparison:
    """All that is to be run, or what is left of it where the file has some already.

    Args:
        groups: candidates that are up at the same time and take turns; the groups follow one another.
        loads: in this order. A group serves each of them at one rate, then each at the next one: whoever stops early
            has something of all loads.
        open_system: starts what a group needs; given all the group's candidates that share it.
        file: keeps the runs.
        model: its name.
        vocab_size: of it.
        seed: of arrivals and prompts.
        num_warmups: unmeasured requests before a system's first run of a load.
        best_peer_only: a peer's setting is given up as soon as another setting of that peer has served enough at a
            rate that was too fast for it, since only the best of them counts.
        before_group: told of each group before any of it is started; None: nobody is.
        device_uuid: of the GPU to watch; None watches nothing.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Candidate]],
        loads: Sequence[Load],
        open_system: Callable[[Sequence[Candidate]], Awaitable[System]],
        file: SweepFile,
        *,
        model: str,
        vocab_size: int,
        seed: int,
        num_warmups: int,
        best_peer_only: bool = False,
        before_group: Callable[[Sequence[Candidate]], None] | None = None,
        device_uuid: str | None,
    ) -> None:
        self._groups = groups
        self._loads = loads
        self._open_system = open_system
        self._file = file
        self._model = model
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_warmups = num_warmups
        self._best_peer_only = best_peer_only
        self._before_group = before_group
        self._device_uuid = device_uuid
        self._rates = {self._key(c, load): load.new_rates() for g in groups for c in g for load in loads}
        for key, rates in self._rates.items():
            for run in file.runs(key):
                rates.record(run["request_rate"], run["slo_attainment"])

    async def run(self) -> None:
        """Serve until all rates are done.

        Raises:
            EngineDeadError: a system failed as a whole.
            WorkloadError: a system could serve none of a run's requests.
        """
        for group in self._groups:
            if any(self._next_rate(c, load) is not None for c in group for load in self._loads):
                await self._run_group(group)
        for load in self._loads:
            self._finish_cells(load)
        self._file.finish()

    async def _run_group(self, group: Sequence[Candidate]) -> None:
        if self._before_group is not None:
            self._before_group(group)
        async with AsyncExitStack() as stack:
            systems: dict[object, System] = {}
            # Ours first: it counts all memory in use as its own, and the peers count their own alone.
            for candidate in sorted(group, key=lambda c: c.kind != "own"):
                if candidate.resident not in systems:
                    sharing = [c for c in group if c.resident == candidate.resident]
                    tell(f"starting {' + '.join(c.label for c in sharing)}")
                    system = systems[candidate.resident] = await self._open_system(sharing)
                    stack.push_async_callback(system.close)
            warm: set[CellKey] = set()
            while any(
                self._next_rate(candidate, load) is not None for candidate in group for load in self._loads
            ):
                for load in self._loads:
                    left = [candidate for candidate in group if self._next_rate(candidate, load) is not None]
                    for candidate in left:
                        if self._key(candidate, load) not in warm:
                            await self._warm_up(candidate, systems[candidate.resident], load)
                            warm.add(self._key(candidate, load))
                    for candidate in left:
                        # Those before it in this turn may have shown that it cannot be the best.
                        rate = self._next_rate(candidate, load)
                        if rate is not None:
                            await self._run_once(candidate, systems[candidate.resident], load, rate)

    async def _warm_up(self, candidate: Candidate, system: System, load: Load) -> None:
        first = load.workload.requests[: self._num_warmups]
        if not first:
            return
        short = [
            dataclasses.replace(
                r, output_tokens=min(r.output_tokens, _WARMUP_OUTPUT_TOKENS), prompt_token_ids=None
            )
            for r in first
        ]
        await system.configure(candidate.setting, load.slo)
        seed = self._seed + _MOST_RUNS * (len(self._loads) + self._loads.index(load))
        requests = self._requests(
            dataclasses.replace(load.workload, requests=tuple(short)), math.inf, load.slo, seed
        )
        _require_some(await replay_async(system, requests), candidate, load)

    async def _run_once(self, candidate: Candidate, system: System, load: Load, rate: float) -> None:
        key = self._key(candidate, load)
        # Other prompts in each run, the same for every system: a server may keep a cache of prefixes.
        run = len(self._file.runs(key))
        prompt_seed = self._seed + _MOST_RUNS * self._loads.index(load) + run
        actual_rate = math.inf if rate >= FASTEST_RATE else rate
        requests = self._requests(load.workload, actual_rate, load.slo, prompt_seed)
        await system.configure(candidate.setting, load.slo)
        # One process holds several systems: looking through all their objects would stop each of them for long.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        started, host = datetime.now(), HostClock()
        with DeviceMonitor.for_gpu(self._device_uuid) as monitor:
            replayed = await replay_async(system, requests)
        host_use = host.use()
        _require_some(replayed, candidate, load)
        result = summarize_replay(
            replayed.served,
            duration_s=replayed.duration_s,
            started=started,
            backend=candidate.label,
            model_id=self._model,
            request_rate=actual_rate,
            burstiness=1.0 if math.isfinite(actual_rate) else None,
        )
        # Without targets, to be served is all that is asked.
        attainment = sum(r.meets_slo for r in replayed.served) / len(replayed.served)
        fields = result.fields() | {
            "request_rate": rate,
            "all_at_once": math.isinf(actual_rate),
            "slo_attainment": attainment,
            "prompt_seed": prompt_seed,
            "failures": _failures(replayed),
            **_energy(monitor.report, result.total_input_tokens + result.total_output_tokens),
            "device": dataclasses.asdict(monitor.report),
            "host": None if host_use is None else dataclasses.asdict(host_use),
            "system_settings": dict(system.settings),
            "system_counters": dict(system.counters()),
        }
        self._file.add_run(key, fields)
        self._rates[key].record(rate, attainment)
        when = "all at once" if math.isinf(actual_rate) else f"at {rate:.4g}/s"
        tell(
            f"{key.workload}, {key.slo}, {candidate.label}, {when}: {100 * attainment:.1f} % met, "
            f"{result.output_throughput:,.0f} output tokens/s"
        )
        self._finish_cells(load)

    def _requests(self, workload: Workload, rate: float, slo: Slo, prompt_seed: int) -> list[TimedRequest]:
        times = arrival_times(len(workload.requests), request_rate=rate, seed=self._seed)
        return timed_requests(workload, times, vocab_size=self._vocab_size, slo=slo, seed=prompt_seed)

    def _next_rate(self, candidate: Candidate, load: Load) -> float | None:
        rates = self._rates[self._key(candidate, load)]
        return None if self._is_beaten(candidate, load, rates.ceiling) else rates.next_rate()

    def _finish_cells(self, load: Load) -> None:
        """Keep what the searches found that are over: a run may end those of others, too."""
        for candidate in (c for group in self._groups for c in group):
            key = self._key(candidate, load)
            if self._next_rate(candidate, load) is None and not self._file.cell(key).finished:
                self._file.finish_cell(key, self._rates[key].goodput)

    def _is_beaten(self, candidate: Candidate, load: Load, ceiling: float | None) -> bool:
        if not self._best_peer_only or candidate.kind == "own" or ceiling is None:
            return False
        others = (c for g in self._groups for c in g if c.resident == candidate.resident and c != candidate)
        return any((self._rates[self._key(other, load)].goodput or 0.0) >= ceiling for other in others)

    @staticmethod
    def _key(candidate: Candidate, load: Load) -> CellKey:
        return CellKey(candidate.label, load.workload.name, len(load.workload.requests), str(load.slo))


def tell(message: str) -> None:
    """Say on stderr what goes on."""
    print(message, file=sys.stderr, flush=True)


def _require_some(replayed: Replay, candidate: Candidate, load: Load) -> None:
    reasons = [request.error for request in replayed.served if request.error is not None]
    if len(reasons) == len(replayed.served):
        raise WorkloadError(
            f"{candidate.label} could serve none of {len(reasons)} requests of {load.workload.name}; "
            f"the first: {reasons[0]}"
        )


def _failures(replayed: Replay) -> dict[str, int]:
    """The commonest reasons of failures, and how often each came."""
    reasons = Counter(request.error for request in replayed.served if request.error is not None)
    return dict(reasons.most_common(_MOST_REASONS_KEPT))


def _energy(device: DeviceReport, num_tokens: int) -> dict[str, float | None]:
    joules = device.energy_joules
    return {"energy_joules": joules, "joules_per_token": None if joules is None else joules / num_tokens}
