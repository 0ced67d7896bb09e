"""``python -m bench.fleet``: a trace on many GPUs that need not be there, each shared or the fleet divided."""

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import click

from bench.fleet.divided import Link, balanced, best_split, decode, prefill, require_both_kinds
from bench.fleet.shared import Fleet, Outcome, RouterName, Traffic, repeated, share
from bench.record import Tool
from bullet_graph.cli import replay_options
from bullet_graph.cli.options import COUNT, result_options
from bullet_graph.cli.result_file import Output, to_json, write_result_file
from bullet_graph.cli.simulate import Simulator, machine_options
from bullet_graph.cli.tables import figure, goodput_text, print_line, print_table, table_of
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.replay import json_number
from bullet_graph.errors import ConfigError
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
from bullet_graph.perf.roofline import DTYPE_BYTES, kv_cache_bytes_per_token
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Arrivals

_MOST_NEW_REQUESTS = 50_000
"""Requests of a synthetic workload before it repeats itself: to make millions would take longer than to route them."""
_GOOD_ENOUGH = 0.995
"""Share of requests on time at which the search for the best division stops."""
_FIGURES = (
    *("slo_attainment", "stable", "counted", "failed", "num_prompts", "duration"),
    *(f"{label}_{name}_ms" for name in ("ttft", "tpot") for label in ("median", "p90", "p99")),
)

Run = dict[str, Any]


