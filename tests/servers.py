"""A server in this process, for the end-to-end tests: real HTTP on a free port, the tiny model on the CPU."""

import asyncio
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
from engines import make_engine

from bullet_graph import AsyncEngine
from bullet_graph.serve.lifecycle import DrainingServer, bind, url_of
from bullet_graph.serve.settings import ServeSettings

MODEL = "tiny"


def as_http(body: object) -> bytes:
    """A completion request as it is sent."""
    content = json.dumps(body).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + content


class Served:
    """A server that is up at ``url``, without a slash at the end; ``engine`` is behind it, ``http`` a client of it."""

    def __init__(
        self, server: DrainingServer, loop: asyncio.AbstractEventLoop, engine: AsyncEngine, url: str, key: str | None
    ) -> None:
        self.server = server
        self._loop = loop
        self.engine = engine
        self.url = url
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

    def stop(self) -> None:
        """Stop the server, as a signal does."""
        with suppress(RuntimeError):  # it has stopped already
            self._loop.call_soon_threadsafe(self.server.stop)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.ask("/v1/completions", **body)

    def connect(self, request: bytes = b"") -> socket.socket:
        """A connection that has sent this; its buffer is small, so that what is not read stays in the server."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        host, port = self.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(request)
        return connection

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))

    def metrics(self) -> dict[str, float]:
        """Values by name and labels, without the prefix and the model's name."""
        lines = self.http.get("/metrics").text.splitlines()
        values = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.removeprefix("bullet_graph:").replace(f'model_name="{MODEL}"', "")
                values[name.replace(",}", "}").replace("{,", "{").replace("{}", "")] = float(value)
        return values

    def wait_until_idle(self, *, busy_first: bool = False) -> None:
        """Wait until nothing is under way and all KV blocks are free; ``busy_first``: after a request has come."""
        deadline = time.monotonic() + 30
        gate = self.server.gate
        while busy_first and not gate.num_inside:
            assert time.monotonic() < deadline
        while (
            gate.num_inside
            or self.engine.stats.kv_blocks_used
            or self.engine.stats.num_running
            # Aborted requests are reported a step after their blocks are free.
            or self.engine.engine.has_unfinished_requests()
        ):
            assert time.monotonic() < deadline, (gate.num_inside, self.engine.stats)
            time.sleep(0.005)


@contextmanager
def serving(model: str | Path = MODEL, *, idle: bool = True, **settings: Any) -> Iterator[Served]:
    """Serve a model; all its blocks must be free in the end, where the engine lives to see it (``idle``)."""
    names = ServeSettings.__dataclass_fields__
    given = {"served_model_name": MODEL, "port": 0, "shutdown_timeout_s": 5.0, "watchdog_timeout_s": 300.0}
    of_server = ServeSettings(**(given | {k: v for k, v in settings.items() if k in names}))
    engine = AsyncEngine(make_engine(model, **{k: v for k, v in settings.items() if k not in names}))
    listener = bind(of_server)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections
    loops: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
    server = DrainingServer.of_engine(engine, of_server, on_started=lambda: loops.put(asyncio.get_running_loop()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    served = Served(server, loops.get(timeout=30), engine, url_of(listener), of_server.api_key)
    try:
        yield served
        if idle:
            served.wait_until_idle()
    finally:
        served.http.close()
        served.stop()
        thread.join(30)
        ended = engine.shutdown(30)
        listener.close()
    assert not thread.is_alive()
    assert ended
