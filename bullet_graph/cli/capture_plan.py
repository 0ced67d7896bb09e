"""``bullet-graph capture plan``: what an engine should capture for a workload."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli import replay_options
from bullet_graph.cli.options import FILE, json_option, setting_options
from bullet_graph.cli.result_file import check_result_file, to_json, write_result_file
from bullet_graph.cli.simulate import Simulator
from bullet_graph.cli.tables import print_line
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.capture_proposal import Budget, CaptureUsage, propose
from bullet_graph.engine.replay import json_number
from bullet_graph.graphs.capture_plan import default_plan, format_plan
from bullet_graph.models.progress import progress_bar
from bullet_graph.workloads import Arrivals

_GB = 1e9
_limit = partial(click.option, type=click.FloatRange(min=0, min_open=True), default=math.inf, show_default="no limit")


@click.command()
@replay_options.trace_option
@replay_options.num_prompts_option
@replay_options.request_rate_option(required=True)
@replay_options.burstiness_option
@setting_options("slo")
@replay_options.gpu_option
@setting_options(*replay_options.SIMULATED_MODEL, "policy", policy=Policy("auto"))
@setting_options("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_bytes")
@_limit("--memory-gb", help="Most memory of the captured graphs, in 10⁹ bytes.")
@_limit("--time-s", help="Most seconds of capturing at a start, without compiling.")
@setting_options("seed")
@click.option("--output", type=FILE, metavar="FILE.toml", help="Write the plan to this file.  [default: to stdout]")
@click.option("--overwrite", is_flag=True, help="Replace the file of --output if it exists.")
@json_option
def plan(
    trace: str,
    num_prompts: int | None,
    request_rate: float | None,
    burstiness: float,
    gpu: str,
    memory_gb: float,
    time_s: float,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Propose a capture plan for a workload, within budgets of memory and time.

    The workload is served in virtual time, by the engine's own scheduler and planner. Of the sizes that come up, the
    proposal takes those that save the most time: less padding, fewer launches one by one.

    \b
    Examples:
      bullet-graph capture plan --model llama-3.1-8b --trace azure:conv --request-rate 18 \\
          --slo "ttft:500 tpot:15" --output conv.toml
      bullet-graph capture plan --model llama-3.1-8b --trace azure:code --request-rate 12 \\
          --slo "ttft:500 tpot:8" --memory-gb 0.4 --time-s 3 --json
    """
    config = EngineConfig(**settings)
    check_result_file(output, overwrite=overwrite, option="--output")
    arrivals = Arrivals(request_rate=request_rate, burstiness=burstiness, seed=config.seed)
    simulator = Simulator(gpu=gpu, config=config, trace=trace, num_prompts=num_prompts, arrivals=arrivals)
    dtype, num_sms = simulator.dtype, simulator.performance.num_sms
    full = default_plan(config, dtype=dtype, num_sms=num_sms, shape=simulator.model, decode_sms=_lanes(simulator))
    usage = CaptureUsage(simulator.unpadded, routes=simulator.model.num_experts > 0)
    with progress_bar(not as_json and sys.stderr.isatty(), unit="req") as advance:
        simulator.run(config.policy, capture_plan=full, on_done=lambda _: advance(1), on_step=usage.note)
    groups = usage.groups(full)
    proposed = propose(groups, Budget(memory_gb * _GB, time_s), like=full)
    lost, lost_without = (usage.lost_percent(groups, each) for each in (proposed, full))
    memory = proposed.graph_bytes(usage.model.num_layers) / _GB
    seconds = proposed.capture_s(usage.model.num_layers)
    at = "recorded times" if request_rate is None else f"{request_rate:g} requests/s"
    notes = (
        "What an engine captures at its start; written by `bullet-graph capture plan` for",
        f"{simulator.title()}, policy {config.policy}, at {at}.",
        f"About {memory:.2f} GB and {seconds:.1f} s. Padding and missing sizes cost {lost:.2f} %",
        f"of the device's time, and {lost_without:.2f} % without a plan.",
    )
    text = format_plan(proposed, notes)
    if output is not None:
        write_result_file(output, text.rstrip("\n"))
    if as_json:
        limits = (("memory_gb", memory_gb), ("time_s", time_s))
        fields = simulator.describe() | {
            "model": config.model,
            "policy": str(config.policy),
            "request_rate": "trace" if request_rate is None else json_number(request_rate),
            # JSON has no infinity.
            "budget": {name: None if math.isinf(most) else most for name, most in limits},
            "seen": _seen(usage),
            "plan": dataclasses.asdict(proposed),
            "num_decode_graphs": proposed.num_decode_graphs,
            "memory_gb": memory,
            "time_s": seconds,
            "lost_percent": lost,
            "lost_percent_without_plan": lost_without,
            "toml": text,
        }
        click.echo(to_json(fields))
    elif output is None:
        click.echo(text, nl=False)
    else:
        for line in (*notes[1:], f"wrote {output}"):
            print_line(line)


def _lanes(simulator: Simulator) -> Sequence[int]:
    """Sizes of the decode lane, in SMs, that the policy may choose."""
    policy = simulator.config.policy
    if policy.decode_sms is not None:
        return (policy.decode_sms,)
    return simulator.performance.decode_sms if policy.uses_prefill_lane else ()


def _seen(usage: CaptureUsage) -> list[dict[str, Any]]:
    """The steps that came up, by what captures them (SMs of the decode lane, null: all; or piecewise graphs)."""
    counts = {(key, rows): len(same) for key, sizes in usage.steps.items() for rows, same in sizes.items()}
    total = sum(counts.values())
    return [
        {"captured_for": key, "rows": rows, "num_steps": count, "share": count / total}
        for (key, rows), count in counts.items()
    ]
