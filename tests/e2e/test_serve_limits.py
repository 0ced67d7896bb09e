"""Keys, time-outs, draining, a dead engine and a stuck lane: what the server does when things end early."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from unittest.mock import Mock

import httpx
import openai
import pytest
from engines import before_launch, make_engine
from servers import MODEL, Served, as_http, serving

from bullet_graph import AsyncEngine, ConfigError, EngineDeadError, PerfTableError, Slo
from bullet_graph.runtime.cpu import CpuExecutor
from bullet_graph.runtime.step import Placement, Step
from bullet_graph.serve.lifecycle import bind, run_server, warm_up
from bullet_graph.serve.settings import ServeSettings

LONG = {"prompt": [1, 2, 3], "max_tokens": 60, "temperature": 0}


class Stuck:
    """Keeps launches from returning, as a device does that hangs."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def wait(self, step: Step, _: Placement) -> None:
        if not self.release.is_set() and step.decode is not None:
            self.entered.set()
            assert self.release.wait(60)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    stuck = Stuck()
    before_launch(monkeypatch, stuck.wait)
    yield stuck
    stuck.release.set()


def error_of(response: httpx.Response) -> dict[str, str]:
    return response.json()["error"]


# ---- requests that would come too late ----


def test_a_request_that_would_come_too_late_is_told_when_to_return() -> None:
    settings = {"policy": "auto", "perf_table": "roofline", "reject_late": 2.0, "max_model_len": 64}
    with serving(**settings, slo=Slo(ttft_ms=1e-6)) as served:
        refused = served.post("/v1/completions", **LONG)
        streamed = served.post("/v1/completions", **LONG, stream=True)
        served.post("/v1/completions", **LONG, slo={"ttft_ms": 60_000}).raise_for_status()
    assert [refused.status_code, streamed.status_code] == [429, 429]
    assert error_of(refused)["code"] == "too_late"
    assert "more than 2 × the target" in error_of(refused)["message"]
    assert refused.headers["Retry-After"] == "1"


def test_nothing_is_refused_as_late_without_predictions() -> None:
    with pytest.raises(PerfTableError, match=r"reject_late refuses by predicted times.*perf_table='roofline'"):
        make_engine(reject_late=2.0)


# ---- the key ----


def test_all_but_health_asks_for_the_key() -> None:
    with serving(api_key="s3cret!", max_model_len=64) as served:
        with httpx.Client(base_url=served.url) as stranger:
            assert stranger.get("/health").status_code == 200
            for path in ("/", "/live", "/metrics", "/v1/models", "/version", "/openapi.json", "/nothing"):
                response = stranger.get(path)
                assert response.status_code == 401, path
                assert error_of(response)["code"] == "invalid_api_key"
                kind = "Basic" if path in ("/", "/live", "/metrics", "/openapi.json") else "Bearer"
                assert response.headers["WWW-Authenticate"].startswith(kind)
            assert stranger.post("/v1/completions", content=b"x" * 9).status_code == 401
            for header in ("Bearer s3cret", "Bearer s3cret!!", "s3cret!", "Basic czNjcmV0IQ==", "Bearer \u00fc"):
                headers = {"Authorization": header.encode("latin-1")}
                assert stranger.get("/v1/models", headers=headers).status_code == 401
            # A browser's dialog gives the key as a password, for what a browser looks at.
            assert stranger.get("/live", auth=("anybody", "s3cret!")).status_code == 200
            assert stranger.get("/live", headers={"Authorization": "Basic %%%"}).status_code == 401
            assert stranger.get("/v1/models", auth=("anybody", "s3cret!")).status_code == 401
        assert served.complete(prompt=[1], max_tokens=1)
        assert served.http.get("/v1/models", headers={"Host": "gateway.example"}).status_code == 200
        with serving(host="0.0.0.0") as open_to_all:
            assert open_to_all.http.get("/v1/models", headers={"Host": "gateway.example"}).status_code == 200
        with served.client(api_key="s3cret!") as client:
            assert client.models.list().data[0].id == MODEL
        with served.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


# ---- time-outs ----


