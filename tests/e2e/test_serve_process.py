"""``bullet-graph serve`` as a process: started, killed under load and started again, told to stop."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from cli_runner import TINY, refused, run

from bullet_graph.cli import EXIT_ERROR
from bullet_graph.cli.replicas import Served
from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError
from bullet_graph.runtime.processes import start_process
from bullet_graph.serve.settings import ServeSettings

pytestmark = pytest.mark.timeout(180)

REQUEST = {"prompt": [5, 17, 300, 8], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
COMMAND = (sys.executable, "-m", "bullet_graph", "serve", *TINY, "--no-warmup")


class Process:
    """A server process that listens at ``url``."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen((*COMMAND, *options), stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.stderr: list[str] = []
        for line in self.process.stderr:
            self.stderr.append(line)
            if line.startswith("serving tiny at "):
                self.url = line.split()[-1]
                break
        else:
            raise AssertionError(f"it has not started: {''.join(self.stderr)}")

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def complete(self) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=REQUEST, timeout=30)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def wait(self) -> int:
        try:
            _, rest = self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        self.stderr.append(rest)
        return self.process.returncode


class Load:
    """Streams that run until their server goes away."""

    def __init__(self, url: str, num_streams: int) -> None:
        self._begun = threading.Semaphore(0)
        pool = ThreadPoolExecutor(num_streams)
        self._streams = [pool.submit(self._stream, url) for _ in range(num_streams)]
        assert all(self._begun.acquire(timeout=30) for _ in self._streams)

    def _stream(self, url: str) -> str:
        try:
            body = REQUEST | {"stream": True, "max_tokens": 500}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
                lines = filter(None, response.iter_lines())
                next(lines)
                self._begun.release()
                *_, line = lines
                return line
        except httpx.HTTPError as error:
            return type(error).__name__

    def endings(self) -> list[str]:
        """Of each stream: the last line that came, or the name of the error."""
        return [stream.result(30) for stream in self._streams]


@pytest.fixture(scope="module")
def killed() -> Iterator[tuple[Process, str]]:
    """A server on the port of one that was killed under load, and a text of that one."""
    first = Process("--port", "0")
    text = first.complete()
    load = Load(first.url, 20)
    first.process.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert set(load.endings()) <= {"RemoteProtocolError", "ReadError"}
    again = Process("--port", first.port, "--shutdown-timeout", "0.3")
    yield again, text
    again.process.kill()


def test_killed_under_load_and_started_again_it_is_as_before(killed: tuple[Process, str]) -> None:
    server, text = killed
    assert server.complete() == text
    live = httpx.get(f"{server.url}/live").json()
    assert (live["running"], live["waiting"], live["kv_cache_usage"], live["failure"]) == (0, 0, 0.0, None)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_told_to_stop_it_aborts_what_does_not_end_and_exits_in_good_order(killed: tuple[Process, str]) -> None:
    server, _ = killed
    load = Load(server.url, 3)
    begin_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - begin_s < 20
    assert load.endings() == ["data: [DONE]"] * 3
    assert "shutting down: requests under way have" in "".join(server.stderr)
    assert "Traceback" not in "".join(server.stderr)


