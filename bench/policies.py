"""What a long prompt does to running requests under each policy, and what a step costs the host.

    python -m bench.policies --output-json bench/results/h200/policies_steady.json

"steady": 64 requests decode at a context of about 1,000 tokens while a prompt of 8,192 tokens arrives every 400 ms.
"host": 128 requests decode and a long prompt comes now and then; the host's time per step is split into launches and
all else. Policies at given rates are compared by `bullet-graph bench sweep`.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.record import write_report
from bullet_graph import Engine, SamplingParams, Slo
from bullet_graph.cli.engine_run import watch_device
from bullet_graph.engine.output import OutputKind
from bullet_graph.perf.metrics import RequestMetrics, summarize_ms

STEADY_POLICIES = "mixed:2048,auto,split,mixed"
HOST_POLICIES = "mixed,auto,split:64"
RUNNING, LONG_PROMPT, EVERY_S = 64, 8192, 0.4
SETTLE_S = 1.0


def greedy(max_tokens: int) -> SamplingParams:
    """As many tokens as asked for, always the likeliest."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def start_decoding(engine: Engine, count: int, prompt_tokens: int, output_kind: OutputKind, slo: Slo) -> None:
    """Add requests, and step until all of them decode."""
    rng = np.random.default_rng(0)
    for index in range(count):
        prompt = rng.integers(0, engine.model_config.vocab_size, prompt_tokens).tolist()
        params = greedy(4000)
        engine.add_request(f"run-{index}", prompt, params, output_kind=output_kind, slo=slo)
    while engine.stats().num_decoding < count:
        engine.step()


def end_all(engine: Engine, count: int) -> list[Any]:
    """Abort the running requests; returns their last outputs."""
    for index in range(count):
        engine.abort(f"run-{index}")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def steady(engine: Engine, policy: str, slo: Slo, num_long: int) -> dict[str, Any]:
    """Decode beside a long prompt every 400 ms."""
    engine.set_policy(policy, slo)
    start_decoding(engine, RUNNING, 800, OutputKind.CUMULATIVE, Slo(tpot_ms=slo.tpot_ms))
    settle_s = engine.now() + SETTLE_S
    while engine.now() < settle_s:
        engine.step()
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, engine.model_config.vocab_size, (num_long, LONG_PROMPT)).tolist()
    start_s, sent = engine.now(), 0
    ends: list[RequestMetrics] = []
    with watch_device(engine) as monitor:
        while len(ends) < num_long:
            due_s = start_s + EVERY_S * sent
            if sent < num_long and engine.now() >= due_s:
                engine.add_request(
                    f"long-{sent}",
                    prompts[sent],
                    greedy(1),
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
    for output in end_all(engine, RUNNING):
        times = np.array(output.metrics.token_times_s)
        gaps += (np.diff(times[(times >= start_s) & (times <= end_s)]) * 1e3).tolist()
    return {
        "policy": policy,
        "slo": str(slo),
        "itl_ms": dataclasses.asdict(summarize_ms(gaps)),  # type: ignore[arg-type]
        "itl_max_ms": max(gaps),
        "long_ttft_ms": dataclasses.asdict(summarize_ms(m.ttft_ms for m in ends if m.ttft_ms)),  # type: ignore[arg-type]
        "prefill_tokens_per_s": LONG_PROMPT * num_long / (end_s - start_s),
        "policy_seconds": dict(engine.stats().policy_seconds),
        "device": dataclasses.asdict(monitor.report),
    }


def host_time(engine: Engine, policy: str, slo: Slo, steps: int, running: int) -> dict[str, Any]:
    """The host's time per step: launches, and all else; waiting for the device is neither."""
    engine.set_policy(policy, slo)
    start_decoding(engine, running, 500, OutputKind.FINAL_ONLY, Slo())
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
    rng = np.random.default_rng(1)
    loop: list[float] = []
    launch: list[float] = []
    for step in range(steps):
        if step % 150 == 75:
            engine.add_request(f"long-{step}", rng.integers(0, 1000, 6000).tolist(), greedy(1))
        spent.update(wait_any=0.0, launch=0.0)
        start_s = time.perf_counter()
        engine.step()
        launch.append(spent["launch"] * 1e3)
        loop.append((time.perf_counter() - start_s - spent["wait_any"] - spent["launch"]) * 1e3)
    for name in spent:
        delattr(executor, name)
    end_all(engine, running)
    return {
        "policy": policy,
        "running": running,
        "loop_ms": dataclasses.asdict(summarize_ms(loop)),  # type: ignore[arg-type]
        "launch_ms": dataclasses.asdict(summarize_ms(launch)),  # type: ignore[arg-type]
    }


@click.command()
@click.option("--model", default="llama-3.1-8b", show_default=True)
@click.option("--perf-table", metavar="FILE|roofline", help="Instead of the shipped table.")
@click.option("--policies", default=STEADY_POLICIES, show_default=True, help="Of the steady load.")
@click.option("--host-policies", default=HOST_POLICIES, show_default=True, help="Of the host's time.")
@click.option("--num-long", type=click.IntRange(min=1), default=30, show_default=True, help="Long prompts.")
@click.option("--steps", type=click.IntRange(min=1), default=600, show_default=True, help="Of the host's time.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(
    model: str, perf_table: str | None, policies: str, host_policies: str, num_long: int, steps: int, output_json: Path
) -> None:
    """Run every policy and write the results as one JSON."""
    targets = Slo(ttft_ms=500, tpot_ms=15)
    report: dict[str, Any] = {"model": model, "steady": [], "host": []}
    with Engine(
        model, policy="auto", perf_table=perf_table, load_format="dummy", max_num_seqs=512, max_model_len=16384
    ) as engine:
        report["partition_backend"] = engine.partition_backend
        steady(engine, "auto", targets, num_long=3)  # kernels are loaded on first use, and the card gets warm
        for policy in filter(None, policies.split(",")):
            found = steady(engine, policy, targets, num_long)
            report["steady"].append(found)
            click.echo(
                f"steady {policy:>10}: ITL p50 {found['itl_ms']['p50']:.1f} p99 {found['itl_ms']['p99']:.1f} ms, "
                f"{found['prefill_tokens_per_s']:,.0f} prompt tokens/s, "
                f"TTFT p50 {found['long_ttft_ms']['p50']:.0f} p90 {found['long_ttft_ms']['p90']:.0f} ms"
            )
        for policy in filter(None, host_policies.split(",")):
            found = host_time(engine, policy, targets, steps, 2 * RUNNING)
            report["host"].append(found)
            texts = (
                f"{name} p50 {found[f'{name}_ms']['p50']:.3f} p90 {found[f'{name}_ms']['p90']:.3f} ms"
                for name in ("loop", "launch")
            )
            click.echo(f"host {policy:>12}: {', '.join(texts)} per step")
    write_report(output_json, report, device=engine.device_name)


if __name__ == "__main__":
    main()
