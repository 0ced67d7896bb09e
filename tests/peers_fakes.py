"""Peers that answer with one token after the other: an OpenAI-compatible server, vLLM's and SGLang's interfaces."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest


class CompletionsServer(ThreadingHTTPServer):
    """``/v1/completions`` as server-sent events: a chunk a token, or two, and then their number comes at the end."""

    request_queue_size = 100

    def __init__(self, *, in_pairs: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.in_pairs = in_pairs
        self.bodies: list[dict[str, Any]] = []
        self.refuse: str | None = None
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: CompletionsServer

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: str, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        models = {"data": [{"id": "tiny-served", "max_model_len": 512}]}
        found = {"/v1/models": models, "/version": {"version": "1.2.3"}}.get(self.path)
        self._answer(404 if found is None else 200, json.dumps(found), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.refuse is not None:
            self._answer(400, self.server.refuse, "text/plain")
            return
        assert (body["temperature"], body["ignore_eos"]) == (0, True)
        self._answer(200, "", "text/event-stream")

        def send(choices: list[Any], usage: int | None) -> None:
            told = None if usage is None else {"completion_tokens": usage}
            self.wfile.write(f"data: {json.dumps({'choices': choices, 'usage': told})}\n\n".encode())

        last, pairs = body["max_tokens"], self.server.in_pairs
        for number in [*range(2 if pairs else 1, last, 2 if pairs else 1), last]:
            send([{"text": "x", "finish_reason": "length" if number == last else None}], None if pairs else number)
        send([], last)
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def completions_server(*, in_pairs: bool = False) -> Iterator[CompletionsServer]:
    with CompletionsServer(in_pairs=in_pairs) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(60)


# ---- vLLM ----


class RequestOutputKind(Enum):
    DELTA = 1


FakeSamplingParams = dataclasses.make_dataclass(
    "FakeSamplingParams", ["temperature", "max_tokens", "ignore_eos", "output_kind", "detokenize"]
)
ARGUMENTS = """model load_format generation_config skip_tokenizer_init dtype seed max_model_len max_num_seqs
max_num_batched_tokens gpu_memory_utilization kv_cache_dtype tensor_parallel_size enable_prefix_caching
disable_log_stats enable_log_requests
use_tqdm_on_load scheduler_cls worker_extension_cls additional_config"""
FakeEngineArgs = dataclasses.make_dataclass(
    "FakeEngineArgs", [*ARGUMENTS.split(), ("max_cudagraph_capture_size", int, 512)]
)
"""The arguments that the comparison gives, of vLLM's many."""


class FakeAsyncLLM:
    """vLLM's interface."""

    made: list["FakeAsyncLLM"]

    def __init__(self, args: Any) -> None:
        if args.gpu_memory_utilization > 0.9:
            raise ValueError("Free memory on device is less than desired")
        print("vLLM says hello on stdout")
        self.args = args
        self.request_ids: list[str] = []
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=99, block_size=16),
            scheduler_config=SimpleNamespace(async_scheduling=True),
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=512, cudagraph_mode=RequestOutputKind.DELTA),
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
        for _ in range(params.max_tokens):
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0])])

    def shutdown(self) -> None:
        pass


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
        "vllm.v1.engine.exceptions": {"EngineDeadError": RuntimeError},
        "vllm.inputs": {"tokens_input": lambda ids: {"type": "token", "prompt_token_ids": ids}},
        "vllm.sampling_params": {"SamplingParams": FakeSamplingParams, "RequestOutputKind": RequestOutputKind},
    }
    _install(monkeypatch, contents)
    for name in ("NO_USAGE_STATS", "LOGGING_STREAM", "LOGGING_LEVEL", "WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(f"VLLM_{name}", "")
    return FakeAsyncLLM.made


def _install(monkeypatch: pytest.MonkeyPatch, contents: dict[str, dict[str, Any]]) -> None:
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("bench.peers.peer_process.installed_version", lambda _: "0.24.0")


# ---- SGLang ----

CHOSEN = """mem_fraction_static chunked_prefill_size max_prefill_tokens page_size disable_overlap_schedule
attention_backend sampling_backend moe_runner_backend cuda_graph_config"""
GIVEN = """model_path load_format skip_tokenizer_init incremental_streaming_output dtype kv_cache_dtype random_seed
tp_size context_length max_running_requests disable_radix_cache custom_sigquit_handler log_level enable_pdmux
cuda_graph_max_bs_decode"""
FakeServerArgs = dataclasses.make_dataclass(
    "FakeServerArgs", [(name, object, None) for name in (*CHOSEN.split(), *GIVEN.split())]
)
"""The arguments that the comparison gives or reports, of SGLang's many."""


class FakeSglang:
    """SGLang's ``Engine``. Its scheduler dies at a prompt that begins with token 0 and is ``deadly``."""

    made: list["FakeSglang"]
    deadly = False

    def __init__(self, **arguments: Any) -> None:
        self.server_args: Any = FakeServerArgs(**arguments)
        if self.server_args.max_running_requests > 8:
            raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
        print("SGLang says hello on stdout")
        self.rids: list[str] = []
        self.tokenizer_manager = Mock()
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[{"max_total_num_tokens": 99}] * 2)
        FakeSglang.made.append(self)

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool, rid: str
    ) -> AsyncIterator[Any]:
        assert (stream, sampling_params["temperature"], sampling_params["ignore_eos"]) == (True, 0, True)
        assert len(input_ids) + sampling_params["max_new_tokens"] + 6 <= self.server_args.context_length
        self.rids.append(rid)

        async def outputs() -> AsyncIterator[Any]:
            last = sampling_params["max_new_tokens"]
            if self.deadly:
                # As its watchdog does; what waits gets no more answers.
                os.kill(os.getpid(), signal.SIGQUIT)
                await asyncio.Event().wait()
            if last == 6:
                abort = {"type": "abort", "message": "no room", "status_code": 503}
                yield {"output_ids": [], "meta_info": {"finish_reason": abort}}
                return
            for number in range(1, last + 1):
                await asyncio.sleep(0)
                reason = {"type": "length", "length": last} if number == last else None
                yield {"output_ids": [0], "meta_info": {"finish_reason": reason}}

        return outputs()

    def get_all_child_pids(self) -> list[int]:
        return [4711]


def install_fake_sglang(monkeypatch: pytest.MonkeyPatch) -> tuple[list[FakeSglang], Mock]:
    """Put modules named as SGLang's into place; returns the engines as they are made, and what ends processes."""
    FakeSglang.made = []
    ended = Mock()
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.17"},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.engine": {"Engine": FakeSglang},
        "sglang.srt.server_args": {"ServerArgs": FakeServerArgs},
        "sglang.srt.utils": {"kill_process_tree": ended},
    }
    _install(monkeypatch, contents)
    return FakeSglang.made, ended