# ---- several engines behind one port ----


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_engines_behind_one_port_share_prompts_and_outlive_one_of_them(killed: tuple[Process, str]) -> None:
    """One test, as engines take seconds to start."""
    server = Process("--port", "0", "--data-parallel-size", "2", "--kv-cache-bytes", "64MiB", "--api-key", "key")
    engines = children(server.process.pid)
    client = httpx.Client(base_url=server.url, headers={"Authorization": "Bearer key"}, timeout=60)

    def complete(prompt: list[int], **more: int | bool) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return client.post("/v1/completions", json=body | more)

    # The key is checked in front, and the app's own errors come through.
    assert httpx.post(f"{server.url}/v1/completions", json=REQUEST).status_code == 401
    assert complete([]).status_code == 400
    assert (client.get("/nowhere").status_code, client.get("/live?replica=2").status_code) == (404, 404)
    # As one engine's text; each of two long prompts is served again by the engine that holds it.
    assert client.post("/v1/completions", json=REQUEST).json()["choices"][0]["text"] == killed[1]
    prompts = [[number + 1] * 160 for number in range(4)]
    cached = []
    for _ in range(2):
        for answer in map(complete, prompts):
            assert len(answer.headers.get_list("X-Request-Id")) == 1
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0] * 4 + [144] * 4
    with ThreadPoolExecutor(8) as pool:  # at once, both are used
        assert {answer.status_code for answer in pool.map(complete, [[n, 9] for n in range(40)])} == {200}
    done = [
        float(line.rpartition(" ")[2])
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("bullet_graph:request_success_total{") and 'finished_reason="length"' in line
    ]
    assert len(done) == 2
    assert sum(done) == 1 + 8 + 40
    assert min(done) > 1
    # One is killed in the middle of 20 streams: its streams say so, the others end well, and new requests are served.
    with ThreadPoolExecutor(20) as pool:
        body = REQUEST | {"stream": True, "max_tokens": 400}
        streams = [pool.submit(client.post, "/v1/completions", json=body | {"seed": n}) for n in range(20)]
        while client.get("/live?replica=0").json()["running"] < 5:
            time.sleep(0.01)
        os.kill(engines[0], signal.SIGKILL)
        texts = [stream.result(60).text for stream in streams]
    assert {"engine_gone" in text for text in texts} == {True, False}
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert {complete(prompt).status_code for prompt in prompts} == {200}
    metrics = client.get("/metrics").text
    assert 'bullet_graph:replica_up{replica="0"} 0.0' in metrics
    assert ',replica="1"} ' in metrics
    assert client.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not Path(f"/proc/{engines[1]}").exists()
    assert "Traceback" not in "".join(server.stderr)


def test_an_engine_whose_front_was_killed_ends_and_leaves_no_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "sockets").mkdir()
    connection, process = start_process("bullet_graph.cli.replicas")
    with connection:
        config = EngineConfig(model="tiny", device="cpu", kv_cache_bytes=2**20)
        settings = ServeSettings(served_model_name="tiny")
        connection.send(Served(config, settings, folder / "0.sock", access_log=False, warmup=False, quiet=True))
    assert process.wait(30) == EXIT_ERROR
    assert not folder.exists()


# ---- what is wrong with the command ----


def test_a_key_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeSettings] = []

    def stop(settings: ServeSettings) -> None:
        seen.append(settings)
        raise ConfigError("the address is taken")

    monkeypatch.setattr("bullet_graph.serve.lifecycle.bind", stop)
    (tmp_path / "key").write_text("s3cret\n")
    result = run("serve", *TINY, "--api-key-file", str(tmp_path / "key"), "--served-model-name", "mine")
    assert "the address is taken" in refused(result)
    assert (seen[0].api_key, seen[0].served_model_name) == ("s3cret", "mine")
    run("serve", *TINY)
    assert (seen[1].api_key, seen[1].served_model_name) == (None, "tiny")


def test_without_the_extra_the_command_says_what_to_install_and_nothing_else_needs_it() -> None:
    """In a process of its own, in which the server's libraries cannot be found."""
    program = """
import importlib.util, sys
EXTRA = ("fastapi", "httptools", "uvicorn", "prometheus_client", "starlette")
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in EXTRA else find_spec(name, package)
sys.modules |= dict.fromkeys(EXTRA)
import bullet_graph
from bullet_graph.cli.main import main
import bullet_graph.cli.bench.replay
main(["serve", "--model", "tiny"])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (
        2,
        "error: bullet-graph serve needs fastapi, httptools, uvicorn, prometheus_client, not installed here: "
        "pip install 'bullet-graph[serve]'\n",
    )
