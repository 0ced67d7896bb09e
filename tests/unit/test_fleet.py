"""Fleets in virtual time: routing, machines that share their GPU, and fleets divided into prefill and decode."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runner import parsed, refused
from click.testing import CliRunner, Result
from fakes.perf_tables import LLAMA_8B
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engines import changed

from bench.fleet.command import Comparison, fleet, worth
from bench.fleet.divided import Link, balanced, best_split, decode, decode_machine, prefill, prefill_machine
from bench.fleet.shared import Fleet, Router, Traffic, in_processes, share
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.simulation import SimulationSettings, simulate
from bullet_graph.errors import ConfigError
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.table import load_table
from bullet_graph.routing import PrefixHolders, ranked
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest, load_workload
from bullet_graph.workloads.workload import TurnBefore

MODEL = TableModel(load_table("h200", model="llama-3.1-8b", dtype="bfloat16"), LLAMA_8B)
CONFIG = EngineConfig(model="tiny", policy=Policy("auto"), max_num_seqs=64)
ENGINE = SimulationSettings(config=CONFIG, kv_cache_tokens=100_000, max_model_len=8192)
SLO = Slo(ttft_ms=500, tpot_ms=15)
KV_BYTES = 131_072


def fleet_of(machines: int, **changes: Any) -> Fleet:
    return Fleet(**{"model": MODEL, "engine": ENGINE, "slo": SLO, "machines": machines} | changes)


def traffic_of(name: str, count: int, rate: float) -> Traffic:
    workload = load_workload(f"synthetic:{name}", num_requests=count)
    return Traffic(workload, Arrivals(request_rate=rate).times(workload))


def chats(count: int, rate: float) -> Traffic:
    """Conversations of three quick turns, which begin with one of two system prompts."""
    requests: list[WorkloadRequest] = []
    for number in range(count):
        requests.append(WorkloadRequest(600, 8, None, None, (number % 2,), 512))
        for tokens in (700, 800):
            index, before = len(requests) - 1, requests[-1].prompt_tokens + 8
            requests.append(WorkloadRequest(tokens, 8, None, None, (), 0, TurnBefore(index, before, 0.3)))
    workload = Workload("chats", tuple(requests))
    return Traffic(workload, Arrivals(request_rate=rate).times(workload))


# ---- routing ----


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(0, 4)), max_size=30),
    st.lists(st.integers(0, 2), max_size=4),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
    st.integers(0, 9),
)
def test_the_longest_prefix_within_the_slack_decides(
    served: list[tuple[list[int], int]], prompt: list[int], load: list[int], slack: int
) -> None:
    def keys(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[: end + 1]) for end in range(len(tokens))]

    holders = PrefixHolders[int]()
    for tokens, machine in served:
        holders.add(keys(tokens), machine)

    def depth(machine: int) -> int:
        told = [tokens for tokens, at in served if at == machine]
        shared = (sum(np.cumprod([a == b for a, b in zip(one, prompt, strict=False)])) for one in told)
        return int(max(shared, default=0))

    least = min(range(5), key=load.__getitem__)
    chosen, found = holders.choose(keys(prompt), least, load.__getitem__, slack)
    near = [machine for machine in range(5) if load[machine] <= load[least] + slack]
    assert chosen in near
    assert depth(chosen) == found == max(map(depth, near))
    assert load[chosen] == min(load[machine] for machine in near if depth(machine) == found)
    order = ranked(range(5), holders, keys(prompt), load.__getitem__, slack)
    assert sorted(order) == list(range(5))
    assert (depth(order[0]), load[order[0]]) == (found, load[chosen])
    assert [load[m] for m in order[1:]] == sorted(load[m] for m in order[1:])


def test_prefixes_are_forgotten_from_their_ends_and_with_their_engines() -> None:
    holders = PrefixHolders[str](most_keys=3)
    holders.add(["a", "ab", "abc", "abcd"], "one")
    assert holders.choose(["a", "ab", "abc", "abcd"], "two", lambda _: 0, 0) == ("one", 3)
    assert holders.choose(["a"], "two", lambda _: 0, 0, among=["two", "three"]) == ("two", 0)
    holders.keep({"two"})
    assert holders.choose(["a"], "two", lambda _: 0, 0) == ("two", 0)
    assert ranked([], holders, [], lambda _: 0, 0) == []
    for key in "xyzxw":
        holders.add([key], "two")
    assert [holders.choose([key], "three", lambda _: 0, 0)[1] for key in "wxyz"] == [1, 1, 0, 1]


def test_the_least_busy_machine_is_next_until_its_request_ends() -> None:
    router = Router(2, False, 0.0)
    assert router.choose(0.0, ())[0] == 0
    router.take(0, (), 2.0, end_s=5.0)
    assert router.choose(1.0, ())[0] == 1
    router.take(1, (), 3.0, end_s=9.0)
    assert router.choose(2.0, ())[0] == 0
    assert router.choose(5.0, ())[0] == 0
    assert router.load == [0.0, 3.0]


# ---- every request once ----


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    """Requests, some of them turns of conversations with shared pieces."""
    requests: list[WorkloadRequest] = []
    for _ in range(draw(st.integers(1, 12))):
        pieces = draw(st.sampled_from([(), (1,), (1, 2)]))
        tokens, before = draw(st.integers(1, 3000)) + 64 * len(pieces), None
        for _ in range(draw(st.integers(1, 3))):
            output = draw(st.integers(1, 40))
            named = (pieces, 64) if before is None and pieces else ()
            requests.append(WorkloadRequest(tokens, output, None, None, *(named or ((), 0)), before))
            before = TurnBefore(len(requests) - 1, tokens + output, draw(st.floats(0, 2)))
            tokens += output + draw(st.integers(1, 500))
    workload = Workload("drawn", tuple(requests))
    arrivals = Arrivals(request_rate=draw(st.floats(1, 100)), seed=draw(st.integers(0, 3)))
    return Traffic(workload, arrivals.times(workload))


@settings(max_examples=15)
@given(traffics(), st.integers(1, 4), st.sampled_from(["prefix", "least-load"]))
def test_each_request_is_served_once(traffic: Traffic, machines: int, router: Any) -> None:
    requests = traffic.workload.requests
    outcome = share(fleet_of(machines, router=router), traffic)
    assert Counter([*outcome.indices, *outcome.replay.unsent]) == Counter(range(len(requests)))
    for index, served in zip(outcome.indices, outcome.replay.served, strict=True):
        asked = requests[index]
        assert (served.input_tokens, served.output_tokens) == (asked.prompt_tokens, asked.output_tokens)
    if machines == 1:
        return
    fleet = fleet_of(machines, router=router)
    prefilled = prefill(fleet, traffic, machines - 1)
    divided = decode(fleet, traffic, prefilled, Link(gb_per_s=50), KV_BYTES)
    assert {index for index, request in enumerate(requests) if request.follows is None} <= set(divided.indices)
    assert sorted(divided.indices) == sorted(prefilled.order)
    for index, served in zip(divided.indices, divided.replay.served, strict=True):
        times = served.metrics.token_times_s
        assert len(times) == served.output_tokens == requests[index].output_tokens
        assert served.metrics.arrival_s < times[0]
        assert list(times) == sorted(times)


@pytest.mark.parametrize("traffic", [traffic_of("conv", 20, 15.0), chats(12, 15.0)], ids=["conv", "chats"])
def test_one_machine_is_the_simulator(traffic: Traffic) -> None:
    alone = simulate(MODEL, traffic.workload, traffic.times, ENGINE, slo=SLO)
    outcome = share(fleet_of(1), traffic)
    assert outcome.replay == alone.replay
    assert outcome.counters["num_steps"] == alone.stats.num_steps


def test_a_sample_has_the_same_figures_as_in_the_whole_fleet_and_processes_change_nothing() -> None:
    traffic = chats(30, 60.0)
    whole = share(fleet_of(4), traffic)
    served = dict(zip(whole.indices, whole.replay.served, strict=True))
    sample = share(fleet_of(4, sample=2, processes=2), traffic)
    assert 0 < len(sample.indices) < len(whole.indices)
    assert all(served[index] == one for index, one in zip(sample.indices, sample.replay.served, strict=True))


def test_errors_of_other_processes_are_raised_here() -> None:
    assert sorted(in_processes(abs, [-3, 2, -1], 2)) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        list(in_processes(lambda n: 1 // n, [1, 0], 2))
    with pytest.raises(RuntimeError, match="died"):
        list(in_processes(os._exit, [3, 3], 2))


def test_prefixes_are_found_on_a_shared_machine() -> None:
    traffic = chats(40, 60.0)
    hits = {}
    for router in ("prefix", "least-load"):
        counted = share(fleet_of(4, router=router), traffic).counters
        hits[router] = counted["prefix_cache_hits"] / counted["prefix_cache_queries"]
    alone = share(fleet_of(1), traffic).counters
    assert hits["prefix"] > 0.85 * alone["prefix_cache_hits"] / alone["prefix_cache_queries"]
    assert hits["prefix"] > hits["least-load"]


# ---- divided ----


def test_a_prefill_machine_takes_the_engines_time() -> None:
    """Prompts with one output token need no decode, so the engine's own loop is the reference."""
    whole = load_workload("synthetic:conv", num_requests=200)
    workload = replace(whole, requests=tuple(replace(r, output_tokens=1) for r in whole.requests))
    times = Arrivals(request_rate=25).times(workload)
    engine = simulate(MODEL, workload, times, replace(ENGINE, host_overhead_ms=0.0), slo=SLO)
    prompts = [
        (at_s, r.prompt_tokens, 0, at_s + 0.5) for at_s, r in zip(times.tolist(), workload.requests, strict=True)
    ]
    ms_per_token = 1e3 * fleet_of(1).prefill_s_per_token
    found = np.array(prefill_machine(MODEL, prompts, CONFIG.max_num_batched_tokens, ms_per_token)) - times
    expected = [served.metrics.ttft_ms / 1e3 for served in engine.replay.served]
    assert np.median(found) == pytest.approx(np.median(expected), rel=0.03)
    assert np.mean(found) == pytest.approx(np.mean(expected), rel=0.05)


