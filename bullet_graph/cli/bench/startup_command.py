"""``bullet-graph bench startup``: how long an engine takes to be ready."""

import json
from pathlib import Path

import click

from bullet_graph.cli.options import engine_options, result_options
from bullet_graph.cli.result_file import check_plot_file, check_result_file, write_result_file
from bullet_graph.config import EngineConfig


@click.command()
@engine_options(max_num_seqs=256, without=("trace_decisions",))
@click.option(
    "--num-iters-cold",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Starts with empty caches of compiled kernels; the last of them fills those of the warm ones.",
)
@click.option(
    "--num-iters-warm",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Starts with filled caches; and, with --capture-cache, as many of each kind from that and with empty ones.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Draw the phases over time: a file ending in .svg or .png.",
)
@result_options
def startup(
    config: EngineConfig,
    num_iters_cold: int,
    num_iters_warm: int,
    plot: Path | None,
    output_json: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Time an engine's start, from a new process to its first token, phase by phase.

    Each start is a process of its own, so that imports count. A cold one has empty folders for what Inductor, Triton
    and FlashInfer compile; a warm one has those that a cold one filled. They are private ones: yours are left alone.
    With --capture-cache, both do without it, and a third kind starts from it, with empty folders; on a GPU a fourth
    does, with --ready hot. Files of weights may be in the operating system's cache in all of them.

    \b
    Examples:
      bullet-graph bench startup --model tiny --num-iters-cold 1 --num-iters-warm 3
      bullet-graph bench startup --model llama-3.1-8b --policy auto --ready hot \\
          --capture-plan llama-3.1-8b_bfloat16_conv --plot start.svg --output-json start.json
      bullet-graph bench startup --model llama-3.1-8b --capture-cache auto --output-json start.json
    """
    check_result_file(output_json, overwrite=overwrite)
    check_plot_file(plot, overwrite=overwrite)
    # torch takes seconds to import, and --help must not wait for it.
    from bullet_graph.cli.bench.startup import StartPolicy, print_startup, run_startup  # noqa: PLC0415
    from bullet_graph.runtime.resolve import resolve  # noqa: PLC0415

    without = {"capture_cache": None}
    policies = [
        StartPolicy("cold", num_iters_cold, empty_caches=True, settings=without),
        StartPolicy("warm", num_iters_warm, settings=without),
    ]
    if config.capture_cache is not None:
        policies.append(StartPolicy("cached", num_iters_warm, empty_caches=True))
        if config.ready == "all" and resolve(config).device.type == "cuda":
            policies.append(
                StartPolicy("cached_hot", num_iters_warm, empty_caches=True, settings={"ready": "hot"})
            )
    result = run_startup(config, policies, quiet=as_json)
    text = json.dumps(result.fields(), indent=2, allow_nan=False)
    if output_json is not None:
        write_result_file(output_json, text)
    if plot is not None:
        from bullet_graph.cli.bench.startup_plot import draw_startup  # noqa: PLC0415

        plot.write_bytes(draw_startup(result, plot.suffix[1:].lower()))
    if as_json:
        click.echo(text)
    else:
        print_startup(result)
