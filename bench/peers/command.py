"""The command: what to compare, from options to a table and a file."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.peers.comparison import Comparison, make_peer_cells, make_setup
from bench.peers.residents import group, open_system, require_installed, require_memory
from bench.peers.systems import OPTION_EXAMPLES, Candidate, Kind, peer_versions
from bench.record import Tool
from bullet_graph.cli.bench.sweep import print_sweep
from bullet_graph.cli.bench.sweep_runner import Sweep, WorkloadSpec
from bullet_graph.cli.options import Decorator, all_of, setting_options
from bullet_graph.cli.replay_options import burstiness_option, search_options, sweep_file_options
from bullet_graph.cli.result_file import to_json
from bullet_graph.cli.tables import figure, mean_of
from bullet_graph.engine.replay import event_loop_factory, json_number
from bullet_graph.errors import ConfigError, DeviceError
from bullet_graph.models.presets import resolve_model
from bullet_graph.perf.energy import open_probe
from bullet_graph.perf.goodput_search import FASTEST_RATE
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.workloads import Arrivals

_NO_SETTINGS = ("vllm_log", "sglang_log", "own_decisions", "one_at_a_time")
"""Options that no figure depends on, or that are listed apart."""

_LEAST_WIDTH = 160


def _options_of(peer: str, arguments: str) -> Decorator:
    """Options for a peer's own arguments, and for a file of its messages."""
    given = click.option(
        f"--{peer.lower()}-option",
        f"{peer.lower()}_options",
        multiple=True,
        metavar="NAME=VALUE",
        help=f"An argument of {peer}'s {arguments}, the value as JSON or text.",
    )
    path = click.Path(path_type=Path, dir_okay=False)
    return all_of([given, click.option(f"--{peer.lower()}-log", type=path, help=f"A file for {peer}'s messages.")])


