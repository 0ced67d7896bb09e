"""On Ray, real and on this machine: batches with two workers of the tiny model, and Ray Serve with two replicas."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import numpy as np
import psutil
import pytest
from cli_runner import parsed, refused, run

import bullet_graph.ray
from bullet_graph.errors import ConfigError

ray = pytest.importorskip("ray", reason="needs the extra `ray`: pip install 'bullet-graph[ray]'")
serve = pytest.importorskip("ray.serve", reason="needs the extra `ray`: pip install 'bullet-graph[ray]'")
from ray._private import parameter  # noqa: E402
from ray._private.node import Node  # noqa: E402
from ray.serve.request_router import RequestRouter  # noqa: E402

from bullet_graph.ray.batch_files import CHAT, OutputFolder  # noqa: E402
from bullet_graph.ray.job import _Worker, _workers  # noqa: E402
from bullet_graph.ray.replicas import PrefixRouter, Scaler  # noqa: E402
from bullet_graph.ray.serving import _RayForwarder  # noqa: E402

ENGINE = {"device": "cpu", "kv_cache_bytes": 4 << 20, "max_model_len": 512, "cpu_threads": 1, "max_num_seqs": 32}
OPTIONS = (
    "--model",
    "tiny",
    *(word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))),
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Ray on this machine, for all tests of the file."""
    with pytest.MonkeyPatch.context() as patch:
        # Processes that nothing here needs: the dashboard's, watchers of logs and of the cluster's size, the collector
        # of statistics, and workers ahead of work.
        patch.setattr(Node, "start_api_server", lambda *_, **__: None)
        patch.setattr("ray.data._internal.stats.get_or_create_stats_actor", MagicMock)
        patch.setattr(parameter, "RayParams", partial(parameter.RayParams, include_log_monitor=False, no_monitor=True))
        config: dict[str, Any] = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}
        config["enable_metrics_collection"] = False
        # Otherwise 15: beside other tests, a worker would starve, and Ray replace it.
        config["worker_niceness"] = 0
        # More CPUs than there are: a batch takes two, Ray Serve three, and one more while a replica is replaced.
        options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 100 << 20}
        ray.init("local", num_cpus=4, _system_config=config, **options)
        # Both workers of a batch begin together.
        patch.setattr(ray.data.DataContext.get_current(), "wait_for_min_actors_s", 60)
        yield
        ray.shutdown()


def mixed_rows(number: int) -> list[dict[str, Any]]:
    """Rows of all forms; those at 100, 200, … are wrong, each in its own way."""
    rows: list[dict[str, Any]] = []
    for i in range(number):
        body = {"max_tokens": 1 + i % 3, "temperature": 0, "ignore_eos": True}
        chat = {**body, "messages": [{"role": "user", "content": f"Say {i}."}]}
        rows.append(
            [
                {
                    "custom_id": f"completion-{i}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {**body, "prompt": f"{i}, "},
                },
                {"custom_id": f"chat-{i}", "method": "POST", "url": "/v1/chat/completions", "body": chat},
                {**body, "prompt": [1, 2, i % 256]},
                {"custom_id": f"plain-{i}", **chat},
            ][i % 4]
        )
    for at, wrong in (
        (100, {"prompt": "a", "max_tokens": -1}),
        (200, {"prompt": "a", "model": "gpt-4o"}),
        (300, {"prompt": "a", "stream": True}),
    ):
        rows[at] = wrong
    rows[400] |= {"url": "/v1/embeddings"}
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def outputs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "output.jsonl").read_text().splitlines()]