def test_a_request_that_takes_too_long_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    before_launch(monkeypatch, lambda *_: time.sleep(0.02))
    with serving(max_model_len=64, request_timeout_s=0.6) as served:
        whole = served.post("/v1/completions", **LONG)
        assert whole.status_code == 504
        assert "--request-timeout" in error_of(whole)["message"]
        stream = served.post("/v1/completions", **LONG, stream=True)
        assert stream.status_code == 200
        assert last_error(stream)["code"] == "timeout"
        served.wait_until_idle()
        assert served.complete(prompt=[1], max_tokens=2)


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    limits = {"request_timeout_s": 0.3, "header_timeout_s": 0.3, "max_header_bytes": 3000, "max_headers": 20}
    with serving(max_model_len=64, max_connections=3, **limits) as served:
        yield served
        assert served.http.get("/health").status_code == 200


def all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    answer = b""
    with suppress(ConnectionError):
        while part := connection.recv(10_000):
            answer += part
    return answer


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (as_http({"prompt": "x" * 99})[:-90], 408, "the body must be sent within 0.3 s (--request-timeout), and 23"),
        (GET, 408, "headers must come within 0.3 s (--header-timeout)"),
        (GET + b"\r\n" + GET, 200, ""),
        (GET + b"A: b\r\n" * 21, 431, "at most 20 headers (--max-headers)"),
        (GET + b"A: " + b"b" * 3000 + b"\r\n", 431, "at most 3,000 bytes (--max-header-size)"),
        (GET + b"A: " + b"b" * 500_000, 431, "at most 3,000 bytes"),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n", 431, "at most 3,000 bytes"),
        (GET + b"A\x00: b\r\n\r\n", 400, "HTTP/1.1 is required"),
        (b"", None, ""),
        (b"\r\n", None, ""),
    ],
    ids=["body", "headers", "second", "many", "large", "endless", "url", "wrong", "nothing", "blank"],
)
def test_a_client_that_sends_too_slowly_or_too_much_is_answered_and_cut_off(
    limited: Served, sent: bytes, status: int | None, message: str
) -> None:
    with limited.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        begin_s = time.monotonic()
        answer = all_of(connection)
    assert time.monotonic() - begin_s < 5
    assert answer.startswith(b"" if status is None else b"HTTP/1.1 %d " % status)
    assert bool(answer) == (status is not None)
    assert message in answer.decode()


def test_requests_sent_ahead_are_answered_in_turn_up_to_a_few(limited: Served) -> None:
    for number, answered in ((5, 5), (5000, 0)):
        with limited.connect((GET + b"\r\n") * (number - 1) + GET + b"Connection: close\r\n\r\n") as connection:
            answers = all_of(connection)
        assert answers.count(b"HTTP/1.1 200 ") == answered
    assert answers == b""


def test_a_client_that_closes_its_sending_side_is_answered(limited: Served) -> None:
    for sent in (GET + b"\r\n", as_http({"prompt": [1], "max_tokens": 3})):
        with limited.connect(sent) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert b"HTTP/1.1 200 OK" in all_of(connection)


@pytest.mark.parametrize(("waits_s", "num_sent"), [(0.0, 1), (0.4, 1), (0.0, 2)])
def test_a_client_that_is_gone_altogether_ends_its_requests(stuck: Stuck, waits_s: float, num_sent: int) -> None:
    """The one that runs is neither a stream, whose next event would show it, nor does it end by itself."""
    with serving(max_model_len=64) as served:
        with served.connect(as_http(LONG) * num_sent) as connection:
            assert stuck.entered.wait(20)
            if waits_s:
                connection.shutdown(socket.SHUT_WR)
                time.sleep(waits_s)
        deadline = time.monotonic() + 10
        while served.server.gate.num_inside:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stuck.release.set()
        served.wait_until_idle()


OURS = ["localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST"]
OTHERS = ["evil.example", "localhost.evil.example:8000", "evil.example@localhost.evil", "[::2]", "[localhost"]


@pytest.mark.parametrize(("host", "status"), [*((host, 200) for host in OURS), *((host, 403) for host in OTHERS)])
def test_pages_of_others_cannot_ask_through_a_browser(limited: Served, host: str, status: int) -> None:
    """By DNS rebinding: their name leads to this machine."""
    assert limited.http.get("/v1/models", headers={"Host": host}).status_code == status


