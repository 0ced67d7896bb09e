"""``bullet-graph capture plan``: what an engine should capture for a workload."""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bullet_graph.cli.options import FILE, setting_options
from bullet_graph.cli.replay_options import (
    burstiness_option,
    gpu_option,
    num_prompts_option,
    request_rate_option,
    trace_option,
)
from bullet_graph.cli.result_file import check_result_file, to_json, write_result_file
from bullet_graph.cli.simulator import Simulator
from bullet_graph.cli.tables import table_of
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.capture_proposal import PIECEWISE, Budget, CaptureUsage, GroupKey, SizeUse, propose
from bullet_graph.graphs.capture_plan import CapturePlan, default_plan, format_plan
from bullet_graph.models.progress import progress_bar
from bullet_graph.runtime.capture_plan import max_forward_rows
from bullet_graph.workloads import Arrivals

_GB = 1e9


@click.command()
@trace_option
@num_prompts_option
@request_rate_option(required=True)
@burstiness_option
@setting_options("slo")
@gpu_option
@setting_options(
    "model",
    "policy",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_cache_bytes",
    policy=Policy("auto"),
)
@click.option(
    "--memory-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=math.inf,
    show_default="no limit",
    help="Most memory of the captured graphs, in 10⁹ bytes.",
)
@click.option(
    "--time-s",
    type=click.FloatRange(min=0, min_open=True),
    default=math.inf,
    show_default="no limit",
    help="Most seconds of capturing at a start, without compiling.",
)
@setting_options("seed")
@click.option(
    "--output",
    type=FILE,
    metavar="FILE.toml",
    help="Write the plan to this file.  [default: to stdout, and the tables to stderr]",
)
@click.option("--overwrite", is_flag=True, help="Replace the file of --output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
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
    with progress_bar(not as_json and sys.stderr.isatty(), unit="req") as advance:
        proposal = Proposal(simulator, Budget(memory_gb * _GB, time_s), lambda _: advance(1))
    notes = proposal.notes()
    text = format_plan(proposal.plan, notes)
    if output is not None:
        write_result_file(output, text.rstrip("\n"))
    if as_json:
        click.echo(to_json(proposal.fields(text)))
        return
    console = Console(stderr=output is None)
    console.print(proposal.title, markup=False, soft_wrap=True)
    console.print(proposal.size_table())
    for note in notes[2:]:
        console.print(note, markup=False, soft_wrap=True)
    click.echo(text if output is None else f"wrote {output}", nl=output is not None)


class Proposal:
    """A capture plan, and the steps it was made for: those of the workload with everything captured.

    Raises:
        ConfigError: the budget does not allow a single graph.
    """

    def __init__(self, simulator: Simulator, budget: Budget, on_done: Callable[[object], object]) -> None:
        config, policy = simulator.config, simulator.config.policy
        lanes = simulator.performance.decode_sms if policy.name in ("auto", "split") else ()
        self.simulator = simulator
        self.budget = budget
        self.default = default_plan(
            model=Path(config.model).name,
            dtype=simulator.dtype,
            num_sms=simulator.performance.num_sms,
            max_num_seqs=config.max_num_seqs,
            max_rows=max_forward_rows(config),
            shape=simulator.model,
            decode_sms=lanes if policy.decode_sms is None else (policy.decode_sms,),
        )
        self.usage = CaptureUsage(simulator.unpadded)
        simulator.run(policy, capture_plan=self.default, on_done=on_done, on_step=self.usage.note)
        self.groups = self.usage.groups(self.default)
        self.plan = propose(self.groups, budget, like=self.default)

    @property
    def title(self) -> str:
        """The workload and the device."""
        simulator = self.simulator
        rate = {None: "its own times", math.inf: "once"}.get(
            simulator.arrivals.request_rate, f"{simulator.arrivals.request_rate or 0:g} requests/s"
        )
        source = simulator.times if simulator.times.startswith("roofline") else f"a {simulator.times}"
        served = f"{simulator.workload.name} at {rate}, {simulator.config.slo}"
        return f"{served}, {simulator.config.model} on {simulator.gpu} ({source})"

    def notes(self) -> tuple[str, ...]:
        """Comments for the top of the plan's file."""
        num_layers = self.usage.model.num_layers
        return (
            "What an engine captures at its start; written by `bullet-graph capture plan` for",
            f"{self.title}, policy {self.simulator.config.policy}.",
            f"About {self.plan.graph_bytes(num_layers) / _GB:.2f} GB and {self.plan.capture_s(num_layers):.1f} s. "
            f"Padding and missing sizes cost {self._lost_percent(self.plan):.2f} %",
            f"of the device's time, and {self._lost_percent(self.default):.2f} % without a plan.",
        )

    def fields(self, text: str) -> dict[str, Any]:
        """The JSON's fields; a limit that is none, and the worth of a required size, are null."""
        usage, config, rate = self.usage, self.simulator.config, self.simulator.arrivals.request_rate
        decode_steps = {
            (sms, size): sums.num_steps for sms, sizes in usage.decode.items() for size, sums in sizes.items()
        }
        total = sum(decode_steps.values()) + sum(sums.num_steps for sums in usage.forwards.values())
        decode = [
            {"decode_sms": sms, "batch_size": size, "num_steps": n, "share": n / total}
            for (sms, size), n in sorted(decode_steps.items(), key=lambda item: (item[0][0] or 0, item[0][1]))
        ]
        forwards = [
            {"rows": rows, "num_steps": sums.num_steps, "share": sums.num_steps / total}
            for rows, sums in sorted(usage.forwards.items())
        ]
        groups = [
            {
                "name": name,
                "sizes": [dataclasses.asdict(use) | {"worth_ms": _finite(use.worth_ms)} for use in uses],
            }
            for name, uses in self._uses().items()
        ]
        num_layers = usage.model.num_layers
        return self.simulator.describe() | {
            "model": config.model,
            "policy": str(config.policy),
            "request_rate": "trace" if rate is None else _finite(rate, "inf"),
            "budget": {
                "memory_gb": _finite(self.budget.memory_bytes / _GB),
                "time_s": _finite(self.budget.time_s),
            },
            "device_ms": usage.device_ms,
            "seen": {"decode": decode, "forwards": forwards},
            "plan": dataclasses.asdict(self.plan),
            "num_decode_graphs": self.plan.num_decode_graphs,
            "memory_gb": self.plan.graph_bytes(num_layers) / _GB,
            "time_s": self.plan.capture_s(num_layers),
            "lost_percent": self._lost_percent(self.plan),
            "lost_percent_without_plan": self._lost_percent(self.default),
            "groups": groups,
            "toml": text,
        }

    def size_table(self) -> Table:
        """The proposal's sizes: the steps that each serves, and the time lost without it."""
        table = table_of("captured for", "rows", "steps", "unpadded, %", "worth, ms", title="The proposal")
        for name, uses in self._uses().items():
            for use in uses:
                exact = f"{100 * use.num_exact / use.num_steps:.0f}" if use.num_steps else ""
                worth = "required" if math.isinf(use.worth_ms) else f"{use.worth_ms:,.1f}"
                table.add_row(name, str(use.size), f"{use.num_steps:,}", exact, worth)
            table.add_section()
        return table

    def _uses(self) -> dict[str, tuple[SizeUse, ...]]:
        """What each captured size does, by group."""
        return {group.name: group.uses(_sizes(self.plan, key)) for key, group in self.groups.items()}

    def _lost_percent(self, plan: CapturePlan) -> float:
        lost_ms = sum(group.lost_ms(_sizes(plan, key), seen=True) for key, group in self.groups.items())
        return 100 * lost_ms / self.usage.device_ms if self.usage.device_ms else 0.0


def _sizes(plan: CapturePlan, key: GroupKey) -> tuple[int, ...]:
    if key == PIECEWISE:
        return plan.piecewise_rows
    return next((entry.batch_sizes for entry in plan.decode if entry.decode_sms == key), ())


def _finite(value: float, infinite: str | None = None) -> float | str | None:
    # JSON has no infinity.
    return infinite if math.isinf(value) else value
