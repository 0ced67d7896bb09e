"""``bullet-graph serve``: an OpenAI-compatible server."""

import asyncio
import resource
from functools import partial
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli.engine_run import leave_stuck_engine, open_engine
from bullet_graph.cli.options import all_of, engine_options, setting_option
from bullet_graph.cli.result_file import require_extra
from bullet_graph.config import EngineConfig
from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.errors import ConfigError
from bullet_graph.serve.settings import SERVE_SETTINGS, ServeSettings

_EXTRA = ("fastapi", "httptools", "uvicorn", "prometheus_client")


@click.command()
@engine_options(max_num_seqs=256)
@all_of([setting_option(each) for name, each in SERVE_SETTINGS.items() if name != "served_model_name"])
@click.option("--served-model-name", help="The model's name in requests.  [default: --model]")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with that key; keeps it out of the list of processes.",
)
@click.option(
    "--data-parallel-size",
    type=click.IntRange(1, 1024),
    default=1,
    help="Engines behind the port, each on GPUs of its own. A request goes to the one that has served most of its "
    "prompt, unless that one is too busy.",
)
@click.option(
    "--access-log/--no-access-log", default=True, help="A line on stderr for each request: status, time, tokens and id."
)
@click.option(
    "--warmup/--no-warmup",
    default=True,
    help="Serve a few requests before listening, so that no client waits for kernels compiled on first use.",
)
def serve(
    config: EngineConfig,
    trace_decisions: Path | None,
    served_model_name: str | None,
    api_key: str | None,
    api_key_file: Path | None,
    data_parallel_size: int,
    access_log: bool,
    warmup: bool,
    **settings: Any,
) -> None:
    """Serve the model over HTTP, with OpenAI's interface, a live page at / and a description of the API at /docs.

    \b
    Examples:
      bullet-graph serve --model tiny --device cpu --port 8000
      bullet-graph serve --model ./Qwen3-8B --policy auto --slo "ttft:500 tpot:15" --host 0.0.0.0 \\
          --api-key-file key.txt --max-queue-len 256
      bullet-graph serve --model ./Qwen3-8B --data-parallel-size 4
      bullet-graph serve --model llama-3.1-8b --max-model-len 16384 --shutdown-timeout 60 --watchdog-timeout 30
    """
    require_extra("bullet-graph serve", *_EXTRA, extra="serve")
    if data_parallel_size > 1 and trace_decisions is not None:
        raise ConfigError("--trace-decisions traces one engine: leave it out, or --data-parallel-size")
    named = config.model if served_model_name is None else served_model_name
    server = ServeSettings(served_model_name=named, api_key=_read_key(api_key, api_key_file), **settings)
    # The server's libraries are an extra, and --help works without them.
    from bullet_graph.serve.access_log import log_requests  # noqa: PLC0415
    from bullet_graph.serve.lifecycle import bind, run_server, url_of, warm_up  # noqa: PLC0415

    # Each connection takes a file descriptor, and the usual soft limit is 1,024.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with bind(server) as listener:
        url = url_of(listener)
        message = (
            f"serving {named} at {url}\n"
            f"  API {url}/v1, described at {url}/docs; live page {url}/; metrics {url}/metrics"
        )
        on_started = partial(click.echo, message, err=True)
        if access_log:
            log_requests()
        if data_parallel_size > 1:
            require_extra("--data-parallel-size", "aiohttp", extra="serve")
            from bullet_graph.cli.replicas import serve_replicas  # noqa: PLC0415

            serve_replicas(
                data_parallel_size, config, server, listener, on_started, access_log=access_log, warmup=warmup
            )
            return
        engine = AsyncEngine(open_engine(config, quiet=False, trace_decisions=trace_decisions))
        if warmup:
            asyncio.run(warm_up(engine))
        ended = run_server(engine, server, listener, on_started)
    if not ended:
        leave_stuck_engine()


def _read_key(api_key: str | None, path: Path | None) -> str | None:
    if path is None:
        return api_key
    if api_key is not None:
        raise ConfigError("--api-key and --api-key-file both give the key: give one of them")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} must hold the key as text, but cannot be read: {error}") from error
