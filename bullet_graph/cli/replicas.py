"""Processes of one engine each, behind a front: ``python -m bullet_graph.cli.replicas FD`` reads what to serve."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from bullet_graph.cli import EXIT_ERROR
from bullet_graph.cli.engine_run import open_engine
from bullet_graph.config import EngineConfig
from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.errors import BulletGraphError, ConfigError
from bullet_graph.runtime.processes import start_process
from bullet_graph.serve.access_log import log_requests
from bullet_graph.serve.errors import shutting_down
from bullet_graph.serve.front import Front, Replica, front_app
from bullet_graph.serve.lifecycle import DrainingServer, run_server, warm_up
from bullet_graph.serve.settings import ServeSettings

_STOP_TIMEOUT_S = 40.0
"""For idle engines to shut down."""
_LAST_S = 2.0
"""An engine whose start has failed ends by itself after this time."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a process serves, at a Unix socket; only the first shows its start."""

    config: EngineConfig
    settings: ServeSettings
    path: Path
    access_log: bool
    warmup: bool
    quiet: bool


def serve_replicas(
    number: int,
    config: EngineConfig,
    settings: ServeSettings,
    listener: socket.socket,
    on_started: Callable[[], object],
    *,
    access_log: bool,
    warmup: bool,
) -> None:
    """Serve with so many engines, each on GPUs of its own, until a signal stops the server.

    Raises ConfigError where there are too few GPUs, and what an engine raises.
    """
    gpus = _gpus(number, config)
    # The front has checked the key, the host and the limits. It adds headers, and checks the engines' health beside.
    behind = replace(
        settings,
        api_key=None,
        host="0.0.0.0",
        max_connections=2**31,
        max_headers=settings.max_headers + 8,
        max_header_bytes=2 * settings.max_header_bytes + 4096,  # some bytes become two
    )
    started: list[Replica] = []
    connections: list[Connection] = []
    parent = None if len(os.fsencode(tempfile.gettempdir())) < 64 else "/tmp"  # a socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="bullet_graph_replicas_", dir=parent) as folder:
        try:
            for each in range(number):
                path = Path(folder) / f"{each}.sock"
                connection, process = start_process("bullet_graph.cli.replicas", **gpus[each])
                connections.append(connection)
                started.append(Replica(each, process, str(path)))
                connection.send(Served(config, behind, path, access_log, warmup, quiet=each > 0))
            _wait_until_ready(connections)
            front = Front(started)
            app = front_app(front, settings)
            DrainingServer(
                app, front, settings, abort=lambda why: front.abort(shutting_down(why)), on_started=on_started
            ).run(sockets=[listener])
        finally:
            for one in started:
                one.process.send_signal(signal.SIGTERM)
            deadline_s = time.monotonic() + _STOP_TIMEOUT_S
            for one in started:
                with suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(deadline_s - time.monotonic(), 0.0))
                one.process.kill()
                one.process.wait()
            for connection in connections:
                connection.close()


def _gpus(number: int, config: EngineConfig) -> list[dict[str, str]]:
    """The environment of each process that shows it its GPUs."""
    import torch  # noqa: PLC0415

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return [{}] * number
    each = config.tensor_parallel_size
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [str(index) for index in range(torch.cuda.device_count())]
    if named is not None:
        found = [name.strip() for name in named.split(",")][: len(found)]
    if len(found) < number * each:
        raise ConfigError(
            f"--data-parallel-size {number} with {each} GPUs an engine (--tensor-parallel-size) needs {number * each} "
            f"GPUs, and {len(found)} can be seen: give smaller numbers, or correct CUDA_VISIBLE_DEVICES"
        )
    parts = (found[first : first + each] for first in range(0, number * each, each))
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def _wait_until_ready(connections: list[Connection]) -> None:
    waiting = dict(zip(connections, range(len(connections)), strict=True))
    while waiting:
        for connection in wait(list(waiting)):
            assert isinstance(connection, Connection)
            number = waiting.pop(connection)
            try:
                told = connection.recv()
            except (EOFError, ConnectionError):
                raise ConfigError(f"engine {number} has ended before it listened: see its output above") from None
            if told is not None:
                kind, text = told
                raise kind(f"engine {number}: {text}")


def _serve(connection: Connection, served: Served) -> bool:
    """Serve until SIGTERM; returns whether the engine's thread has ended."""
    if served.access_log:
        log_requests()
    engine = AsyncEngine(open_engine(served.config, quiet=served.quiet))
    if served.warmup:
        asyncio.run(warm_up(engine))
    return run_server(engine, served.settings, served.path, lambda: connection.send(None))


def _end_with_the_front(connection: Connection, folder: Path) -> None:
    with suppress(EOFError, OSError):
        connection.recv()
    # A front that is killed leaves it behind.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_ERROR)


def main() -> None:
    """The process of one engine."""
    logging.basicConfig(format="%(message)s")
    connection = Connection(int(sys.argv[1]))
    served: Served = connection.recv()
    watched = {"connection": connection, "folder": served.path.parent}
    watcher = threading.Thread(target=_end_with_the_front, kwargs=watched, name="bullet-graph-front", daemon=True)
    watcher.start()
    ended = False
    try:
        ended = _serve(connection, served)
    except BulletGraphError as error:
        with suppress(OSError):
            connection.send((type(error), str(error)))
        # The front ends this process, or the watcher does if the front is gone.
        watcher.join(_LAST_S)
    sys.stderr.flush()
    # An ordinary exit would wait for a thread that is stuck in the device, and for the one that reads.
    os._exit(0 if ended else EXIT_ERROR)


if __name__ == "__main__":
    main()