def test_a_decode_machine_takes_the_engines_time() -> None:
    lengths = [(16, 20 + 7 * index) for index in range(20)]
    workload = Workload("test", tuple(WorkloadRequest(prompt, output, None) for prompt, output in lengths))
    engine = simulate(MODEL, workload, np.zeros(20), replace(ENGINE, host_overhead_ms=0.0))
    found = decode_machine(MODEL, [(0.0, prompt, output - 1) for prompt, output in lengths], 64, 100_000)
    for served, times in zip(engine.replay.served, found, strict=True):
        expected = served.metrics.token_times_s
        assert times[-1] == pytest.approx(expected[-1] - expected[0], rel=0.02)


def test_sequences_wait_for_places_and_blocks() -> None:
    rows = [(0.0, 100, 10)] * 3
    one_by_one = decode_machine(MODEL, rows, 1, 1000)
    assert [times[-1] for times in one_by_one] == sorted({times[-1] for times in one_by_one})
    assert decode_machine(MODEL, rows, 64, 110) == one_by_one
    assert decode_machine(MODEL, [(1.0, 5, 0)], 64, 110) == [()]


def test_a_faster_link_is_never_worse_and_the_split_follows_the_work() -> None:
    fleet = fleet_of(6)
    splits = {}
    for name, lengths in {"prompts": (4000, 20), "outputs": (200, 400)}.items():
        workload = Workload(name, (WorkloadRequest(*lengths, None),) * 150)
        traffic = Traffic(workload, Arrivals(request_rate={"prompts": 25.0, "outputs": 60.0}[name]).times(workload))
        infinite = Link(gb_per_s=float("inf"), latency_ms=0)

        def share_of(split: int, traffic: Traffic = traffic, link: Link = infinite) -> float:
            served = decode(fleet, traffic, prefill(fleet, traffic, split), link, KV_BYTES).replay.served
            return float(np.mean([request.meets_slo for request in served]))

        shares = [share_of(split) for split in range(1, 6)]
        splits[name] = best_split(share_of, 6, balanced(fleet, traffic), 1)
        assert shares[splits[name] - 1] == max(shares)
        slow = [share_of(split, link=Link(gb_per_s=5)) for split in range(1, 6)]
        assert all(some <= all_ for some, all_ in zip(slow, shares, strict=True))
    assert splits["prompts"] > splits["outputs"]


