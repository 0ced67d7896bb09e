"""``bullet-graph fleet``: a trace on many GPUs that need not be there, each shared or the fleet divided."""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import click

from bullet_graph.cli.options import COUNT, result_options
from bullet_graph.cli.replay_options import (
    GoodputCommand,
    burstiness_option,
    goodput_option,
    num_prompts_option,
    search_options,
    trace_option,
)
from bullet_graph.cli.result_file import Output
from bullet_graph.cli.simulate import Simulator, machine_options
from bullet_graph.cli.tables import figure, goodput_text, print_line, print_table, table_of
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.divided import Link, balanced, best_split, decode, prefill
from bullet_graph.engine.fleet import Fleet, Outcome, RouterName, Traffic, share
from bullet_graph.errors import ConfigError
from bullet_graph.models.config import DTYPE_BYTES
from bullet_graph.models.progress import progress_bar
from bullet_graph.perf.goodput_search import (
    CONVERSATIONS_WARMUP_S,
    LEAST_REQUESTS,
    LEAST_SECONDS,
    SHARES,
    WARMUP_S,
    Goodput,
    GoodputSearch,
    RateRun,
    bracket,
)
from bullet_graph.perf.roofline import kv_cache_bytes_per_token
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Arrivals

_MOST_NEW_REQUESTS = 50_000
"""Requests of a synthetic workload before it repeats itself: to make millions would take longer than to route them."""
_GOOD_ENOUGH = 0.995
"""Share of requests on time at which the search for the best division stops."""
_FIGURES = (
    *("slo_attainment", "stable", "sustained", "counted", "failed", "num_prompts", "duration"),
    *(f"{label}_{name}_ms" for name in ("ttft", "tpot") for label in ("median", "p90", "p99")),
)

Run = dict[str, Any]


class System(NamedTuple):
    """A way to use a fleet: each GPU shared, or some prefill and the others decode; ``split`` None: the best split."""

    machines: int
    gb_per_s: float | None = None
    split: int | None = None

    @property
    def name(self) -> str:
        return "shared" if self.gb_per_s is None else "divided"


