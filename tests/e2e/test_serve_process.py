"""``bullet-graph serve`` as a process: started, killed under load and started again, told to stop."""

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

from bullet_graph.errors import ConfigError
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


# ---- what is wrong with the command ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "70000"), "--port must be between 0 and 65535, got 70000"),
        (("--max-body-size", "big"), "'big' is no size"),
        (("--api-key", "a", "--api-key-file", __file__), "give one of them"),
        (("--api-key-file", "no-such-file"), "no-such-file"),
        (("--host", "256.0.0.1"), "--host and --port must name an address of this machine that is free"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_bad_options(options: tuple[str, ...], message: str) -> None:
    assert message in refused(run("serve", *TINY, *options))


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
