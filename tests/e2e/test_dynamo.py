"""Dynamo's frontend and router, real and on this machine, with two workers of `tiny`; no etcd and no NATS."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from cli_runner import TINY, refused
from click.testing import CliRunner
from engines import Gate, make_engine

from bullet_graph import Engine, EngineDeadError, SamplingParams
from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.engine.block_pool import chained_keys, root_key
from bullet_graph.serve.settings import ServeSettings
from bullet_graph.workloads import load_workload

pytest.importorskip("dynamo.common.backend", reason="needs ai-dynamo: make test-dynamo")

from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

from bullet_graph.dynamo import __main__ as command
from bullet_graph.dynamo.worker import BulletGraphEngine

pytestmark = pytest.mark.timeout(180)

NUM_REQUESTS, SEED = 24, 8
"""Taking turns finds 64 % of what one worker would. Other seeds, which take longer, have 60 to 90 %."""
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def free_port() -> int:
    """A free port below those that the system gives out: Dynamo reads some as 16-bit numbers with a sign."""
    while True:
        port = random.randrange(20_000, 2**15)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Process:
    """A process of Dynamo's, whose output is in ``log``; ``port`` is where it listens."""

    words: list[str]
    env: dict[str, str]
    log: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        words = [word.replace("PORT", str(self.port)) for word in self.words]
        own = {"DYN_SYSTEM_PORT": str(self.port)} if "--model" in words else {}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words], env=self.env | own, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str, label: str = "") -> float:
        """Of a worker: the sum of a metric's values, of those with this label."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and label in line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(30)


@dataclass
class Deployment:
    """Two workers, a frontend whose router knows their prefix caches (``kv``), and one that takes turns (``turns``)."""

    workers: list[Process]
    kv: Process
    turns: Process

    def client(self, frontend: Process) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("dynamo")
    env = os.environ | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.5",
        "DYN_RUNTIME_NUM_WORKER_THREADS": "1",
        "DYN_LOG": "warn",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    worker = ["bullet_graph.dynamo", *TINY[:-4], "--kv-cache-bytes", "128MiB", "--cpu-threads", "1", "--no-warmup"]
    frontend = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", "PORT", "--migration-limit", "3"]
    with ExitStack() as stack:

        def start(name: str, words: list[str]) -> Process:
            process = Process(words, env, folder / f"{name}.log")
            stack.callback(process.stop)
            return process

        workers = [start(f"worker{i}", [*worker, "--max-num-seqs", "16"]) for i in range(2)]
        kv = start("kv", [*frontend, "--router-mode", "kv", "--router-min-initial-workers", "2"])
        made = Deployment(workers, kv, start("turns", [*frontend, "--router-mode", "round-robin"]))
        wait_until_ready(made)
        yield made


def wait_until_ready(deployment: Deployment) -> None:
    """Wait until both frontends have asked both workers."""
    processes = [*deployment.workers, deployment.kv, deployment.turns]
    asked: set[tuple[int, int]] = set()
    deadline = time.monotonic() + 120
    while len(asked) < 4:
        for frontend in (deployment.kv, deployment.turns):
            for process in processes:
                text = process.log.read_text(errors="replace")[-3000:]
                assert process.process.poll() is None, text
                assert time.monotonic() < deadline, text
            try:
                answer = complete(frontend, np.random.default_rng(len(asked)).integers(0, 512, 4).tolist())
                asked.add((frontend.port, worker_of(answer)))
            except (httpx.HTTPError, KeyError):
                time.sleep(0.2)


def complete(frontend: Process, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    nvext = {"extra_fields": ["worker_id"]} | fields.pop("nvext", {})
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "nvext": nvext} | fields
    answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def worker_of(answer: dict[str, Any]) -> int:
    return int(answer["nvext"]["worker_id"]["decode_worker_id"])


# ---- answers ----


def test_a_stream_has_the_tokens_that_the_engine_generates(deployment: Deployment) -> None:
    client = deployment.client(deployment.kv)
    prompt = [5, 17, 300, 8]
    with make_engine() as engine:
        expected = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=20, **GREEDY)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == "length"
    stream = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=20, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *events, last = stream
    assert "".join(event.choices[0].text for event in events) == expected.text
    assert len(events) > 10
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 20)


def test_a_conversation(deployment: Deployment) -> None:
    client = deployment.client(deployment.kv)
    messages = [{"role": "user", "content": "How deep is the sea?"}]
    schema = {"type": "object", "properties": {"m": {"enum": [3, 5]}}, "required": ["m"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "depth", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=60, response_format=form, seed=3, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert "".join(choice.message.content.split()) in ('{"m":3}', '{"m":5}')
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in choice.logprobs.content)


def test_a_wrong_request_says_why(deployment: Deployment) -> None:
    client = deployment.client(deployment.kv)
    with pytest.raises(openai.BadRequestError, match="`n` is not supported by this worker, found 2"):
        client.completions.create(model="tiny", prompt=[1, 2], n=2)


def test_a_client_that_leaves_ends_its_request(deployment: Deployment) -> None:
    def running() -> float:
        return sum(worker.metric("bullet_graph:num_requests_running") for worker in deployment.workers)

    def aborted() -> float:
        return sum(
            worker.metric("bullet_graph:request_success_total", 'finished_reason="abort"')
            for worker in deployment.workers
        )

    before = aborted()
    stream = deployment.client(deployment.kv).completions.create(
        model="tiny", prompt=[1, 2, 3], max_tokens=10_000, stream=True, **GREEDY
    )
    next(iter(stream))
    assert running() == 1
    stream.response.close()
    deadline = time.monotonic() + 20
    while running() or aborted() == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert aborted() == before + 1


# ---- the router ----


def chat_prompts() -> list[list[int]]:
    """Prompts of ``synthetic:chat``, first all first turns, then the second ones, and so on; answers are made up."""
    generator = np.random.default_rng(2)
    systems: dict[int, list[int]] = {}
    prompts: list[list[int]] = []
    turns: list[int] = []
    for request in load_workload("synthetic:chat", num_requests=NUM_REQUESTS, seed=SEED).requests:
        if request.follows is None:
            (system,) = request.prefix_ids
            start = systems.setdefault(system, generator.integers(0, 256, request.prefix_tokens).tolist())
        else:
            start = prompts[request.follows.index]
        turns.append(0 if request.follows is None else turns[request.follows.index] + 1)
        prompts.append([*start, *generator.integers(0, 256, request.prompt_tokens - len(start)).tolist()])
    return [prompts[index] for index in sorted(range(len(prompts)), key=lambda index: (turns[index], index))]


def test_the_router_that_knows_the_prefix_caches_finds_more(deployment: Deployment) -> None:
    prompts = chat_prompts()
    known: set[bytes] = set()
    possible = 0
    for prompt in prompts:
        keys = chained_keys(root_key(), np.array(prompt, dtype=np.int32), KV_BLOCK_TOKENS)
        # The block of the last token is always computed.
        possible += KV_BLOCK_TOKENS * sum(key in known for key in keys[: (len(prompt) - 1) // KV_BLOCK_TOKENS])
        known.update(keys)
    found = {}
    for name, frontend in (("kv", deployment.kv), ("turns", deployment.turns)):
        # A salt keeps what one router has caused from the other.
        answers = [complete(frontend, prompt, nvext={"cache_salt": name}) for prompt in prompts]
        # The other router may give all to one worker: none is ever busy when the next request comes.
        assert frontend is deployment.kv or len({worker_of(answer) for answer in answers}) == 2
        found[name] = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    print(f"cached tokens: {found}, with one worker {possible}, of {sum(map(len, prompts))}")
    assert found["kv"] > 1.2 * found["turns"]
    assert found["kv"] >= 0.9 * possible


def test_load_and_predictions_are_told(deployment: Deployment) -> None:
    for worker in deployment.workers:
        assert worker.metric("dynamo_component_total_blocks", 'dp_rank="0"') > 1000
        text = httpx.get(f"{worker.url}/metrics").text
        assert "bullet_graph:predicted_time_to_first_token_seconds{" in text
        assert 'model_name="tiny"' in text
    deadline = time.monotonic() + 20
    while not 0 < max(worker.metric("dynamo_component_kv_cache_hit_rate") for worker in deployment.workers) < 1:
        assert time.monotonic() < deadline
        complete(deployment.kv, [7] * 64)


# ---- workers that go; last, as none comes back ----


def test_requests_go_on_when_a_worker_is_killed_and_another_is_told_to_stop(deployment: Deployment) -> None:
    killed, other = deployment.workers

    def ask(number: int) -> tuple[str, int]:
        answer = complete(deployment.turns, [number, 1, 2, 3], max_tokens=200, temperature=0)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    def wait_for(worker: Process, number: int) -> None:
        deadline = time.monotonic() + 30
        while worker.metric("bullet_graph:num_requests_running") < number:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with ThreadPoolExecutor(8) as pool:
        before = [pool.submit(ask, i) for i in range(6)]
        for worker in deployment.workers:
            wait_for(worker, 3)
        killed.stop()
        after = [pool.submit(ask, i) for i in range(6)]
        texts = [request.result(60) for request in before]
        assert [tokens for _, tokens in texts] == [200] * 6
        assert [request.result(60) for request in after] == texts
        # Nobody else is there: what is under way must end.
        last = [pool.submit(ask, i) for i in range(3)]
        wait_for(other, 3)
        other.process.send_signal(signal.SIGTERM)
        assert [request.result(60) for request in last] == texts[:3]
    assert other.process.wait(30) == 0
    assert "Traceback" not in other.log.read_text(errors="replace")


# ---- the engine behind the interface, in this process ----


class Context:
    """Dynamo's, as far as the engine looks at it."""

    def id(self) -> str:
        return "context"

    def __init__(self, stopped: bool = False) -> None:
        self.stopped = stopped

    def is_stopped(self) -> bool:
        return self.stopped

    def is_killed(self) -> bool:
        return False