@given(st.integers(2, 300), st.data())
def test_the_best_split_is_found_where_there_is_one_peak(machines: int, data: st.DataObject) -> None:
    peak, first = (data.draw(st.integers(1, machines - 1)) for _ in range(2))
    found = best_split(lambda split: -abs(split - peak), machines, first, (data.draw(st.integers(1, machines))))
    assert abs(found - peak) < max(machines // 100, 1)


def test_divisions_that_pile_up_differ_so_that_the_search_leaves_them() -> None:
    runs = [{"slo_attainment": share, "stable": stable} for stable in (False, True) for share in (0.0, 0.02, 0.9)]
    found = [worth(run) for run in runs]
    assert found == sorted(set(found))


@pytest.mark.parametrize("split", [0, 4])
def test_a_divided_fleet_has_both_kinds(split: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to 3"):
        prefill(fleet_of(4), traffic_of("conv", 5, 1.0), split)
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        Link(gb_per_s=0)
    with pytest.raises(ConfigError, match="sample"):
        fleet_of(2, sample=3)


def test_without_a_prefix_cache_each_prompt_is_computed() -> None:
    traffic = chats(10, 20.0)
    for engine in (ENGINE, changed(ENGINE, prefix_caching=False)):
        prefilled = prefill(fleet_of(3, engine=engine), traffic, 2)
        assert (prefilled.cached_tokens > 0) is engine.config.prefix_caching
        assert (sum(prefilled.lacking) < prefilled.prompt_tokens) is engine.config.prefix_caching


def test_a_request_that_no_engine_takes_fails_alone() -> None:
    workload = Workload("test", (WorkloadRequest(9000, 10, None), WorkloadRequest(100, 10, None)))
    traffic, fleet = Traffic(workload, np.array([0.0, 1.0])), fleet_of(2)
    divided = decode(fleet, traffic, prefill(fleet, traffic, 1), Link(gb_per_s=50), KV_BYTES).replay.served
    assert [one.error for one in divided] == [one.error for one in share(fleet, traffic).replay.served]
    assert divided[0].error is not None
    assert divided[1].error is None


# ---- the command ----


def run(*arguments: str) -> Result:
    return CliRunner().invoke(fleet, arguments)


SMALL = ("--trace", "synthetic:code", "--goodput", "ttft:500", "tpot:15", "--num-prompts", "20", "--smoke")


def test_the_command_compares_fleets() -> None:
    links = "--transfer-gb-per-s 25 --transfer-gb-per-s inf"
    found = parsed(run(*SMALL, "--machines", "2", "--rate-per-machine", "10", *links.split(), "--json"))
    assert found["simulated"] is True
    told = [(one["system"], one["gb_per_s"], one["prefill_machines"]) for one in found["systems"]]
    assert told == [("shared", None, None), ("divided", 25, 1), ("divided", "inf", 1)]
    assert all(0 <= one["runs"][0]["slo_attainment"] <= 1 for one in found["systems"])


def test_an_interrupt_keeps_the_systems_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "divided", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    result = tmp_path / "fleet.json"
    assert run(*SMALL, "--machines", "2", "--rate-per-machine", "9", "--output-json", str(result)).exit_code == 130
    told = json.loads(result.read_text())
    assert ([one["system"] for one in told["systems"]], told["finished"]) == (["shared"], False)


def test_the_command_searches_for_goodputs() -> None:
    options = "--machines 2 --sweep --max-runs 2 --first-rate 40 --prefill-machines 1 --transfer-gb-per-s inf"
    found = run(*SMALL, *options.split())
    assert found.exit_code == 0, found.output
    assert "goodput_90" in found.stdout
    assert "divided" in found.stdout
    assert "2 shared, 40/s each" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((arguments, "either") for arguments in (("--rate-per-machine", "1", "--sweep"), ())),
        (("--rate-per-machine", "nan"), "--rate-per-machine and --arrival-seconds must be finite"),
        (("--rate-per-machine", "1", "--max-runs", "2"), "add --sweep"),
        (("--rate-per-machine", "1", "--arrival-seconds", "9"), "leave out --arrival-seconds"),
        (("--rate-per-machine", "1", "--prefill-machines", "some"), "best or none"),
        (("--rate-per-machine", "1", "--prefill-machines", "10"), "from 1 to 9"),
        (("--rate-per-machine", "1", "--machines", "99", "--num-prompts", "1"), "99 shared: no request that counts"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(run(*SMALL, "--processes", "1", *arguments)).splitlines()[0]  # no fleet ran before


def test_targets_are_required() -> None:
    assert "--goodput" in refused(run("--trace", "synthetic:conv", "--rate-per-machine", "1"))


def test_the_command_imports_no_torch() -> None:
    arguments = [*SMALL, "--machines", "2", "--rate-per-machine", "10", "--json"]
    code = f"import sys\nfrom bench.fleet.command import fleet\nfleet({arguments!r}, standalone_mode=False)\n"
    done = subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