def processes(title: str) -> list[psutil.Process]:
    """Ray's processes here whose titles hold this."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if title in " ".join(each.cmdline()):
                found.append(each)
    return found


def kill_one_worker(folder: Path, num_written: list[int]) -> None:
    """Kill one of two workers when a quarter of the rows are there."""
    while len(list(folder.glob("parts/*"))) < 2:
        time.sleep(0.05)
    workers = processes("MapWorker")
    while (found := sum(part.read_bytes().count(b"\n") for part in folder.glob("parts/*"))) < 125:
        time.sleep(0.01)
    workers[0].kill()
    num_written.append(found)


def in_this_process(table: Any, folder: Path, settings: dict[str, Any], *_: object) -> Iterator[dict[str, Any]]:
    """For `_pass`: one worker, without Ray."""
    yield from asyncio.run(_Worker(str(folder), settings)(table)).to_pylist()


def test_a_worker_dies_and_each_row_is_there_once_and_a_restart_skips_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, folder, num_written = mixed_rows(500), tmp_path / "out", list[int]()
    command = ("batch", "--input", write(tmp_path / "in.jsonl", rows), "--output", str(folder), *OPTIONS, "--json")
    killer = threading.Thread(target=kill_one_worker, args=(folder, num_written))
    killer.start()
    report = parsed(run(*command, "--num-workers", "2"))
    killer.join()
    assert 125 <= num_written[0] < 400
    assert (report["rows"], report["skipped"], report["errors"]) == (500, 0, 4)

    found = outputs(folder)
    assert [row["custom_id"] for row in found] == [row.get("custom_id", f"row-{i}") for i, row in enumerate(rows, 1)]
    for i, (row, output) in enumerate(zip(rows, found, strict=True)):
        if i in (100, 200, 300, 400):
            assert output["response"]["body"] is None
            continue
        assert output["error"] is None, output
        assert output["response"]["body"]["usage"]["completion_tokens"] == row.get("body", row)["max_tokens"]
    errors = [(found[at]["response"]["status_code"], found[at]["error"]["param"]) for at in (100, 200, 300, 400)]
    assert errors == [(400, "max_tokens"), (404, "model"), (400, "stream"), (400, "url")]

    # A run that was stopped leaves rows in part files, the last of them perhaps torn.
    lines = (folder / "output.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "output.jsonl").unlink()
    (folder / "parts" / "a.jsonl").write_bytes(b"".join(lines[:300]))
    (folder / "parts" / "b.jsonl").write_bytes(b"".join(lines[290:490]) + lines[490][:40])
    monkeypatch.setattr("bullet_graph.ray.job._pass", in_this_process)
    report = parsed(run(*command))
    assert (report["rows"], report["skipped"], report["errors"]) == (500, 490, 4)
    again = outputs(folder)
    assert again[:490] == found[:490]
    texts = [[row["response"]["body"]["choices"] for row in each[490:]] for each in (again, found)]
    assert texts[0] == texts[1]

    # With all rows there, nothing starts.
    assert parsed(run(*command))["skipped"] == 500
    with monkeypatch.context() as full:
        full.setattr(OutputFolder, "finish", MagicMock(side_effect=OSError("no room")))
        assert "must take one file of all rows: make room, and repeat: no room" in refused(run(*command))
    assert "differs in dtype" in refused(run(*command, "--dtype", "bfloat16"))
    assert "differs in input" in refused(run(*command[:2], write(tmp_path / "other.jsonl", rows[:9]), *command[3:]))


def test_sigterm_ends_a_batch_in_a_line_and_keeps_what_is_written(tmp_path: Path) -> None:
    rows, folder = [{"prompt": "a", "max_tokens": 100, "ignore_eos": True}] * 500, tmp_path / "out"
    command = ("batch", "--input", write(tmp_path / "in.jsonl", rows), "--output", str(folder), *OPTIONS)
    own = {"stderr": subprocess.PIPE, "text": True, "env": os.environ | {"RAY_ADDRESS": "local"}}
    with subprocess.Popen([sys.executable, "-m", "bullet_graph", *command], **own) as batch:
        while not any(part.stat().st_size for part in folder.glob("parts/*")):
            assert batch.poll() is None
            time.sleep(0.05)
        batch.terminate()
        told = batch.communicate()[1]
    assert (batch.returncode, told.splitlines()[-1], "SIGTERM" in told) == (130, "interrupted", False), told
    assert any(part.stat().st_size for part in folder.glob("parts/*"))


def test_an_engine_that_cannot_start_ends_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bullet_graph.ray.job._pass", in_this_process)
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    model = ("--model", str(tmp_path / "nonesuch"), "--device", "cpu")
    command = ("batch", "--input", source, "--output", str(tmp_path / "out"), *model)
    message = refused(run(*command))
    assert "a worker cannot start its engine" in message
    assert "nonesuch" in message
    monkeypatch.setattr("bullet_graph.ray.job._pass", lambda *_: iter(()))
    assert "the workers wrote none of 1 rows" in refused(run(*command))
    # Ray does not start, or is told to stop meanwhile.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", MagicMock(side_effect=[ConnectionError("nobody there"), SystemExit(15)]))
    assert "Ray must start here, or run at --ray-address, but: nobody there" in refused(run(*command))
    assert run(*command).exit_code == 130


@pytest.fixture(scope="module")
def predictor() -> bullet_graph.ray.BatchPredictor:
    """An engine in this process."""
    return bullet_graph.ray.BatchPredictor("tiny", request={"max_tokens": 5, "ignore_eos": True}, **ENGINE)


async def test_a_predictor_adds_columns_to_a_batch(predictor: bullet_graph.ray.BatchPredictor) -> None:
    found = await predictor({"prompt": np.array(["The sea", "", "The sky"], object)})
    assert found["completion_tokens"].tolist() == [5, 0, 5]
    assert found["finish_reason"].tolist() == ["length", "", "length"]
    assert found["error"][0] == found["generated_text"][1] == ""
    assert "at least" in found["error"][1]
    chats = np.array([[{"role": "user", "content": "Who?", "name": None}]], object)
    assert (await predictor({"messages": chats}))["completion_tokens"].tolist() == [5]


async def test_a_row_with_several_outputs_says_what_to_do(predictor: bullet_graph.ray.BatchPredictor) -> None:
    prompts = np.array([["a", "b"], [[1], [2]], ["a"], [1, 2], ""], object)[:-1]
    found = await predictor({"prompt": prompts})
    assert found["completion_tokens"].tolist() == [0, 0, 5, 5]
    assert all("found 2: give each prompt its own row" in error for error in found["error"][:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(predictor._request, "n", 2)
        assert "leave out `n`" in (await predictor({"prompt": prompts[3:]}))["error"][0]


# ---- Ray Serve ----


async def converse(ask: Callable[[dict[str, Any]], Awaitable[Any]]) -> int:
    """Eight conversations at once, of three turns; the tokens of prompts that were cached."""

    async def one(number: int) -> int:
        said = [{"role": "system", "content": f"You are {number % 4}. " + "Answer briefly and kindly. " * 4}]
        cached = 0
        for turn in range(3):
            said.append({"role": "user", "content": f"Question {turn} of conversation {number}?"})
            found = await ask({"messages": said, "max_tokens": 8, "temperature": 0, "ignore_eos": True})
            cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
            said.append(found["choices"][0]["message"])
        return cached

    return sum(await asyncio.gather(*map(one, range(8))))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two replicas on Ray Serve."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(bullet_graph.ray.app({"model": "tiny", "min_replicas": "2", **ENGINE}), name="tiny", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


async def test_two_replicas_find_the_prefixes_that_one_engine_finds(
    url: str, predictor: bullet_graph.ray.BatchPredictor
) -> None:
    async def ask_alone(body: dict[str, Any]) -> Any:
        return (await predictor._engine.answer({"method": "POST", "url": CHAT, "body": body})).body

    async def ask(body: dict[str, Any]) -> Any:
        return (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()

    alone_cached = await converse(ask_alone)
    assert alone_cached > 1000
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        assert await converse(ask) >= 0.9 * alone_cached


def test_the_app_behind_ray_serve_is_the_servers(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        wrong = client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
        assert client.post("/v1/completions", content=b" " * (1 << 20) + b"{}").status_code == 413
        with client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 8, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 9


def num_running() -> int:
    return serve.status().applications["tiny"].deployments["engine"].replica_states.get("RUNNING", 0)


def test_no_request_fails_while_a_replica_dies_and_is_replaced(url: str) -> None:
    """The harder case than a restart: nobody drains a replica that is killed."""
    statuses, stop = list[int](), threading.Event()

    def ask(number: int) -> None:
        # The first is under way when the replica dies; the others come while it is replaced.
        max_tokens = 400
        with httpx.Client(base_url=url, timeout=300) as client:
            while not stop.is_set():
                request = {"prompt": f"{number}: ", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
                statuses.append(client.post("/v1/completions", json=request).status_code)
                max_tokens = 8
                stop.wait(0.4)

    before = processes("ServeReplica:tiny:engine")
    assert len(before) == 2
    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, number) for number in range(4)]
        try:
            time.sleep(0.3)
            assert not statuses
            before[0].kill()
            while len(now := processes("ServeReplica:tiny:engine")) != 2 or before[0] in now or num_running() != 2:
                time.sleep(0.5)
            num_before = len(statuses)
            while len(statuses) < num_before + 12:
                time.sleep(0.1)
        finally:
            stop.set()
        for each in asking:
            each.result()
    assert before[1] in now
    assert set(statuses) == {200}


# ---- what decides, without replicas ----


@pytest.mark.parametrize(
    ("figures", "wanted"),
    [
        ({}, 3),
        ({"waiting": {"a": 24, "b": 8}, "running": {"a": 10, "b": 10}, "predicted_ttft_ms": {"a": 0, "b": 0}}, 4),
        ({"waiting": {"a": 0, "b": 0}, "running": {"a": 64, "b": 64}, "predicted_ttft_ms": {"a": 900, "b": 2100}}, 6),
        ({"waiting": {"a": 0, "b": 0}, "running": {"a": 20, "b": 20}, "predicted_ttft_ms": {"a": 10, "b": 10}}, 1),
        ({"waiting": {"a": 900, "b": 900}}, 8),
    ],
)
def test_replicas_follow_the_largest_of_queue_ttft_and_use(figures: dict[str, Any], wanted: int) -> None:
    scaler = Scaler(target_queue_len=16, target_ttft_ms=1000, max_num_seqs=100)
    context = SimpleNamespace(aggregated_metrics=figures, current_num_replicas=4, target_num_replicas=3)
    assert scaler(context)[0] == wanted


async def test_requests_with_one_prompt_that_come_together_go_to_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestRouter, "on_send_request", lambda *_: None)
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(slack=2)
    replicas = [SimpleNamespace(replica_id=name) for name in "ab"]

    async def first_choice(key: bytes) -> str:
        request = SimpleNamespace(args=({}, b"", [key]), routing_context=SimpleNamespace())
        return (await router.choose_replicas(replicas, request))[0][0].replica_id

    assert [await first_choice(b"one"), await first_choice(b"one")] == ["a", "a"]
    router.on_send_request("a")
    assert [await first_choice(b"two"), await first_choice(b"one")] == ["b", "a"]
    router.on_send_request("a")
    router.on_send_request("a")
    assert await first_choice(b"one") == "b"
    router.on_request_completed("a", "")
    assert await first_choice(b"one") == "b"


def test_workers_and_replicas_take_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [{"Alive": True, "Resources": {"GPU": float(gpus)}} for gpus in (8, 3)]
    monkeypatch.setattr(ray, "nodes", lambda: [*machines, {"Alive": True, "Resources": {}}])
    assert _workers(None, "auto", 2) == (5, 2)
    assert _workers(3, "cuda", 1) == (3, 1)
    assert _workers(None, "cpu", 2) == (1, 0)
    with pytest.raises(ConfigError, match=r"16 GPUs of one machine .* at most 8"):
        _workers(2, "auto", 16)
    machines.clear()
    assert _workers(2, "auto", 2) == (2, 0)
    for settings, gpus in (({"tensor_parallel_size": 4}, 4), ({"device": "cpu", "tensor_parallel_size": 4}, 0)):
        engines = bullet_graph.ray.deployment("tiny", **settings)._bound_deployment.init_args[0]
        assert engines._bound_deployment.ray_actor_options["num_gpus"] == gpus


def test_an_application_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="model"):
        bullet_graph.ray.app({})
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        bullet_graph.ray.app({"model": "tiny", "max_num_seq": 3})


def test_a_body_is_passed_on_up_to_the_byte_for_which_the_app_refuses_it() -> None:
    parts = iter([{"type": "http.request", "body": b"x" * 8, "more_body": more} for more in (True, True, False)])

    async def receive() -> dict[str, object]:
        return next(parts)

    assert asyncio.run(_RayForwarder(MagicMock(), 10)._body(receive)) == b"x" * 11