@click.command(cls=Tool)
@setting_options("model")
@click.option(
    "--system",
    "systems",
    multiple=True,
    required=True,
    metavar="own:POLICY[/ORDER]|vllm[:CHUNK]|sglang[:CHUNK|:pdmux]|openai:URL",
    help="What to compare; repeat it for several. ORDER: of prompts, arrival or longest-output. CHUNK: most tokens of "
    "a step of vLLM, or of a prefill step of SGLang. pdmux: SGLang's PD multiplexing.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    required=True,
    metavar="NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS]",
    help="Such as 'synthetic:conv~18@ttft:500 tpot:15'; repeat it for several.",
)
@click.option("--rates", metavar="R,R,…", callback=lambda *a: _parse_rates(a[2]), help="Serve at these rates only.")
@click.option("--all-at-once", is_flag=True, help="All requests at the start, instead of rates.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, help="Runs at each of --rates, or all at once.")
@search_options
@burstiness_option
@click.option(
    "--best-peer-only",
    is_flag=True,
    help="Give up a peer's setting once others of that peer served enough at rates too fast for it.",
)
@click.option("--warmup-requests", type=click.IntRange(min=0), default=32, help="Unmeasured.")
@click.option("--one-at-a-time", is_flag=True, help="Close each system before the next starts, for its memory.")
@setting_options(
    "seed",
    "load_format",
    "dtype",
    "device",
    "perf_table",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_bytes",
    "kv_cache_dtype",
    "tensor_parallel_size",
    max_num_seqs=1024,
    gpu_memory_utilization=0.45,
)
@_options_of("vLLM", "AsyncEngineArgs")
@_options_of("SGLang", "ServerArgs")
@click.option(
    "--own-decisions",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A new file for every decision of this engine's planner (see `bullet-graph explain`).",
)
@sweep_file_options
def compare(
    systems: tuple[str, ...],
    workloads: tuple[str, ...],
    output_json: Path,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve the same requests with several systems in turn, and compare what their clients see.

    Without --rates and --all-at-once, it searches the goodputs of all systems side by side: the highest rates at which
    90 and 99 % of the requests meet their targets. A run at a rate lasts two minutes, with at least 300 requests.
    --output-json has every run as soon as it has ended; the same command resumes from there. Memory, KV cache and
    performance table are this engine's; --gpu-memory-utilization is for each system.

    \b
    Examples:
      python -m bench.peers --model llama-3.1-8b --system own:auto --system vllm:512 --system vllm:2048 \\
          --workload "synthetic:conv~18@ttft:500 tpot:15" --output-json peers.json
      python -m bench.peers --model llama-3.1-8b --system own:mixed --system vllm --all-at-once --one-at-a-time \\
          --gpu-memory-utilization 0.9 --workload azure:conv=600 --output-json offline.json
    """
    candidates = list(dict.fromkeys(map(Candidate.parse, systems)))
    require_installed(candidates)
    sweep = _compare(candidates, workloads, output_json, overwrite=overwrite, **options)
    if as_json:
        click.echo(to_json(sweep.fields()))
        return
    print_runs(sweep)
    if not options["all_at_once"]:
        print_sweep(sweep)


def _compare(
    candidates: Sequence[Candidate], workloads: Sequence[str], path: Path, *, overwrite: bool, **options: Any
) -> Sweep:
    cells = make_peer_cells([WorkloadSpec.parse(text) for text in workloads], candidates, options)
    setup = make_setup(cells, options)
    peers = {peer: dict(_parse_option(peer, text) for text in options[f"{peer}_options"]) for peer in OPTION_EXAMPLES}
    vocab_size = resolve_model(options["model"]).config.vocab_size
    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and setup.tensor_parallel_size > (found := torch.cuda.device_count()):
        raise DeviceError(
            f"--tensor-parallel-size {setup.tensor_parallel_size} needs as many GPUs, and torch sees {found}"
        )
    provenance = dataclasses.asdict(collect_provenance(device))
    provenance["versions"] |= peer_versions()
    # Older files lack these options, and are to go on.
    defaults = {"sglang_options": (), "tensor_parallel_size": 1, "burstiness": 1.0}
    settings = {
        **{name: value for name, value in options.items() if name not in _NO_SETTINGS},
        **dataclasses.asdict(setup),
        "systems": [candidate.label for candidate in candidates],
        "workloads": list(workloads),
        "burstiness": json_number(options["burstiness"]),
        "one_at_a_time": options["one_at_a_time"],
        "event_loop": "asyncio" if event_loop_factory() is None else "uvloop",
        "device_name": provenance["device_name"],
    }
    settings = {name: value for name, value in settings.items() if name not in defaults or value != defaults[name]}
    sweep = Sweep.open(path, settings=settings, provenance=provenance, overwrite=overwrite)
    memory = partial(
        require_memory,
        share=setup.gpu_memory_utilization,
        memory=lambda: min(map(torch.cuda.mem_get_info, range(setup.tensor_parallel_size))),
    )
    start = partial(
        open_system,
        setup,
        # One with a target for TPOT, if there is any: then mixed predicts its chunks.
        slo=next((cell.slo for cell in cells if cell.slo.tpot_ms is not None), cells[0].slo),
        options=peers,
        logs={peer: options[f"{peer}_log"] for peer in peers},
        own_decisions=options["own_decisions"],
    )
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        Comparison(
            group(candidates, one_at_a_time=options["one_at_a_time"]),
            cells,
            start,
            sweep,
            runner,
            model=options["model"],
            vocab_size=vocab_size,
            arrivals=Arrivals(request_rate=1.0, burstiness=options["burstiness"], seed=options["seed"]),
            num_warmups=options["warmup_requests"],
            smoke=options["smoke"],
            best_peer_only=options["best_peer_only"],
            before_group=memory if device == "cuda" else lambda _: None,
            probe=partial(open_probe, torch.device(device), setup.tensor_parallel_size),
        ).run()
    return sweep


def print_runs(sweep: Sweep) -> None:
    """Show all runs on stdout: a table for each workload and targets, by rate, systems side by side."""
    # A file, or a narrow terminal, gets long lines rather than unreadable columns.
    console = Console(width=max(Console().width, _LEAST_WIDTH))
    for task in dict.fromkeys(cell.key.task for cell in sweep.cells):
        table = Table(
            *("at, requests/s", "system", "met all targets, %", "requests/s", "output tokens/s"),
            *("TTFT, p50 / p99 / max, ms", "TPOT, p50 / p90, ms", "ITL, p99, ms", "failed", "J/token", "W"),
            title=str(task),
            title_justify="left",
        )
        for column in table.columns:
            column.no_wrap = column.header == "system"
            column.justify = "left" if column.no_wrap else "right"
        runs = [(run, cell.system) for cell in sweep.cells if cell.key.task == task for run in cell.runs]
        for rate in sorted({run["request_rate"] for run, _ in runs}):
            for run, system in runs:
                if run["request_rate"] == rate:
                    table.add_row(*_row(run, system))
            table.add_section()
        console.print(table)


def _row(run: Mapping[str, Any], system: str) -> list[str | Text]:
    return [
        "all at once" if run["all_at_once"] else f"{run['request_rate']:.4g}",
        Text(system),
        f"{100 * run['slo_attainment']:.1f}{' (unstable)' if run['stable'] is False else ''}",
        figure(run["request_throughput"], 2),
        figure(run["output_throughput"], 0),
        " / ".join(figure(run[f"{label}_ttft_ms"]) for label in ("median", "p99", "max")),
        " / ".join(figure(run[f"{label}_tpot_ms"]) for label in ("median", "p90")),
        figure(run["p99_itl_ms"]),
        f"{run['failed']:,}",
        figure(run["joules_per_token"], 3),
        figure(mean_of(run["device"], "power_w"), 0),
    ]


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


def _parse_option(peer: Kind, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--{peer}-option {text!r}: write NAME=VALUE, such as {OPTION_EXAMPLES[peer]}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
