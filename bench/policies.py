"""Every policy on the same arrivals, in turn in one process, and what a long prompt does to running requests.

    python bench/policies.py --output-json bench/results/h200/policies.json

Requests come with Poisson gaps; the share that meets both targets, latencies, energy and clocks come with it.
With `--steady`, 64 requests
decode at a context of about 1,000 tokens while a prompt of 8,192 comes every 400 ms; with `--host`, 128 requests
decode, and the host's own time for each step is told.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bullet_graph import Engine, SamplingParams, Slo
from bullet_graph.cli.bench.online import serve_online
from bullet_graph.cli.engine_run import watch_device
from bullet_graph.config import Policy
from bullet_graph.engine.output import OutputKind
from bullet_graph.perf.metrics import summarize_ms
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.workloads import Arrivals, load_workload

SETTINGS = (
    "azure:conv 600 20 ttft:500 tpot:15",
    "azure:conv 600 24 ttft:500 tpot:15",
    "azure:code 400 10 ttft:500 tpot:15",
    "azure:code 400 10 ttft:500 tpot:8",
)
POLICIES = "serial,mixed,mixed:2048,split,auto"
STEADY_POLICIES = ("mixed:2048", "auto", "split", "mixed")
GREEDY = {"temperature": 0, "ignore_eos": True}


def serve(engine: Engine, setting: str, policy: str, seed: int) -> dict[str, Any]:
    """One workload under one policy: the fields of `bullet-graph bench online`, and what the planner learned."""
    trace, num_prompts, rate, *targets = setting.split()
    run = serve_online(
        engine,
        load_workload(trace, num_requests=int(num_prompts)),
        Arrivals(request_rate=float(rate), seed=seed),
        policy=Policy.parse(policy),
        slo=Slo.parse(targets),
    )
    return {
        "setting": setting,
        "seed": seed,
        **run.fields(),
        "policy_seconds": dict(engine.stats().policy_seconds),
        "corrections": corrections(engine),
    }


def corrections(engine: Engine) -> dict[str, float]:
    """What the planner has learned of its predictions' errors: measured over predicted time."""
    factors = engine.stats().corrections
    return {f"{policy} {kind}": round(factor, 3) for (policy, kind), factor in factors.items() if factor != 1}


def steady(
    engine: Engine, policy: str, slo: Slo, *, num_long: int = 30, every_s: float = 0.4
) -> dict[str, Any]:
    """64 requests decode while a prompt of 8,192 tokens comes every 400 ms."""
    rng = np.random.default_rng(0)
    vocab_size = engine.model_config.vocab_size
    engine.set_policy(policy, slo)
    for index in range(64):
        prompt = rng.integers(0, vocab_size, 800).tolist()
        engine.add_request(
            f"run-{index}", prompt, SamplingParams(max_tokens=4000, **GREEDY), slo=Slo(tpot_ms=slo.tpot_ms)
        )
    while engine.stats().num_decoding < 64:
        engine.step()
    settle_s = engine.now() + 1.0
    while engine.now() < settle_s:
        engine.step()
    long_prompts = [rng.integers(0, vocab_size, 8192).tolist() for _ in range(num_long)]
    start_s, sent, ends = engine.now(), 0, []
    with watch_device(engine) as monitor:
        while len(ends) < num_long:
            due_s = start_s + every_s * sent
            if sent < num_long and engine.now() >= due_s:
                engine.add_request(
                    f"long-{sent}",
                    long_prompts[sent],
                    SamplingParams(max_tokens=1, **GREEDY),
                    output_kind=OutputKind.FINAL_ONLY,
                    arrival_s=due_s,
                    slo=Slo(ttft_ms=slo.ttft_ms),
                )
                sent += 1
            for output in engine.step(due_s if sent < num_long else None):
                if output.request_id.startswith("long-"):
                    ends.append(output.metrics)
    end_s = engine.now()
    gaps: list[float] = []
    for index in range(64):
        engine.abort(f"run-{index}")
    while engine.has_unfinished_requests():
        for output in engine.step():
            times = np.array(output.metrics.token_times_s)
            gaps += (np.diff(times[(times >= start_s) & (times <= end_s)]) * 1e3).tolist()
    return {
        "policy": policy,
        "slo": str(slo),
        "itl_ms": dataclasses.asdict(summarize_ms(gaps)),  # type: ignore[arg-type]
        "itl_max_ms": max(gaps),
        "long_ttft_ms": dataclasses.asdict(summarize_ms(m.ttft_ms for m in ends if m.ttft_ms)),  # type: ignore[arg-type]
        "prefill_tokens_per_s": 8192 * num_long / (end_s - start_s),
        "policy_seconds": dict(engine.stats().policy_seconds),
        "device": dataclasses.asdict(monitor.report),
    }


