"""``bullet-graph serve``: an OpenAI-compatible server."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli import EXIT_ERROR
from bullet_graph.cli.engine_run import open_engine
from bullet_graph.cli.options import Decorator, engine_options, parse_size
from bullet_graph.cli.result_file import require_extra
from bullet_graph.config import EngineConfig
from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.errors import ConfigError
from bullet_graph.serve.settings import ServeSettings

_EXTRA = ("fastapi", "uvicorn", "prometheus_client")


def _timeout(name: str, default_s: float, text: str) -> Decorator:
    parameter = f"{name}_timeout_s"
    return click.option(f"--{name}-timeout", parameter, default=default_s, metavar="SECONDS", help=text)


@click.command()
@engine_options(max_num_seqs=256)
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0: all.")
@click.option("--port", default=8000, help="TCP port; 0: a free one.")
@click.option("--served-model-name", help="The model's name in requests.  [default: --model]")
@click.option(
    "--api-key", help="Key that every request but /health must carry, as `Authorization: Bearer KEY`."
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with that key; keeps it out of the list of processes.",
)
@click.option(
    "--max-body-size",
    "max_body_bytes",
    default="8MiB",
    metavar="SIZE",
    callback=parse_size,
    help="Largest body of a request; larger ones get 413.",
)
@click.option(
    "--max-prompt-tokens", type=int, help="Most tokens of a prompt.  [default: what the model has room for]"
)
@click.option(
    "--max-queue-len",
    default=1024,
    help="Requests get 429 while this many sequences wait for KV blocks.",
)
@_timeout("request", 600.0, "Longest time from a request's arrival to its last token.")
@_timeout(
    "shutdown",
    30.0,
    "After SIGTERM, time for requests in progress; then they are aborted. A second signal aborts them at once.",
)
@_timeout(
    "watchdog", 60.0, "After this long without progress on a lane, all requests fail and /health is 503."
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
    warmup: bool,
    **settings: Any,
) -> None:
    """Serve the model over HTTP, with OpenAI's interface and a live page at /.

    Paths: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics (Prometheus), /version, /openapi.json.

    \b
    Examples:
      bullet-graph serve --model tiny --device cpu --port 8000
      bullet-graph serve --model ./Qwen3-8B --policy auto --slo "ttft:500 tpot:15" --host 0.0.0.0 \\
          --api-key-file key.txt --max-queue-len 256
      bullet-graph serve --model llama-3.1-8b --max-model-len 16384 --shutdown-timeout 60 --watchdog-timeout 30
    """
    require_extra("bullet-graph serve", *_EXTRA, extra="serve")
    run_serve(
        config,
        ServeSettings(
            served_model_name=config.model if served_model_name is None else served_model_name,
            api_key=_read_key(api_key, api_key_file),
            **settings,
        ),
        warmup=warmup,
        trace_decisions=trace_decisions,
    )


def run_serve(
    config: EngineConfig, settings: ServeSettings, *, warmup: bool, trace_decisions: Path | None
) -> None:
    """Serve until a signal ends it."""
    # The server's libraries are an extra, and --help works without them.
    from bullet_graph.serve.lifecycle import bind, run_server, url_of, warm_up  # noqa: PLC0415

    with bind(settings) as listener:
        engine = AsyncEngine(open_engine(config, quiet=False, trace_decisions=trace_decisions))
        if warmup:
            asyncio.run(warm_up(engine))
        message = f"serving {settings.served_model_name} at {url_of(listener)}"
        ended = run_server(engine, settings, listener, on_started=lambda: click.echo(message, err=True))
    if not ended:
        click.echo("error: the engine's thread is stuck in the device, and is left behind", err=True)
        sys.stderr.flush()
        # An ordinary exit would wait for the device as well.
        os._exit(EXIT_ERROR)


def _read_key(api_key: str | None, path: Path | None) -> str | None:
    if path is None:
        return api_key
    if api_key is not None:
        raise ConfigError("--api-key and --api-key-file both give the key: give one of them")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file {path} must hold the key as text, but cannot be read: {error}"
        ) from error
