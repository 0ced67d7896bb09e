"""Loads and settings of a comparison, from its command's options."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bench.peers.comparison import Load
from bench.peers.rates import FixedRates, Rates
from bench.peers.systems import Setup
from bullet_graph.cli.bench.sweep_cells import WorkloadSpec
from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.perf.goodput_search import FASTEST_RATE, GoodputSearch
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Workload, load_workload


def make_loads(specs: Sequence[WorkloadSpec], options: Mapping[str, Any]) -> list[Load]:
    """The workloads with their targets, and the rates that each system is served at.

    Raises:
        ConfigError: the options contradict each other, a search has no targets, or two workloads have one name.
        WorkloadError: there is no such workload.
    """
    loads = [_make_load(spec, options) for spec in specs]
    names = [
        f"{load.workload.name} with {len(load.workload.requests)} requests, {load.slo}" for load in loads
    ]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two workloads are both called {twice}: rename a file, or give one of them only")
    return loads


def _make_load(spec: WorkloadSpec, options: Mapping[str, Any]) -> Load:
    workload = load_workload(spec.name, num_requests=spec.num_prompts, seed=options["seed"])
    slo = spec.slo or NO_TARGETS
    rates, attainment = options["rates"], options["attainment"]
    if rates is not None and options["all_at_once"]:
        raise ConfigError("--rates and --all-at-once exclude one another: choose one")
    if options["best_peer_only"] and (rates is not None or options["all_at_once"]):
        raise ConfigError("--best-peer-only is for searches: leave it out with --rates and --all-at-once")
    if options["all_at_once"]:
        rates = (FASTEST_RATE,)
    if rates is not None:
        return Load(workload, slo, partial(FixedRates, rates, options["repeats"], attainment))
    if slo == NO_TARGETS:
        raise ConfigError(
            f"a search for goodput needs targets: write --workload '{spec.name}@ttft:500 tpot:15', or give --rates"
        )

    def search() -> Rates:
        return GoodputSearch(
            first_rate=spec.first_rate or options["first_rate"],
            attainment=attainment,
            tolerance=options["tolerance"],
            step=options["step"],
            max_runs=options["max_runs"],
        )

    return Load(workload, slo, search)


def make_setup(loads: Sequence[Load], options: Mapping[str, Any]) -> Setup:
    """What all systems are given; the longest request fits.

    Raises:
        WorkloadError: a request does not fit the length asked for.
    """

    def longest(workload: Workload) -> int:
        return max(request.prompt_tokens + request.output_tokens for request in workload.requests)

    needed = max(longest(load.workload) for load in loads)
    most = options["max_model_len"] or needed
    if most < needed:
        raise WorkloadError(
            f"the workloads' longest request has {needed} tokens, more than --max-model-len {most}: raise it"
        )
    names = {field.name for field in dataclasses.fields(Setup)}
    return Setup(
        **{name: value for name, value in options.items() if name in names} | {"max_model_len": most}
    )