class Comparison:
    """Serves one trace on fleets at rates; rates are in requests per second and GPU.

    A run has ``seconds`` of arrivals; None: the trace as it is.
    """

    def __init__(
        self,
        simulator: Simulator,
        fleet: Callable[..., Fleet],
        links: Sequence[Link],
        *,
        seconds: float | None,
        show: bool,
    ) -> None:
        self._simulator, self._fleet, self._links = simulator, fleet, links
        self._seconds, self._show = seconds, show
        dtype_bytes = DTYPE_BYTES[simulator.dtype]
        self._kv_bytes_per_token = kv_cache_bytes_per_token(simulator.model, dtype_bytes=dtype_bytes)
        # The prompts do not depend on the links: one run of them serves all.
        self._divided: dict[tuple[int, float, int], list[Run]] = {}
        self._last: dict[int, int] = {}
        self._traffic: tuple[tuple[int, float], Traffic, Arrivals] | None = None

    def run(self, system: System, rate: float) -> Run:
        """The figures of a system at a rate; of the best division, where the system does not name one."""
        if system.gb_per_s is None:
            fleet, (traffic, arrivals) = self._fleet(machines=system.machines), self._arrivals(system.machines, rate)
            label = f"{system.machines} shared, {rate:.4g}/s each"
            started, total = time.perf_counter(), len(traffic.workload.requests)
            sample = len(fleet.sampled(fleet.machines)) * total // fleet.machines
            with progress_bar(self._show, total=sample, unit="req", desc=label, leave=False) as advance:
                outcome = share(fleet, traffic, on_done=lambda _: advance(1))
            return self._figures(outcome, arrivals, total, rate, time.perf_counter() - started)
        link = [link.gb_per_s for link in self._links].index(system.gb_per_s)
        if system.split is not None:
            return self._at_split(system.machines, rate, system.split)[link]

        def on_time(split: int) -> float:
            run = self._at_split(system.machines, rate, split)[link]
            return min(run["slo_attainment"] if run["stable"] is not False else 0.0, _GOOD_ENOUGH)

        traffic, _ = self._arrivals(system.machines, rate)
        workload, fleet = traffic.workload, self._fleet(machines=system.machines)
        cached = 0.0
        if self._simulator.config.prefix_caching and workload.shares_prefixes:
            cached = workload.shareable_prompt_tokens / sum(r.prompt_tokens for r in workload.requests)
        begun = system.machines in self._last
        first = self._last[system.machines] if begun else balanced(fleet, traffic, cached)
        step = max(system.machines // (50 if begun else 20), 1)
        self._last[system.machines] = best = best_split(on_time, system.machines, first, step, _GOOD_ENOUGH)
        return self._at_split(system.machines, rate, best)[link]

    def _arrivals(self, machines: int, rate: float) -> tuple[Traffic, Arrivals]:
        key = machines, rate
        if self._traffic is None or self._traffic[0] != key:
            workload, uncounted_s = self._simulator.workload, 0.0
            if self._seconds is not None:
                count = max(LEAST_REQUESTS, math.ceil(self._seconds * rate * machines))
                workload = workload.repeated(count, most_new=max(len(workload.requests), _MOST_NEW_REQUESTS))
                uncounted_s = CONVERSATIONS_WARMUP_S if any(r.follows for r in workload.requests) else WARMUP_S
            own = {"request_rate": rate * machines, "uncounted_s": uncounted_s}
            arrivals = dataclasses.replace(self._simulator.arrivals, **own)
            self._traffic = key, Traffic(workload, arrivals.times(workload)), arrivals
        return self._traffic[1:]

    def _at_split(self, machines: int, rate: float, split: int) -> list[Run]:
        """The figures of one division, for each link."""
        key = machines, rate, split
        if key not in self._divided:
            fleet, (traffic, arrivals) = self._fleet(machines=machines), self._arrivals(machines, rate)
            label = f"{split} + {machines - split} divided, {rate:.4g}/s each"
            with progress_bar(self._show, total=1 + len(self._links), desc=label, leave=False) as advance:
                started, runs = time.perf_counter(), []
                prefilled = prefill(fleet, traffic, split)
                advance(1)
                for link in self._links:
                    outcome = decode(fleet, traffic, prefilled, link, self._kv_bytes_per_token)
                    total = len(prefilled.order) + len(prefilled.refused)
                    runs.append(self._figures(outcome, arrivals, total, rate, time.perf_counter() - started))
                    advance(1)
            self._divided[key] = runs
        return self._divided[key]

    def _figures(self, outcome: Outcome, arrivals: Arrivals, total: int, rate: float, seconds: float) -> Run:
        """A run's figures, from the machines of the sample alone; ``total`` requests were for all machines."""
        replayed = outcome.replay
        part = (len(replayed.served) + len(replayed.unsent)) / total
        assert arrivals.request_rate is not None
        part_of = dataclasses.replace(arrivals, request_rate=arrivals.request_rate * part)
        model_id = self._simulator.config.model
        result = replayed.result(part_of, started=datetime.now(), backend="bullet-graph fleet", model_id=model_id)
        fields = result.fields()
        own = {"rate_per_machine": rate, "request_rate": arrivals.request_rate, "seconds": round(seconds, 1)}
        return own | {name: fields[name] for name in _FIGURES} | dict(outcome.counters)


@click.command(cls=GoodputCommand)
@trace_option
@num_prompts_option
@goodput_option
@click.option("--machines", type=COUNT, multiple=True, default=(10,), help="GPUs of the fleet; repeat it for several.")
@click.option(
    "--prefill-machines",
    metavar="M|best|none",
    default="best",
    help="GPUs that only prefill, where the fleet is divided; none: only fleets that share each GPU.",
)
@click.option(
    "--transfer-gb-per-s",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    default=(50.0,),
    help="Bandwidth of each GPU's link for KV blocks, each way; repeat it for several.",
)
@click.option("--transfer-latency-ms", type=click.FloatRange(min=0), default=0.5, help="Latency of a transfer.")
@click.option(
    "--router", type=click.Choice(["prefix", "least-load"]), default="prefix", help="How requests are routed."
)
@click.option("--rate-per-machine", type=click.FloatRange(min=0, min_open=True), help="Requests per second and GPU.")
@click.option("--sweep", is_flag=True, help="Find the goodput_90 per GPU of each system instead.")
@click.option(
    "--sample-machines", type=COUNT, default=4, help="GPUs of each fleet that are simulated; all are routed to."
)
@click.option("--processes", type=COUNT, help="That simulate at once.  [default: the CPU's cores]")
@click.option(
    "--arrival-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=float(LEAST_SECONDS),
    help="Of each run; results of shorter ones are not sustained.",
)
@burstiness_option
@search_options
@machine_options
@result_options
def fleet(
    machines: tuple[int, ...],
    prefill_machines: str,
    transfer_gb_per_s: tuple[float, ...],
    transfer_latency_ms: float,
    router: RouterName,
    rate_per_machine: float | None,
    sweep: bool,
    sample_machines: int,
    processes: int | None,
    arrival_seconds: float,
    burstiness: float,
    smoke: bool,
    output: Output,
    **settings: Any,
) -> None:
    """Serve a trace on a simulated fleet: share each GPU, or divide the GPUs into prefill and decode.

    Shared: each GPU runs the engine with `auto`, behind a router that prefers the longest cached prefix, then the least
    load. Divided: some GPUs prefill and send KV blocks to the others, which decode. The best split is found by hill
    climbing, from the split by arithmetic. A trace that is too short is repeated.

    \b
    Examples:
      bullet-graph fleet --trace synthetic:conv --machines 10 --rate-per-machine 20 --goodput ttft:500 tpot:15
      bullet-graph fleet --trace synthetic:code --machines 10 --machines 100 --sweep --first-rate 13 \\
          --transfer-gb-per-s 25 --transfer-gb-per-s 400 --goodput ttft:500 tpot:15 --output-json code.json
      bullet-graph fleet --trace azure:conv --machines 4 --prefill-machines none --rate-per-machine 18 --smoke \\
          --num-prompts 200 --goodput ttft:500 tpot:15 --json
    """
    simulated = {name: settings.pop(name) for name in ("gpu", "trace", "num_prompts", "host_overhead_ms")}
    search = GoodputSearch(
        **{name: settings.pop(name) for name in ("first_rate", "tolerance", "step", "max_runs")}, shares=SHARES[:1]
    )
    config = EngineConfig(**settings)
    if config.slo == NO_TARGETS:
        raise ConfigError("fleets are compared by the requests on time: give targets, as --goodput ttft:500 tpot:15")
    if sweep == (rate_per_machine is not None):
        raise ConfigError("give either --rate-per-machine, or --sweep to search for the rate")
    links = [Link(gb_per_s=gb_per_s, latency_ms=transfer_latency_ms) for gb_per_s in dict.fromkeys(transfer_gb_per_s)]
    split = _parse_split(prefill_machines)
    arrivals = Arrivals(request_rate=math.inf, burstiness=burstiness, seed=config.seed)
    simulator = Simulator(config=config, arrivals=arrivals, **simulated)

    def make(machines: int) -> Fleet:
        return Fleet(
            model=simulator.performance,
            engine=simulator.settings(Policy("auto")),
            slo=config.slo,
            machines=machines,
            router=router,
            sample=min(sample_machines, machines),
            processes=processes or os.cpu_count() or 1,
        )

    show_progress = not output.as_json and sys.stderr.isatty()
    seconds = None if smoke else arrival_seconds
    comparison = Comparison(simulator, make, links, seconds=seconds, show=show_progress)
    systems = []
    for count in dict.fromkeys(machines):
        systems.append(System(count))
        if split != 0 and count > 1:
            systems += [System(count, link.gb_per_s, split) for link in links]
    found = []
    first_rates: dict[float | None, float] = {}
    for system in systems:
        runs: dict[float, Run] = {}
        # From where the same system of the fleet before was good, on the same rates for all links.
        near = dataclasses.replace(search, first_rate=first_rates.get(system.gb_per_s, search.first_rate))
        while (rate := _next_rate(near, runs, rate_per_machine)) is not None:
            runs[rate] = comparison.run(system, rate)
            _tell(system, runs[rate])
        good, _ = bracket([_point(run) for run in runs.values()], SHARES[0])
        first_rates[system.gb_per_s] = near.first_rate if good is None else good.rate
        found.append(_summary(system, [runs[rate] for rate in sorted(runs)], sweep=sweep))

    def show() -> None:
        print_line(simulator.title())
        _print(found, search.tolerance, sweep=sweep)

    own = {"router": router, "sample_machines": sample_machines, "transfer_latency_ms": transfer_latency_ms}
    output.emit(
        {"simulated": True} | simulator.describe() | own | {"tolerance": search.tolerance, "systems": found}, show
    )


def _parse_split(text: str) -> int | None:
    """None: the best; 0: none."""
    if text in ("best", "none"):
        return None if text == "best" else 0
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--prefill-machines takes a number of machines, best or none, got {text!r}")
    return int(text)


def _next_rate(search: GoodputSearch, runs: dict[float, Run], rate: float | None) -> float | None:
    if rate is not None:
        return None if runs else rate
    return search.next_rate([_point(run) for run in runs.values()])


def _point(run: Run) -> RateRun:
    return RateRun(run["rate_per_machine"], run["slo_attainment"], run["stable"])


def _summary(system: System, runs: Sequence[Run], *, sweep: bool) -> dict[str, Any]:
    """A system's fields; its goodput is in requests per second and GPU."""
    fields: dict[str, Any] = {"machines": system.machines, "system": system.name, "gb_per_s": system.gb_per_s}
    if sweep:
        goodput = Goodput.of([_point(run) for run in runs], SHARES[0])
        fields["goodput_90"], fields["goodput_90_below"] = goodput
        good = [run for run in runs if goodput.rate is not None and run["rate_per_machine"] <= goodput.rate]
        fields["prefill_machines"] = good[-1].get("prefill_machines") if good else None
    return fields | {"runs": list(runs)}


def _tell(system: System, run: Run) -> None:
    """One line on stderr for each run."""
    at = "" if system.gb_per_s is None else f" at {system.gb_per_s:g} GB/s, {run['prefill_machines']} prefill"
    unstable = ", unstable" if run["stable"] is False else ""
    load = f"{system.machines} {system.name}{at}, {run['rate_per_machine']:.4g}/s each"
    click.echo(f"{load}: {100 * run['slo_attainment']:.1f} % met{unstable} ({run['seconds']:.0f} s)", err=True)


def _print(systems: Sequence[dict[str, Any]], tolerance: float, *, sweep: bool) -> None:
    figures = ("goodput_90 per GPU", "÷ shared") if sweep else ("met all targets, %", "TTFT, p99, ms", "TPOT, p90, ms")
    table = table_of("GPUs", "system", "GB/s", "prefill GPUs", *figures)
    shared: dict[int, float | None] = {}
    for system in systems:
        run = system["runs"][-1]
        split = system.get("prefill_machines") if sweep else run.get("prefill_machines")
        row = [str(system["machines"]), system["system"], figure(system["gb_per_s"], 0), figure(split, 0)]
        if sweep:
            goodput = Goodput(system["goodput_90"], system["goodput_90_below"])
            base = shared.setdefault(system["machines"], goodput.rate)
            ratio = None if not base or goodput.rate is None else goodput.rate / base
            row += [goodput_text(goodput, tolerance, ".2f"), figure(ratio, 2)]
        else:
            row += [figure(100 * run["slo_attainment"]), figure(run["p99_ttft_ms"], 0), figure(run["p90_tpot_ms"], 2)]
        table.add_row(*row)
    print_table(table)
