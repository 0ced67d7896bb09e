"""``bullet-graph bench serve``: the same measurement as ``bench online``, against a server by URL."""

import importlib.util
import json
from pathlib import Path

import click

from bullet_graph.cli.options import result_options
from bullet_graph.cli.result_file import check_result_file, write_result_file
from bullet_graph.cli.serving.goodput import GoodputCommand
from bullet_graph.cli.serving.options import serving_options
from bullet_graph.errors import ConfigError
from bullet_graph.slo import Slo


@click.command(cls=GoodputCommand)
@serving_options(default_policy=None)
@click.option("--base-url", required=True, metavar="URL", help="Of the server, with or without /v1.")
@click.option(
    "--model",
    help="The served model's folder or preset: for the vocabulary of random prompts where the server does not tell it, "
    "and the tokenizer of a trace with texts.",
)
@click.option("--api-key", help="That the server asks for.")
@click.option(
    "--num-warmups",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Requests before the measured run.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of arrivals, prompts and synthetic workloads.",
)
@result_options
def serve(
    base_url: str,
    model: str | None,
    api_key: str | None,
    trace: str,
    num_prompts: int | None,
    request_rate: float | None,
    burstiness: float,
    time_scale: float,
    max_concurrency: int | None,
    slo: Slo,
    num_warmups: int,
    save_detailed: bool,
    seed: int,
    output_json: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Send a trace's requests to an OpenAI-compatible server as they arrive and measure latencies and goodput.

    The workloads, arrivals and result fields are those of `bench online`; a field that only an engine in the same
    process can tell is null. Times are those that the client sees. Prompts are token ids, and outputs have their
    recorded lengths, for which the server must know `ignore_eos`, as vLLM and SGLang do. A `bullet-graph serve` is told
    the latency targets of --goodput with each request.

    \b
    Examples:
      bullet-graph bench serve --base-url http://127.0.0.1:8000 --trace azure:conv --num-prompts 600 \\
          --request-rate 20 --goodput ttft:500 tpot:15 --output-json server.json
      bullet-graph bench serve --base-url http://10.0.0.7:8000/v1 --api-key KEY --model ./Qwen3-8B \\
          --trace conversations.json --request-rate 8 --max-concurrency 64
    """
    check_result_file(output_json, overwrite=overwrite)
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(
            "bench serve needs aiohttp, which is not installed: pip install 'bullet-graph[bench]'"
        )
    from bullet_graph.cli.bench.serve import print_server_run, run_against_server  # noqa: PLC0415
    from bullet_graph.workloads import Arrivals  # noqa: PLC0415

    run = run_against_server(
        base_url,
        trace,
        num_prompts,
        Arrivals(
            request_rate=request_rate,
            burstiness=burstiness,
            time_scale=time_scale,
            max_concurrency=max_concurrency,
            seed=seed,
        ),
        model=model,
        api_key=api_key,
        slo=slo,
        num_warmups=num_warmups,
        quiet=as_json,
    )
    text = json.dumps(run.fields(detailed=save_detailed), indent=2, allow_nan=False)
    if output_json is not None:
        write_result_file(output_json, text)
    if as_json:
        click.echo(text)
    else:
        print_server_run(run)
