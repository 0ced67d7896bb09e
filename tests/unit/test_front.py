"""The front of several engines on one host, before engines that are faked."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Pipe
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock, Mock

import httpx
import pytest
from aiohttp import web

from bullet_graph.cli import replicas
from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError
from bullet_graph.serve.errors import ApiError, shutting_down
from bullet_graph.serve.forward import EngineGoneError
from bullet_graph.serve.front import Front, Replica, front_app
from bullet_graph.serve.settings import ServeSettings


def test_engines_have_room_for_what_the_front_lets_in_and_its_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Mock()
    start = Mock(side_effect=[(connection, Mock()), ConfigError("one is enough here")])
    monkeypatch.setattr(replicas, "start_process", start)
    front = ServeSettings(served_model_name="tiny", max_connections=1, max_headers=2, max_header_bytes=100)
    config = EngineConfig(model="tiny", device="cpu")
    with pytest.raises(ConfigError, match="one is enough"):
        replicas.serve_replicas(2, config, front, Mock(), Mock(), access_log=False, warmup=False)
    behind = connection.send.call_args.args[0].settings
    assert behind.max_connections > front.max_connections + 1000
    # Host, X-Forwarded-For, Content-Length and Content-Type may come on top.
    assert behind.max_headers >= front.max_headers + 4
    assert behind.max_header_bytes >= front.max_header_bytes + 1000


def test_an_engine_that_ends_before_it_has_read_what_to_serve_is_named() -> None:
    ours, theirs = Pipe()
    ours.send("what to serve")
    theirs.close()
    with ours, pytest.raises(ConfigError, match="engine 0 has ended before it listened"):
        replicas._wait_until_ready([ours])


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def healthy(request: web.Request) -> web.Response:
    return web.Response(text="well", headers={"Location": f"http://{request.host}{request.path_qs}"})


def refusing(error: ApiError) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        headers = {"X-Request-Id": "engine's"}
        return web.Response(status=error.status, body=error.json(), content_type="application/json", headers=headers)

    return answer


@asynccontextmanager
async def front_of(folder: Path, engines: Sequence[tuple[Answer, Answer]]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the front of engines, which are given as what answers completions, and /health."""
    async with AsyncExitStack() as stack:
        replicas = []
        for number, (complete, health) in enumerate(engines):
            app = web.Application()
            app.add_routes([web.post("/v1/completions", complete), web.get("/health", health)])
            runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            replicas.append(Replica(number, Mock(poll=lambda: None), str(folder / f"{number}.sock")))
            await web.UnixSite(runner, replicas[-1].path).start()
        app = front_app(Front(replicas), ServeSettings(served_model_name="tiny"))
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app)
        yield await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))


async def test_a_dead_engine_in_a_living_process_gets_no_more_requests(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def dead(request: web.Request) -> web.StreamResponse:
        asked.append(await request.read())
        return await refusing(ApiError(503, "the device failed", code="engine_dead"))(request)

    async def health(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if asked else 200)

    async with front_of(tmp_path, [(dead, health), (healthy, healthy)]) as client:
        url = f"http://localhost:81/v1/completions?{'q' * 8170}"
        answers = [await client.post(url, headers={"Host": host}) for host in ("localhost:1", *[""] * 4)]
    told = [(answer.status_code, answer.text, answer.headers["Location"]) for answer in answers]
    assert (len(asked), told) == (1, [(200, "well", name) for name in (url.replace(":81/", ":1/"), *[url] * 4)])


async def test_a_full_engine_s_request_goes_to_another_that_has_room(tmp_path: Path) -> None:
    full = refusing(ApiError(429, "too many wait", code="queue_full"))
    for engines, told in (([full, healthy], 200), ([full, full], 429), ([full], 429)):
        async with front_of(tmp_path, [(engine, healthy) for engine in engines]) as client:
            assert [(await client.post("/v1/completions")).status_code for _ in range(3)] == [told] * 3


async def test_other_refusals_are_passed_on_and_own_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusal = shutting_down()
    caplog.set_level(logging.INFO, logger="bullet_graph.serve.access_log")
    async with front_of(tmp_path, [(refusing(refusal), healthy)]) as client:
        answers = [await client.post("/v1/completions") for _ in range(2)]
        assert (await client.get("/live?replica=all")).status_code == 404
        own = await client.post("/v1/completions", headers={"Host": "evil.example"})
    assert [(answer.status_code, answer.content) for answer in answers] == [(503, refusal.json())] * 2
    assert [answer.headers["X-Request-Id"] for answer in answers] == ["engine's"] * 2
    (line,) = [record.getMessage() for record in caplog.records if " /v1/completions 403 " in record.getMessage()]
    assert line.endswith(own.headers["X-Request-Id"])


async def test_what_waits_for_an_engine_that_hangs_goes_to_another_or_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bullet_graph.serve.front._CHECK_TIMEOUT_S", 0.5)
    monkeypatch.setattr("bullet_graph.serve.front._CHECK_INTERVAL_S", 0.05)
    asked: list[bytes] = []

    async def hung(request: web.Request) -> web.StreamResponse:
        asked.append(await request.read())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if asked[-1] == b"stream":
            await response.prepare(request)
            await response.write(b"data: {}\n\n")
        await asyncio.Event().wait()
        return response

    async def health(request: web.Request) -> web.StreamResponse:
        return await (hung if asked else healthy)(request)

    async with front_of(tmp_path, [(hung, health), (hung, health), (healthy, healthy)]) as client:
        posts = [client.post("/v1/completions", content=content) for content in (b"stream", b"whole", b"x", b"y")]
        stream, *others = await asyncio.wait_for(asyncio.gather(*posts), 10)
    assert stream.text.startswith("data: {}\n\n")
    assert '"engine_gone"' in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")
    assert [answer.text for answer in others] == ["well"] * 3
    assert {b"stream", b"whole"} <= set(asked)


async def test_an_engine_that_answers_again_is_alive_and_a_request_inside_until_its_answer_ends() -> None:
    replica = MagicMock(number=0, num_running=0, get=AsyncMock(side_effect=[None, b"well"]))
    front = Front([replica])
    for is_alive in (False, True):
        await front._check(replica)
        assert bool(front.alive) is is_alive
    replica.ask.return_value = AsyncMock(**{"__aiter__.return_value": [{}]})
    found = [front.num_inside async for _ in front.answer({"method": "POST"}, b"", [])]
    assert (found, front.num_inside) == ([1], 0)


def test_what_a_lost_engine_held_is_forgotten() -> None:
    front = Front([Replica(number, Mock(poll=lambda: None), "") for number in range(2)])
    front._holders.add([b"key"], 0)
    front._lost(front.replicas[0])
    assert front._holders.choose([b"key"], 1, lambda _: 0, 16) == (1, 0)


async def test_a_second_check_leaves_alone_what_the_first_one_ends() -> None:
    replica = Replica(0, Mock(), "", _session=Mock(get=Mock(side_effect=TimeoutError)))

    async def ask() -> None:
        async with replica._asked():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.1)

    asked = asyncio.create_task(ask())
    for _ in range(2):
        await asyncio.sleep(0.02)
        assert await replica.get("/health") is None
    with pytest.raises(EngineGoneError):
        await asked
