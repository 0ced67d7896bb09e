"""Peers that are this engine in disguise: behind an OpenAI-compatible server, and behind vLLM's interface."""

import asyncio
import dataclasses
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
from aiohttp import web
from engines import make_engine

from bullet_graph import AsyncEngine, OutputKind, SamplingParams

Telling = Literal["each", "end", "pairs"]
"""Whether the server tells its usage with each chunk, at the end, or at the end but packs two tokens into a chunk."""


class CompletionsServer:
    """``/v1/completions`` as server-sent events, from a thread with an event loop of its own."""

    def __init__(self, telling: Telling) -> None:
        self.telling = telling
        self.bodies: list[dict[str, Any]] = []
        self.refuse: str | None = None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._serve()), daemon=True
        )
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with AsyncEngine(make_engine(max_model_len=512, policy="mixed")) as self._engine:
            app = web.Application()
            app.router.add_get("/v1/models", self._models)
            app.router.add_get("/version", self._version)
            app.router.add_post("/v1/completions", self._complete)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny-served", "max_model_len": 512}]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.3"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refuse is not None:
            return web.Response(status=400, text=self.refuse)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(choices: list[Any], usage: int | None) -> None:
            told = None if usage is None else {"completion_tokens": usage}
            data = web.json_response({"choices": choices, "usage": told}).text
            await response.write(f"data: {data}\n\n".encode())

        params = SamplingParams(
            max_tokens=body["max_tokens"], temperature=body["temperature"], ignore_eos=body["ignore_eos"]
        )
        total = unsent = 0
        async for output in self._engine.generate(body["prompt"], params, output_kind=OutputKind.DELTA):
            total += len(output.outputs[0].token_ids)
            unsent += 1
            if self.telling != "pairs" or unsent == 2 or output.finished:
                reason = "length" if output.finished else None
                choice = {"text": "x" * unsent, "finish_reason": reason}
                await send([choice], total if self.telling == "each" else None)
                unsent = 0
        await send([], total)
        await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def completions_server(telling: Telling = "each") -> Iterator[CompletionsServer]:
    server = CompletionsServer(telling)
    try:
        yield server
    finally:
        server.close()


# ---- vLLM ----


class RequestOutputKind(Enum):
    DELTA = 1


FakeSamplingParams = dataclasses.make_dataclass(
    "FakeSamplingParams", ["temperature", "max_tokens", "ignore_eos", "output_kind", "detokenize"]
)
FakeEngineArgs = dataclasses.make_dataclass(
    "FakeEngineArgs",
    [
        *(
            "model",
            "load_format",
            "generation_config",
            "skip_tokenizer_init",
            "dtype",
            "seed",
            "max_model_len",
        ),
        *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enable_prefix_caching"),
        *(
            "disable_log_stats",
            "enable_log_requests",
            "use_tqdm_on_load",
            "scheduler_cls",
            "additional_config",
        ),
        ("max_cudagraph_capture_size", int, 512),
    ],
)
"""The arguments that the comparison gives, of vLLM's many."""


class DeadError(Exception):
    pass


class FakeAsyncLLM:
    """vLLM's interface, this engine behind it."""

    made: list["FakeAsyncLLM"]

    def __init__(self, args: Any) -> None:
        if args.gpu_memory_utilization > 0.9:
            raise ValueError("Free memory on device is less than desired")
        print("vLLM says hello on stdout")
        self.args = args
        self.is_dead = False
        self.request_ids: list[str] = []
        self._engine = AsyncEngine(make_engine(max_model_len=args.max_model_len, policy="mixed"))
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=99, block_size=16),
            scheduler_config=SimpleNamespace(async_scheduling=True),
            compilation_config=SimpleNamespace(
                max_cudagraph_capture_size=512, cudagraph_mode=RequestOutputKind.DELTA
            ),
            attention_config=SimpleNamespace(backend=None),
            optimization_level=2,
        )
        FakeAsyncLLM.made.append(self)

    @classmethod
    def from_engine_args(cls, args: Any) -> "FakeAsyncLLM":
        return cls(args)

    async def generate(self, prompt: dict[str, Any], params: Any, request_id: str) -> AsyncIterator[Any]:
        assert prompt["type"] == "token"
        assert (params.output_kind, params.detokenize) == (RequestOutputKind.DELTA, False)
        self.request_ids.append(request_id)
        if self.is_dead:
            raise DeadError("EngineCore encountered an issue")
        own = SamplingParams(
            temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos
        )
        async for output in self._engine.generate(
            prompt["prompt_token_ids"], own, output_kind=OutputKind.DELTA
        ):
            yield output

    def shutdown(self) -> None:
        self._engine.shutdown()


def install_fake_vllm(monkeypatch: pytest.MonkeyPatch) -> list[FakeAsyncLLM]:
    """Put modules named as vLLM's into place; returns the engines made, as they are made."""
    FakeAsyncLLM.made = []
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.26.0"},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": FakeEngineArgs},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FakeAsyncLLM},
        "vllm.v1.engine.exceptions": {"EngineDeadError": DeadError},
        "vllm.inputs": {"tokens_input": lambda ids: {"type": "token", "prompt_token_ids": ids}},
        "vllm.sampling_params": {
            "SamplingParams": FakeSamplingParams,
            "RequestOutputKind": RequestOutputKind,
        },
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("NO_USAGE_STATS", "LOGGING_STREAM", "LOGGING_LEVEL", "WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(f"VLLM_{name}", "")
    monkeypatch.setattr("bench.peers.vllm_system.installed_version", lambda _: "0.24.0")
    return FakeAsyncLLM.made