def host_time(
    engine: Engine, policy: str, slo: Slo, *, running: int = 128, steps: int = 600
) -> dict[str, Any]:
    """What a step of the loop costs the host while ``running`` requests decode and now and then a long prompt comes.

    Told apart: launching (kernels and graphs, by the executor), and all else (planning, books, outputs); waiting for
    the device is neither.
    """
    rng = np.random.default_rng(0)
    engine.set_policy(policy, slo)
    for index in range(running):
        prompt = rng.integers(0, 1000, 500).tolist()
        engine.add_request(
            str(index), prompt, SamplingParams(max_tokens=4000, **GREEDY), output_kind=OutputKind.FINAL_ONLY
        )
    while engine.stats().num_decoding < running:
        engine.step()
    executor = engine._core.executor
    spent = {"wait_any": 0.0, "launch": 0.0}

    def timed(name: str) -> Any:
        method = getattr(executor, name)

        def call(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = method(*arguments)
            spent[name] += time.perf_counter() - start_s
            return result

        return call

    for name in spent:
        setattr(executor, name, timed(name))
    long_prompt = rng.integers(0, 1000, 6000).tolist()
    loop: list[float] = []
    launch: list[float] = []
    for step in range(steps):
        if step % 150 == 75:
            engine.add_request(f"long-{step}", long_prompt, SamplingParams(max_tokens=1, **GREEDY))
        spent.update(wait_any=0.0, launch=0.0)
        start_s = time.perf_counter()
        engine.step()
        launch.append(spent["launch"] * 1e3)
        loop.append((time.perf_counter() - start_s - spent["wait_any"] - spent["launch"]) * 1e3)
    for name in spent:
        delattr(executor, name)
    for index in range(running):
        engine.abort(str(index))
    while engine.has_unfinished_requests():
        engine.step()
    return {
        "policy": policy,
        "slo": str(slo),
        "running": running,
        "loop_ms": dataclasses.asdict(summarize_ms(loop)),  # type: ignore[arg-type]
        "launch_ms": dataclasses.asdict(summarize_ms(launch)),  # type: ignore[arg-type]
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table(
        "setting", "policy", "within targets", "goodput/s", "TTFT p50/p90", "TPOT p50/p90", "ITL p99", "W"
    )
    for r in results:
        power = r["device"]["power_w"]
        table.add_row(
            r["setting"],
            r["policy"],
            f"{r['slo_attainment']:.3f}",
            f"{r['request_goodput']:.2f}",
            f"{r['median_ttft_ms']:.0f} / {r['p90_ttft_ms']:.0f}",
            f"{r['median_tpot_ms']:.1f} / {r['p90_tpot_ms']:.1f}",
            f"{r['p99_itl_ms']:.0f}",
            f"{power['mean']:.0f}" if power else "",
        )
    Console(width=150).print(table)


@click.command()
@click.option("--model", default="llama-3.1-8b", show_default=True)
@click.option("--perf-table", help="Instead of the shipped one.")
@click.option("--policies", default=POLICIES, show_default=True)
@click.option(
    "--setting",
    "settings",
    multiple=True,
    default=SETTINGS,
    help="Trace, requests, rate, targets, and perhaps policies=NAME,… for it alone.",
)
@click.option("--serve/--no-serve", "does_serve", default=True)
@click.option("--steady/--no-steady", "does_steady", default=True)
@click.option("--host/--no-host", "does_host", default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(
    model: str,
    perf_table: str | None,
    policies: str,
    settings: tuple[str, ...],
    does_serve: bool,
    does_steady: bool,
    does_host: bool,
    seed: int,
    output_json: Path,
) -> None:
    """Run all policies and write what they brought as one JSON."""
    report: dict[str, Any] = {
        "model": model,
        "provenance": dataclasses.asdict(collect_provenance("cuda")),
        "serving": [],
        "steady": [],
        "host": [],
    }

    def save() -> None:
        output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    targets = Slo(ttft_ms=500, tpot_ms=15)
    with Engine(
        model,
        policy="auto",
        perf_table=perf_table,
        max_num_seqs=512,
        max_model_len=16384,
        load_format="dummy",
    ) as engine:
        report["partition_backend"] = engine.partition_backend
        # Kernels are loaded on first use, and the card gets warm.
        for policy in ("auto", "split", "mixed"):
            serve(engine, "azure:conv 40 40 ttft:500 tpot:15", policy, seed=1)
        if does_steady:
            for policy in STEADY_POLICIES:
                report["steady"].append(steady(engine, policy, targets))
                save()
            for r in report["steady"]:
                click.echo(
                    f"steady {r['policy']:>10}: ITL p50 {r['itl_ms']['p50']:.1f} p99 {r['itl_ms']['p99']:.1f} max "
                    f"{r['itl_max_ms']:.1f} ms; {r['prefill_tokens_per_s']:,.0f} prompt tokens/s; "
                    f"TTFT p50 {r['long_ttft_ms']['p50']:.0f} p90 {r['long_ttft_ms']['p90']:.0f} ms"
                )
        if does_host:
            for policy in ("mixed", "auto", "split:64"):
                report["host"].append(host_time(engine, policy, targets))
                save()
            for r in report["host"]:
                parts = (
                    f"{name} p50 {t['p50']:.3f} p90 {t['p90']:.3f} p99 {t['p99']:.3f} ms"
                    for name, t in (("loop", r["loop_ms"]), ("launch", r["launch_ms"]))
                )
                click.echo(f"host {r['policy']:>10}: {', '.join(parts)} a step")
        for text in settings if does_serve else ():
            setting, _, only = text.partition(" policies=")
            for policy in (only or policies).split(","):
                report["serving"].append(serve(engine, setting, policy, seed))
                save()
    show(report["serving"])


if __name__ == "__main__":
    main()
