"""Many clients at once: nothing is mixed up, nothing is lost, and who leaves leaves nothing behind."""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress

import aiohttp
import pytest
from engines import before_launch, make_engine
from servers import Served, as_http, serving

from bullet_graph import SamplingParams
from bullet_graph.runtime.step import Placement, Step

pytestmark = pytest.mark.timeout(180)

URL = "/v1/completions"


def session(served: Served) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        served.url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
    )


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, object]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def body(prompt: object, max_tokens: int, **more: object) -> dict[str, object]:
    fixed = {"temperature": 0, "stream": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": max_tokens} | fixed | more


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.005)


async def tokens_of_stream(client: aiohttp.ClientSession, prompt: list[int], max_tokens: int) -> tuple[int, ...]:
    """Each event must bring one token, and the stream must end."""
    ids: list[int] = []
    reason = None
    async with client.post(URL, json=body(prompt, max_tokens)) as response:
        assert response.status == 200, await response.text()
        async for event in events(response):
            (choice,) = event["choices"]  # type: ignore[misc]
            assert len(choice["token_ids"]) == 1
            ids += choice["token_ids"]
            reason = choice["finish_reason"]
    assert reason == "length"
    return tuple(ids)


async def test_a_hundred_streams_at_once_equal_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each prompt, one of which ends sooner."""
    rng = random.Random(5)
    prompts = [[rng.randrange(512) for _ in range(1 + n % 17)] for n in range(50)] * 2
    lengths = [8 - n % 4 for n in range(50)] + [1 + n % 7 for n in range(50)]
    settings = {"max_model_len": 64, "kv_cache_bytes": 16 << 20}
    with make_engine(**settings) as engine:
        params = SamplingParams(temperature=0, max_tokens=8)
        alone = [engine.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts[:50]]
    all_there = threading.Event()
    before_launch(monkeypatch, lambda *_: all_there.wait(60))
    with serving(**settings, max_num_seqs=128) as served:
        async with session(served) as client:
            streams = (tokens_of_stream(client, *each) for each in zip(prompts, lengths, strict=True))
            together = asyncio.gather(*streams)
            await until(lambda: served.server.gate.num_inside == 100)
            all_there.set()
            found = await together
        assert served.engine.stats.kv_blocks_peak >= 100  # they did run together
    assert found == [tokens[:length] for tokens, length in zip(alone * 2, lengths, strict=True)]


async def test_of_two_hundred_requests_a_third_disconnects_midway() -> None:
    rng = random.Random(6)

    async def leave(client: aiohttp.ClientSession, prompt: list[int], after: int) -> None:
        async with client.post(URL, json=body(prompt, 60)) as response:
            assert response.status == 200
            if after:
                num_seen = 0
                async for _ in events(response):
                    num_seen += 1
                    if num_seen == after:
                        break
            response.close()  # the connection too

    async def leave_whole(client: aiohttp.ClientSession, prompt: list[int]) -> None:
        """A client that leaves before its answer, which is no stream, or while it waits for its turn."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.post(URL, json=body(prompt, 60, stream=False))

    # Too few slots and blocks for all: some leave while they wait, others lose their blocks in between.
    with serving(max_model_len=64, max_num_seqs=32, kv_cache_bytes=1 << 20, max_queue_len=1000) as served:
        async with session(served) as client:
            tasks = []
            for n in range(210):
                prompt = [rng.randrange(512) for _ in range(1 + n % 3)]
                if n % 3:
                    tasks.append(tokens_of_stream(client, prompt, 3))
                else:
                    tasks.append(leave_whole(client, prompt) if n % 2 else leave(client, prompt, n % 5))
            stayed = [ids for ids in await asyncio.gather(*tasks) if ids is not None]
        assert [len(ids) for ids in stayed] == [3] * 140
        served.wait_until_idle()
        assert served.engine.stats.kv_blocks_used == 0
        ended = served.metrics()
        assert ended['request_success_total{finished_reason="abort"}'] >= 35
        assert ended['request_success_total{finished_reason="length"}'] >= len(stayed)
        assert ended['request_success_total{finished_reason="error"}'] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_who_leaves_a_request_of_several_prompts_leaves_all_of_them(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    running = threading.Event()

    def slow(step: Step, _: Placement) -> None:
        time.sleep(0.01)
        if step.decode is not None and len(step.decode.slots) == 3:
            running.set()

    before_launch(monkeypatch, slow)
    with serving(max_model_len=512) as served:
        async with session(served) as client:
            request = asyncio.create_task(
                client.post(URL, json=body([[1], [2, 3], [4]], 500, stream=stream, ignore_eos=True))
            )
            assert await asyncio.to_thread(running.wait, 20)
            request.cancel()
            if stream:
                with suppress(asyncio.CancelledError):
                    (await request).close()
        begin_s = time.monotonic()
        served.wait_until_idle()
        assert time.monotonic() - begin_s < 3, "500 tokens would take 5 s"
        assert served.metrics()['request_success_total{finished_reason="abort"}'] == 3


async def test_a_full_queue_is_told_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one sequence running and five that may wait, forty come at once."""
    release = threading.Event()
    with serving(max_model_len=64, max_num_seqs=1, max_queue_len=5) as served:
        before_launch(monkeypatch, lambda *_: release.wait(30))
        # However the test ends, the engine must be able to.
        async with session(served) as client, AsyncExitStack() as stack:
            stack.callback(release.set)
            first = asyncio.create_task(tokens_of_stream(client, [1], 3))
            await until(lambda: served.engine.engine.num_running() > 0)
            refused = []

            async def try_one(n: int) -> tuple[int, ...] | None:
                async with client.post(URL, json=body([n], 3)) as response:
                    if response.status == 200:
                        return tuple([event["choices"][0]["token_ids"][0] async for event in events(response)])  # type: ignore[index]
                    assert response.status == 429
                    assert int(response.headers["Retry-After"]) >= 1
                    refused.append((await response.json())["error"])
                    return None

            others = [asyncio.create_task(try_one(n)) for n in range(40)]
            await until(lambda: len(refused) == 35)
            assert served.metrics()["num_requests_waiting"] == 5
            release.set()
            answers = [answer for answer in await asyncio.gather(*others) if answer is not None]
            assert len(await first) == 3
        assert [len(answer) for answer in answers] == [3] * 5
        assert len(refused) == 35
        assert refused[0]["code"] == "queue_full"
        assert "5 sequences wait already, and at most 5 may (--max-queue-len)" in refused[0]["message"]


async def test_sequences_whose_outputs_nobody_reads_do_not_fill_the_queue() -> None:
    """Two requests of 64 outputs each have come to their end, and lie unread."""
    with serving(max_model_len=64, kv_cache_bytes=16 << 20, max_num_seqs=128, max_queue_len=64) as served:
        async with session(served) as client:
            gate, engine, unread = served.server.gate, served.engine, list[socket.socket]()
            while len(unread) < 2:
                unread.append(served.connect(as_http(body([1], 12, n=64, ignore_eos=True))))
                await until(lambda: gate.num_inside == len(unread) and not gate.num_waiting)
            await until(lambda: not engine.engine.num_running())
            assert served.server.gate.num_inside == 2
            assert await tokens_of_stream(client, [1], 3)
            for connection in unread:
                connection.close()