def made(
    open_engine: Callable[[], Engine] = make_engine, *, watchdog_timeout_s: float = 60.0, warmup: bool = True
) -> BulletGraphEngine:
    settings = ServeSettings(served_model_name="tiny", shutdown_timeout_s=0.2, watchdog_timeout_s=watchdog_timeout_s)
    return BulletGraphEngine(open_engine, settings, model_path="", warmup=warmup)


async def chunks_of(
    engine: BulletGraphEngine, max_tokens: int, stopped: bool = False, **fields: Any
) -> list[dict[str, Any]]:
    request = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True}}
    return [chunk async for chunk in engine.generate(request | fields, Context(stopped))]


async def test_errors_are_told_as_dynamo_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made()
    await engine.cleanup()
    assert (await engine.start(1)).llm.kv_cache_block_size == KV_BLOCK_TOKENS
    assert [chunk["token_ids"] for chunk in await chunks_of(engine, 2)][-1]
    with pytest.raises(InvalidArgument, match="top_p must be"):
        await chunks_of(engine, 2, sampling_options={"top_p": 3})
    monkeypatch.setattr(engine._gate, "_max_queue_len", 0)
    with pytest.raises(HttpError, match="--max-queue-len") as refused:
        await chunks_of(engine, 2)
    assert refused.value.code == 429
    await engine.cleanup()
    with pytest.raises(EngineShutdown, match="shut"):
        await chunks_of(engine, 2)
    await engine.cleanup()
    assert (engine.failure, engine.stuck) == (None, False)