def test_bodies_together_are_bounded() -> None:
    body = as_http({"prompt": "x" * 9_000})
    with serving(max_model_len=64, max_body_bytes=10_000, request_timeout_s=20) as served, ExitStack() as stack:
        slow = [stack.enter_context(served.connect(body[:-10])) for _ in range(36)]
        refused = set()
        while answered := select.select(slow, [], [], 1.0)[0]:
            slow = [connection for connection in slow if connection not in answered]
            refused |= {connection.recv(1000).split(b"\r\n")[0] for connection in answered}
        assert refused == {b"HTTP/1.1 503 Service Unavailable"}
        assert slow, "some are still read"
        assert served.http.get("/health").status_code == 200


def test_one_connection_too_many_is_refused(limited: Served) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(limited.connect(GET)) for _ in range(3)]
        assert stack.enter_context(limited.connect()).recv(10_000).startswith(b"HTTP/1.1 503 ")
        assert slow[0].recv(10_000).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_does_not_read_its_stream_is_cut_off() -> None:
    with serving(max_model_len=512, write_timeout_s=1.0, kv_cache_bytes=16 << 20) as served:
        many = {"prompt": [1], "n": 16, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with served.connect(as_http(many)):
            served.wait_until_idle(busy_first=True)


# ---- the end ----


async def begin_stream(served: Served, stuck: Stuck) -> asyncio.Task[httpx.Response]:
    """A stream that is stuck in a decode step."""

    async def to_its_end() -> httpx.Response:
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
            return await client.post("/v1/completions", json=LONG | {"stream": True})

    stream = asyncio.create_task(to_its_end())
    await asyncio.to_thread(stuck.entered.wait, 20)
    return stream


def last_error(response: httpx.Response) -> dict[str, str]:
    """The error of a stream, which comes with its status where it has not begun, and else at its end."""
    if response.status_code != 200:
        assert response.status_code == 503
        return error_of(response)
    *_, last, done = [line for line in response.text.splitlines() if line]
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))["error"]


async def test_requests_under_way_may_end_before_the_server_does(stuck: Stuck) -> None:
    with serving(max_model_len=64, shutdown_timeout_s=20.0) as served, served.connect(as_http(LONG)[:-1]) as unread:
        stream = await begin_stream(served, stuck)
        served.stop()
        await asyncio.sleep(0.3)
        assert all_of(unread).startswith(b"HTTP/1.1 503 ")
        with pytest.raises(httpx.ConnectError):
            served.http.get("/health")
        stuck.release.set()
        lines = [line for line in (await stream).text.splitlines() if line]
        assert len(lines) == 61
        assert '"finish_reason":"length"' in lines[-2]


async def test_what_does_not_end_in_time_is_aborted_and_told(stuck: Stuck) -> None:
    with serving(max_model_len=64, shutdown_timeout_s=0.2, idle=False) as served:
        streams = [await begin_stream(served, stuck) for _ in range(3)]
        async with asyncio.timeout(15):
            while served.server.gate.num_inside < 3:
                await asyncio.sleep(0.005)
        served.stop()
        responses = await asyncio.gather(*streams)
        assert {response.status_code for response in responses} >= {200}
        for response in responses:
            assert "had not ended within 0.2 s (--shutdown-timeout)" in last_error(response)["message"]
            assert last_error(response)["code"] == "shutting_down"
        stuck.release.set()


async def test_a_second_signal_ends_at_once(stuck: Stuck) -> None:
    with serving(max_model_len=64, shutdown_timeout_s=60.0, idle=False) as served:
        stream = await begin_stream(served, stuck)
        served.stop()
        served.stop()
        assert "told to stop at once" in last_error(await stream)["message"]
        stuck.release.set()


def test_a_signal_is_not_lost_while_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []
    monkeypatch.setattr("gc.collect", lambda: handlers.append(signal.getsignal(signal.SIGINT)))
    settings = ServeSettings(served_model_name=MODEL, port=0)
    with bind(settings) as listener:
        engine = AsyncEngine(make_engine(max_model_len=64))
        assert run_server(engine, settings, listener, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert handlers[0] is not signal.default_int_handler, "Python would drop the KeyboardInterrupt"


# ---- a dead engine, a stuck lane ----


def test_a_dead_engine_is_told_in_health_and_to_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_model_len=64, idle=False) as served:
        assert served.complete(**LONG)

        monkeypatch.setattr(CpuExecutor, "launch", Mock(side_effect=RuntimeError("on fire")))
        for _ in range(2):
            response = served.post("/v1/completions", **LONG)
            assert response.status_code == 503
            assert "on fire" in error_of(response)["message"]
        health = served.http.get("/health")
        assert (health.status_code, error_of(health)["code"]) == (503, "engine_dead")
        assert served.metrics()['request_success_total{finished_reason="error"}'] == 1
        assert "on fire" in served.http.get("/live").json()["failure"]


