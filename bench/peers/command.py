"""The command: what to compare, from options to a table and a file."""

import asyncio
import dataclasses
import json
import math
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import torch

from bench.peers.comparison import Comparison
from bench.peers.loads import make_loads, make_setup
from bench.peers.report import print_runs
from bench.peers.residents import group, installed, open_system, require_memory
from bench.peers.systems import Candidate, peer_versions
from bullet_graph.cli import EXIT_ERROR
from bullet_graph.cli.bench.sweep import print_sweep
from bullet_graph.cli.bench.sweep_cells import WorkloadSpec
from bullet_graph.cli.bench.sweep_file import SweepFile
from bullet_graph.cli.options import parse_size, result_options
from bullet_graph.config import DeviceName, DtypeName, LoadFormat
from bullet_graph.engine.replay import event_loop_factory
from bullet_graph.errors import BulletGraphError, ConfigError, EngineDeadError
from bullet_graph.models.presets import resolve_model
from bullet_graph.perf.goodput_search import FASTEST_RATE
from bullet_graph.perf.provenance import collect_provenance

_NO_SETTINGS = ("vllm_log", "own_decisions", "one_at_a_time")
"""Options that no figure depends on, or that have a place of their own."""


class _Refusal(click.ClickException):
    exit_code = EXIT_ERROR


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", required=True, help="A preset's name, or a Hugging Face model folder.")
@click.option(
    "--system",
    "systems",
    multiple=True,
    required=True,
    metavar="own:POLICY[/ORDER]|vllm[:CHUNK]|openai:URL",
    help="What to compare; may be given several times. ORDER: of prompts, arrival or longest-output. CHUNK: most "
    "tokens of a step of vLLM's.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    required=True,
    metavar="NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS]",
    help="Such as 'azure:conv=600~10@ttft:500 tpot:15'; may be given several times.",
)
@click.option(
    "--rates", metavar="R,R,…", callback=lambda *a: _parse_rates(a[2]), help="Serve at these rates only."
)
@click.option("--all-at-once", is_flag=True, help="All requests at the start, instead of rates.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Runs at each of --rates, or all at once.",
)
@click.option(
    "--first-rate", type=float, default=8.0, show_default=True, help="Where a search for goodput begins."
)
@click.option(
    "--attainment", type=float, default=0.9, show_default=True, help="Share that must meet all targets."
)
@click.option(
    "--tolerance", type=float, default=0.02, show_default=True, help="How exact a goodput is, relative."
)
@click.option(
    "--step", type=float, default=1.25, show_default=True, help="First factor between rates of a search."
)
@click.option("--max-runs", type=click.IntRange(min=1), default=20, show_default=True, help="Of one search.")
@click.option(
    "--best-peer-only",
    is_flag=True,
    help="Give up a peer's setting once another of that peer served enough at a rate too fast for it.",
)
@click.option(
    "--warmup-requests", type=click.IntRange(min=0), default=32, show_default=True, help="Unmeasured."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--one-at-a-time", is_flag=True, help="Close each system before the next starts, for its memory."
)
@click.option("--skip-missing", is_flag=True, help="Leave out systems that are not installed.")
@click.option("--load-format", type=click.Choice(get_args(LoadFormat)), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(get_args(DtypeName)), default="auto", show_default=True)
@click.option("--device", type=click.Choice(get_args(DeviceName)), default="auto", show_default=True)
@click.option("--perf-table", metavar="FILE|roofline", help="This engine's, instead of the one that fits.")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    help="Most tokens of a prompt and its output.  [default: what the workloads need]",
)
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option(
    "--gpu-memory-utilization",
    type=float,
    default=0.45,
    show_default=True,
    help="Share of the memory for each system that this process starts.",
)
@click.option("--kv-cache-bytes", metavar="SIZE", callback=parse_size, help="This engine's KV cache.")
@click.option(
    "--vllm-option",
    "vllm_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of vLLM's AsyncEngineArgs, the value as JSON or text.",
)
@click.option(
    "--vllm-log", type=click.Path(path_type=Path, dir_okay=False), help="A file for vLLM's messages."
)
@click.option(
    "--own-decisions",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A new file for every decision of this engine's planner (see `bullet-graph explain`).",
)
@result_options
def compare(
    systems: tuple[str, ...],
    workloads: tuple[str, ...],
    skip_missing: bool,
    output_json: Path | None,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve the same requests with several systems in turn, and compare what their clients see.

    Without --rates and --all-at-once, the highest rate is searched at which enough requests meet their targets, for all
    systems side by side. Every run is in --output-json as soon as it has ended; the same command goes on from there.

    \b
    Examples:
      python -m bench.peers --model llama-3.1-8b --system own:auto --system vllm:512 --system vllm:2048 \\
          --workload "azure:conv=600~18@ttft:500 tpot:15" --output-json peers.json
      python -m bench.peers --model llama-3.1-8b --system own:mixed --system vllm --all-at-once --one-at-a-time \\
          --gpu-memory-utilization 0.9 --workload azure:conv=600 --output-json offline.json
    """
    try:
        if output_json is None:
            raise ConfigError(
                "a comparison needs --output-json FILE: runs are kept there, and it goes on from there"
            )
        candidates = installed(list(dict.fromkeys(map(Candidate.parse, systems))), skip=skip_missing)
        file = _compare(candidates, workloads, output_json, overwrite=overwrite, **options)
    except BulletGraphError as error:
        if isinstance(error, EngineDeadError) and error.__cause__ is not None:
            # The line alone would hide where a device, or the system itself, failed.
            traceback.print_exception(error.__cause__)
        raise _Refusal(str(error)) from error
    if as_json:
        click.echo(json.dumps(file.sweep.fields(), indent=2, allow_nan=False))
        return
    print_runs(file.sweep)
    if options["rates"] is None and not options["all_at_once"]:
        print_sweep(file.sweep)


def _compare(
    candidates: Sequence[Candidate], workloads: Sequence[str], path: Path, *, overwrite: bool, **options: Any
) -> SweepFile:
    loads = make_loads([WorkloadSpec.parse(text) for text in workloads], options)
    setup = make_setup(loads, options)
    vllm_options = dict(_parse_option(text) for text in options["vllm_options"])
    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    provenance = dataclasses.asdict(collect_provenance(device))
    provenance["versions"] |= peer_versions()
    settings = {
        **{name: value for name, value in options.items() if name not in _NO_SETTINGS},
        **dataclasses.asdict(setup),
        "systems": [candidate.label for candidate in candidates],
        "workloads": list(workloads),
        "one_at_a_time": options["one_at_a_time"],
        "event_loop": "asyncio" if event_loop_factory() is None else "uvloop",
        "device_name": provenance["device_name"],
    }
    file = SweepFile.open(path, settings=settings, provenance=provenance, overwrite=overwrite)
    has_gpu = device == "cuda"
    comparison = Comparison(
        group(candidates, one_at_a_time=options["one_at_a_time"]),
        loads,
        partial(
            open_system,
            setup,
            slo=next((load.slo for load in loads if load.slo.tpot_ms is not None), loads[0].slo),
            vllm_options=vllm_options,
            vllm_log=options["vllm_log"],
            own_decisions=options["own_decisions"],
        ),
        file,
        model=options["model"],
        vocab_size=resolve_model(options["model"])[0].vocab_size,
        seed=options["seed"],
        num_warmups=options["warmup_requests"],
        best_peer_only=options["best_peer_only"],
        before_group=partial(
            require_memory, share=setup.gpu_memory_utilization, memory=torch.cuda.mem_get_info
        )
        if has_gpu
        else None,
        device_uuid=str(torch.cuda.get_device_properties(0).uuid) if has_gpu else None,
    )
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(comparison.run())
    return file


def _parse_rates(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(math.isfinite(rate) and 0 < rate < FASTEST_RATE for rate in rates):
        raise click.BadParameter(f"{text!r} is no list of rates above 0: write 18,20,22")
    return tuple(dict.fromkeys(rates))


def _parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(
            f"--vllm-option {text!r}: write NAME=VALUE, such as max_cudagraph_capture_size=1024"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