async def test_an_abort_or_the_end_of_a_drain_ends_a_request_that_waits_for_its_next_token(gate: Gate) -> None:
    engine = made(warmup=False)
    await engine.start(1)
    task = asyncio.create_task(chunks_of(engine, 100))
    while not (engine._engine and engine._engine.stats.num_steps):
        await asyncio.sleep(0.002)
    await engine.abort(Context())
    assert (await asyncio.wait_for(task, 20))[-1] == {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
    assert await chunks_of(engine, 100, stopped=True) == [], "it was aborted before it came"
    task = asyncio.create_task(chunks_of(engine, 100))
    await asyncio.sleep(0.1)
    cleanup = asyncio.create_task(engine.cleanup())
    with pytest.raises(EngineShutdown, match="--shutdown-timeout"):
        await task
    assert engine._metrics.ends["error"] == 1
    gate.open()
    await cleanup


async def test_a_failed_engine_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, signum: sent.append(signum))
    engine = made(watchdog_timeout_s=0.0005, warmup=False)
    await engine.start(1)
    with pytest.raises(EngineShutdown, match="watchdog-timeout"):
        await chunks_of(engine, 120)
    while not sent:
        await asyncio.sleep(0.01)
    assert sent == [signal.SIGTERM]
    assert isinstance(engine.failure, EngineDeadError)
    await engine.cleanup()


async def test_an_engine_that_cannot_start_says_why() -> None:
    engine = made(lambda: make_engine("nonesuch"))
    with pytest.raises(Exception, match="unknown model"):
        await engine.start(1)
    assert "unknown model" in str(engine.failure)
    await engine.cleanup()
    with pytest.raises(TypeError, match="make a BulletGraphEngine"):
        await BulletGraphEngine.from_args([])


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--endpoint", "a.b"), "Invalid endpoint format"), (("--nonesuch",), "unrecognized arguments: --nonesuch")],
    ids=str,
)
def test_what_dynamos_runtime_refuses_has_exit_code_2(words: tuple[str, ...], message: str) -> None:
    assert message in refused(CliRunner().invoke(command.main, [*TINY, *words]))


def test_the_help_has_the_options_of_dynamos_runtime() -> None:
    shown = CliRunner().invoke(command.main, ["--help"])
    assert shown.exit_code == 0
    assert "--discovery-backend {kubernetes,etcd,file,mem}" in shown.output
    assert "--max-queue-len" in shown.output
