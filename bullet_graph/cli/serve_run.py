"""Runs ``bullet-graph serve``: an engine, a server around it, and the end of both."""

import asyncio
import os
import sys
from pathlib import Path

import click
import torch

from bullet_graph.cli.engine_run import open_engine
from bullet_graph.cli.exits import EXIT_ERROR
from bullet_graph.config import EngineConfig
from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.engine.engine import Engine
from bullet_graph.perf.energy import NvmlProbe
from bullet_graph.serve.energy import EnergyMeter
from bullet_graph.serve.lifecycle import bind, run_server, warm_up
from bullet_graph.serve.settings import ServeSettings


def run_serve(
    config: EngineConfig, settings: ServeSettings, *, warmup: bool, trace_decisions: Path | None
) -> None:
    """Serve until told to stop.

    Args:
        config: the engine's settings.
        settings: the server's.
        warmup: serve a few requests before listening.
        trace_decisions: write every decision to this file.

    Raises:
        ConfigError: the address cannot be had.
        BulletGraphError: from the model or the device.
    """
    listener = bind(settings)
    with listener:
        engine = AsyncEngine(open_engine(config, quiet=False, trace_decisions=trace_decisions))
        if warmup:
            asyncio.run(warm_up(engine))
        ended = run_server(
            engine,
            settings,
            listener,
            energy=EnergyMeter(_probe(engine.engine)),
            on_started=lambda url: click.echo(f"serving {settings.served_model_name} at {url}", err=True),
        )
    if not ended:
        click.echo("error: the engine's thread is stuck in the device, and is left behind", err=True)
        sys.stderr.flush()
        # An ordinary exit would wait for the device as well.
        os._exit(EXIT_ERROR)


def _probe(engine: Engine) -> NvmlProbe | None:
    if engine.device_name != "cuda":
        return None
    return NvmlProbe.open(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