def test_a_stuck_lane_fails_all_requests_and_turns_health_red(stuck: Stuck, caplog: pytest.LogCaptureFixture) -> None:
    with serving(max_model_len=64, max_num_seqs=2, watchdog_timeout_s=0.4, idle=False) as served:
        # More than can run: some wait, and some the engine's thread has not even seen.
        with ThreadPoolExecutor(5) as clients:
            answers = list(clients.map(lambda _: served.post("/v1/completions", **LONG), range(5)))
        assert [answer.status_code for answer in answers] == [503] * 5
        for answer in answers:
            message = error_of(answer)["message"]
            # The second request's prompt may be in the step, or in the one before it, or come too late.
            step = r"decode lane: a (.* decode rows on a device|decode step of [12] rows).* is still being launched"
            assert re.search(rf"made no progress for 0\.4 s \(--watchdog-timeout\): {step}", message)
        assert served.http.get("/health").status_code == 503
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        assert [served.metrics()[name] for name in names] == [0, 0, 0], "a dead engine serves nothing"
        assert "decode lane" in caplog.text
        assert not stuck.release.is_set()
        # What the device was stuck in comes back: the engine ends, and gives its memory back.
        stuck.release.set()
        assert served.engine.shutdown(20)
        assert served.http.get("/health").status_code == 503


def test_a_slow_but_moving_engine_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    before_launch(monkeypatch, lambda *_: time.sleep(0.1))
    with serving(max_model_len=64, watchdog_timeout_s=0.8) as served:
        assert served.complete(prompt=[1], max_tokens=12)
        time.sleep(1.1)  # idle is no lack of progress
        assert served.http.get("/health").status_code == 200


# ---- the start ----


def test_an_address_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be had .*another --port"):
            bind(ServeSettings(served_model_name="x", port=port))
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid:0 cannot be had"):
        bind(ServeSettings(served_model_name="x", port=0, host="no.such.host.invalid"))


@pytest.mark.parametrize("max_model_len", [4, 64])
async def test_the_warm_up_leaves_nothing_behind(max_model_len: int) -> None:
    hurry = {"perf_table": "roofline", "reject_late": 1, "slo": Slo(ttft_ms=1e-6)}
    async with AsyncEngine(make_engine(max_model_len=max_model_len, **hurry)) as engine:
        await warm_up(engine)
        assert engine.stats.kv_blocks_used == 0
        assert (engine.stats.num_steps > 0) == (max_model_len > 4)
        if max_model_len > 4:
            engine.fail("over")
            with pytest.raises(EngineDeadError, match="over"):
                await warm_up(engine)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"port": 65536}, "port must be between 0 and 65535, got 65536"),
        ({"api_key": ""}, "api_key must be printable ASCII"),
        ({"api_key": "\u00fc"}, "api_key must be printable ASCII"),
        ({"api_key": " s3cret"}, "api_key must be printable ASCII characters, .* no space around them"),
        ({"max_queue_len": 0}, "max_queue_len must be an integer of at least 1, got 0"),
        ({"write_timeout_s": 1e6}, "write_timeout_s must be a number of seconds from 0 to 86400"),
        ({"max_body_bytes": 0}, "max_body_bytes must be an integer of at least 1, got 0"),
        ({"request_timeout_s": 0}, "request_timeout_s must be a number of seconds above 0"),
        ({"watchdog_timeout_s": float("nan")}, "watchdog_timeout_s must be"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s must be"),
        ({"shutdown_timeout_s": float("inf")}, "shutdown_timeout_s must be"),
        ({"served_model_name": ""}, "served_model_name must be a name"),
    ],
)
def test_bad_settings(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeSettings(**({"served_model_name": "x"} | setting))  # type: ignore[arg-type]


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(ServeSettings(served_model_name="x", api_key="s3cret"))