class Comparison:
    """Serves one trace on fleets at rates, which are in requests per second and GPU; each run is told on stderr.

    A run has ``seconds`` of arrivals; None: the trace as it is. ``split`` is the number of prefill machines of a
    divided fleet; None: the best.
    """

    def __init__(
        self,
        simulator: Simulator,
        fleet: Callable[[int], Fleet],
        links: Sequence[Link],
        *,
        split: int | None,
        seconds: float | None,
    ) -> None:
        self._simulator, self._fleet, self._links = simulator, fleet, links
        self._split, self._seconds = split, seconds
        dtype_bytes = DTYPE_BYTES[simulator.dtype]
        self._kv_bytes_per_token = kv_cache_bytes_per_token(simulator.model, dtype_bytes=dtype_bytes)
        # The prompts do not depend on the links: one run of them serves all.
        self._divided: dict[tuple[int, float, int], list[Run]] = {}
        self._best: dict[int, int] = {}
        self._traffic: tuple[tuple[int, float], Traffic, Arrivals] | None = None

    def shared(self, machines: int, rate: float) -> Run:
        """The figures of a fleet of so many machines that share each GPU."""
        traffic, arrivals = self._arrivals(machines, rate)
        started = time.perf_counter()
        outcome, total = share(self._fleet(machines), traffic), len(traffic.workload.requests)
        return self._figures(f"{machines} shared", outcome, arrivals, total, rate, started)

    def divided(self, machines: int, rate: float, link: Link) -> Run:
        """The figures of a divided fleet."""
        place, split = self._links.index(link), self._split
        if split is None:

            def on_time(split: int) -> float:
                return worth(self._at_split(machines, rate, split)[place])

            first, step = self._best.get(machines), max(machines // 50, 1)
            if first is None:
                first, step = balanced(self._fleet(machines), self._arrivals(machines, rate)[0]), max(machines // 20, 1)
            self._best[machines] = split = best_split(on_time, machines, first, step, _GOOD_ENOUGH)
        return self._at_split(machines, rate, split)[place]

    def _arrivals(self, machines: int, rate: float) -> tuple[Traffic, Arrivals]:
        if self._traffic is None or self._traffic[0] != (machines, rate):
            workload, uncounted_s = self._simulator.workload, 0.0
            if self._seconds is not None:
                count = max(LEAST_REQUESTS, math.ceil(self._seconds * rate * machines))
                workload = repeated(workload, count, most_new=max(len(workload.requests), _MOST_NEW_REQUESTS))
                uncounted_s = CONVERSATIONS_WARMUP_S if any(r.follows for r in workload.requests) else WARMUP_S
            arrivals = replace(self._simulator.arrivals, request_rate=rate * machines, uncounted_s=uncounted_s)
            self._traffic = (machines, rate), Traffic(workload, arrivals.times(workload)), arrivals
            # Millions of values without cycles: the collector would visit them again and again.
            gc.freeze()
        return self._traffic[1:]

    def _at_split(self, machines: int, rate: float, split: int) -> list[Run]:
        """The figures of one division, for each link."""
        runs = self._divided.setdefault((machines, rate, split), [])
        if not runs:
            fleet, (traffic, arrivals) = self._fleet(machines), self._arrivals(machines, rate)
            started, prefilled = time.perf_counter(), prefill(fleet, traffic, split)
            total = len(traffic.workload.requests)
            for link in self._links:
                outcome = decode(fleet, traffic, prefilled, link, self._kv_bytes_per_token)
                name = f"{split} + {machines - split} divided, {link.gb_per_s:g} GB/s"
                runs.append(self._figures(name, outcome, arrivals, total, rate, started))
        return runs

    def _figures(self, name: str, outcome: Outcome, arrivals: Arrivals, total: int, rate: float, started: float) -> Run:
        """A run's figures, from the machines of the sample alone; ``total`` requests were for all machines."""
        replayed = outcome.replay
        if not any(request.metrics.arrival_s >= arrivals.uncounted_s for request in replayed.served):
            raise ConfigError(f"{name}: no request that counts came to the simulated machines: raise --sample-machines")
        part = (len(replayed.served) + len(replayed.unsent)) / total
        fields = replayed.result(
            replace(arrivals, request_rate=part * (arrivals.request_rate or 0.0)),
            started=datetime.now(),
            backend="python -m bench.fleet",
            model_id=self._simulator.config.model,
        ).fields()
        seconds = time.perf_counter() - started
        unstable = ", unstable" if fields["stable"] is False else ""
        met = f"{100 * fields['slo_attainment']:.1f} % met{unstable}"
        click.echo(f"{name}, {rate:.4g}/s each: {met} ({seconds:.0f} s)", err=True)
        own = {"rate_per_machine": rate, "request_rate": arrivals.request_rate, "seconds": round(seconds, 1)}
        return own | {field: fields[field] for field in _FIGURES} | dict(outcome.counters)


def worth(run: Run) -> float:
    """What the search for the best division compares: any stable run is better than any unstable one."""
    on_time: float = run["slo_attainment"]
    return on_time - 1 if run["stable"] is False else min(on_time, _GOOD_ENOUGH)


class _FleetCommand(Tool, replay_options.GoodputCommand):
    """It takes ``--goodput`` as ``bullet-graph`` does."""


@click.command(cls=_FleetCommand)
@replay_options.trace_option
@replay_options.num_prompts_option
@replay_options.goodput_option
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
@click.option("--rate-per-machine", type=click.FloatRange(0, 1e4, min_open=True), help="Requests per second and GPU.")
@click.option("--sweep", is_flag=True, help="Find the goodput_90 per GPU of each system instead.")
@click.option(
    "--sample-machines", type=COUNT, default=4, help="GPUs of each fleet that are simulated; all are routed to."
)
@click.option("--processes", type=COUNT, help="That simulate at once.  [default: the CPU's cores]")
@click.option(
    "--arrival-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=float(LEAST_SECONDS),
    help="Of each run; in a shorter one a queue only begins to grow.",
)
@replay_options.burstiness_option
@replay_options.search_options
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
      python -m bench.fleet --trace synthetic:conv --machines 10 --rate-per-machine 20 --goodput ttft:500 tpot:15
      python -m bench.fleet --trace synthetic:code --machines 10 --machines 100 --sweep --first-rate 13 \\
          --transfer-gb-per-s 25 --transfer-gb-per-s 400 --goodput ttft:500 tpot:15 --output-json code.json
      python -m bench.fleet --trace azure:conv --machines 4 --prefill-machines none --rate-per-machine 18 --smoke \\
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
    if not sweep and search != GoodputSearch(shares=SHARES[:1]):
        raise ConfigError("the options of a search are for several rates: add --sweep")
    if smoke and arrival_seconds != LEAST_SECONDS:
        raise ConfigError("--smoke serves the trace once: leave out --arrival-seconds")
    if not math.isfinite(arrival_seconds + (rate_per_machine or 0.0)):
        raise ConfigError("--rate-per-machine and --arrival-seconds must be finite numbers")
    links = [Link(gb_per_s=gb_per_s, latency_ms=transfer_latency_ms) for gb_per_s in dict.fromkeys(transfer_gb_per_s)]
    split = _parse_split(prefill_machines)
    for count in machines:
        if count > 1 and split:
            require_both_kinds(count, split)
    arrivals = Arrivals(request_rate=math.inf, burstiness=burstiness, seed=config.seed)
    simulator = Simulator(config=config, arrivals=arrivals, **simulated)

    def make(count: int) -> Fleet:
        return Fleet(
            model=simulator.performance,
            engine=simulator.settings(Policy("auto")),
            slo=config.slo,
            machines=count,
            router=router,
            sample=min(sample_machines, count),
            processes=processes or os.cpu_count() or 1,
        )

    comparison = Comparison(simulator, make, links, split=split, seconds=None if smoke else arrival_seconds)
    common = {"simulated": True} | simulator.describe() | {"router": router, "sample_machines": sample_machines}
    common |= {"transfer_latency_ms": transfer_latency_ms, "arrival_seconds": None if smoke else arrival_seconds}
    common |= {"tolerance": search.tolerance}
    found: list[dict[str, Any]] = []
    first_rates: dict[Link | None, float] = {}
    for count in dict.fromkeys(machines):
        for link in (None, *(links if split != 0 and count > 1 else ())):
            runs: dict[float, Run] = {}
            # From where the same system of the fleet before was good, on the same rates for all links.
            near = replace(search, first_rate=first_rates.get(link, search.first_rate))
            while (rate := _next_rate(near, runs, rate_per_machine)) is not None:
                serve = comparison.shared if link is None else partial(comparison.divided, link=link)
                runs[rate] = serve(count, rate)
            good, _ = bracket([_point(run) for run in runs.values()], SHARES[0])
            first_rates[link] = near.first_rate if good is None else good.rate
            found.append(_summary(count, link, [runs[rate] for rate in sorted(runs)], sweep=sweep))
            if output.path is not None:  # an interrupt loses no system that is done
                write_result_file(output.path, to_json(common | {"finished": False, "systems": found}))

    def show() -> None:
        print_line(simulator.title())
        _print(found, search.tolerance, sweep=sweep)

    output.emit(common | {"finished": True, "systems": found}, show)


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


def _summary(machines: int, link: Link | None, runs: Sequence[Run], *, sweep: bool) -> dict[str, Any]:
    """A system's fields; its goodput is in requests per second and GPU, and its split that of the run up to it."""
    fields: dict[str, Any] = {"machines": machines, "system": "shared" if link is None else "divided"}
    fields |= {"gb_per_s": link and json_number(link.gb_per_s), "prefill_machines": runs[0].get("prefill_machines")}
    if sweep:
        fields["goodput_90"], fields["goodput_90_below"] = goodput = Goodput.of(list(map(_point, runs)), SHARES[0])
        good = [run for run in runs if goodput.rate is not None and run["rate_per_machine"] <= goodput.rate]
        fields["prefill_machines"] = good[-1].get("prefill_machines") if good else None
    return fields | {"runs": runs}


def _print(systems: Sequence[dict[str, Any]], tolerance: float, *, sweep: bool) -> None:
    figures = ("goodput_90 per GPU", "÷ shared") if sweep else ("met all targets, %", "TTFT, p99, ms", "TPOT, p90, ms")
    table = table_of("GPUs", "system", "GB/s", "prefill GPUs", *figures)
    shared: dict[int, float | None] = {}
    for system in systems:
        count, run = system["machines"], system["runs"][-1]
        gb_per_s = system["gb_per_s"] and float(system["gb_per_s"])
        row = [str(count), system["system"], figure(gb_per_s, 0), figure(system["prefill_machines"], 0)]
        if sweep:
            goodput = Goodput(system["goodput_90"], system["goodput_90_below"])
            base = shared.setdefault(count, goodput.rate)
            ratio = None if not base or goodput.rate is None else goodput.rate / base
            row += [goodput_text(goodput, tolerance, ".2f"), figure(ratio, 2)]
        else:
            row += [figure(100 * run["slo_attainment"]), figure(run["p99_ttft_ms"], 0), figure(run["p90_tpot_ms"], 2)]
        table.add_row(*row)
    print_table(table)
