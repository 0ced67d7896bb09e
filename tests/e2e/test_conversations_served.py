"""Conversations on the CPU: prompts of later turns hold the tokens that were generated, in process and over HTTP."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_runner import TINY, printed, run
from engines import make_engine
from peers_fakes import completions_server
from servers import serving

from bullet_graph import OutputKind
from bullet_graph.engine.replay import Replay, TimedRequest, replay, replay_async, timed_requests
from bullet_graph.models.presets import PRESETS
from bullet_graph.serve.client import OpenAiServer
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Workload, WorkloadRequest
from bullet_graph.workloads.workload import TurnBefore

THINK_S = 0.05
WORKLOAD = Workload(
    "chat",
    (
        WorkloadRequest(20, 4, None, None, (0,), 16),
        WorkloadRequest(30, 5, None, follows=TurnBefore(0, 24, THINK_S)),
        WorkloadRequest(41, 3, None, follows=TurnBefore(1, 35, THINK_S)),
        WorkloadRequest(18, 2, None, None, (0,), 16),
        WorkloadRequest(25, 6, None, follows=TurnBefore(3, 20, THINK_S)),
    ),
)


def requests() -> list[TimedRequest]:
    return timed_requests(WORKLOAD, [0.0] * 5, vocab_size=PRESETS["tiny"].vocab_size, slo=NO_TARGETS, seed=2)


def expected_prompts() -> list[list[int]]:
    """Each turn generated on its own, one after the other."""
    prompts: list[list[int]] = []
    outputs: list[tuple[int, ...]] = []
    with make_engine() as engine:
        for request, one in zip(WORKLOAD.requests, requests(), strict=True):
            before = request.follows
            start = [] if before is None else [*prompts[before.index], *outputs[before.index]]
            prompts.append([*start, *one.prompt_token_ids])
            outputs.append(engine.generate([prompts[-1]], one.params)[0].outputs[0].token_ids)
    assert prompts[0][:16] == prompts[3][:16]
    return prompts


def assert_served(replayed: Replay) -> None:
    assert [row.error for row in replayed.served] == [None] * 5
    assert [row.input_tokens for row in replayed.served] == [20, 30, 41, 18, 25]
    for request, row in zip(WORKLOAD.requests, replayed.served, strict=True):
        if request.follows is not None:
            assert row.metrics.arrival_s >= replayed.served[request.follows.index].metrics.token_times_s[-1] + THINK_S


def test_an_engine_gets_its_own_tokens_back() -> None:
    with make_engine() as engine:
        sent: dict[str, Any] = {}
        add = engine.add_request

        def note(request_id: str, prompt: Any, *args: Any, output_kind: OutputKind, **options: Any) -> None:
            sent[request_id] = prompt
            add(request_id, prompt, *args, output_kind=output_kind, **options)

        engine.add_request = note  # type: ignore[assignment, method-assign]
        assert_served(replay(engine, requests()))
    assert [list(sent[str(index)]) for index in range(5)] == expected_prompts()


def served_by(url: str) -> tuple[Replay, list[list[int]]]:
    """What a client had of a server, and the prompts that it sent."""
    sent: list[list[int]] = []

    async def converse() -> Replay:
        server = await OpenAiServer.connect(url.replace("//", "//me:pass@"))
        assert server.settings["url"] == url.replace("//", "//***@")

        async def generate(request: TimedRequest) -> Any:
            sent.append(list(request.prompt_token_ids))
            async for tokens in server.generate(request):
                yield tokens

        try:
            return await replay_async(generate, requests())
        finally:
            await server.close()

    return asyncio.run(converse()), sent


def test_a_client_sends_the_tokens_that_the_server_gave() -> None:
    with serving(max_model_len=128) as served:
        replayed, sent = served_by(f"{served.url}/v1")
    assert_served(replayed)
    assert sorted(sent) == sorted(expected_prompts())


def test_a_server_that_gives_no_token_ids_is_told_apart() -> None:
    with completions_server() as other:
        replayed, _ = served_by(other.url)
    errors = [row.error or "" for row in replayed.served]
    assert "the next turn needs the ids of 1 tokens, the server gave 0" in errors[0]
    assert errors[1] == "the turn before it in the conversation failed"
    assert all(body["return_token_ids"] for body in other.bodies)


@pytest.mark.parametrize("command", ["simulate", "online"])
def test_results_tell_how_many_tokens_could_be_shared(command: str, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 10 * i, "input_length": 600 + i, "output_length": 2, "hash_ids": [7, 8 + i]} for i in range(3)
    ]
    trace = tmp_path / "m.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    fixed = ("--trace", str(trace), "--request-rate", "trace", "--json")
    if command == "simulate":
        found = printed(run("simulate", *fixed))
    else:
        found = printed(run("bench", "online", *[*TINY[:-1], "1024", "--num-warmups", "1"], *fixed))
    assert (found["completed"], found["total_input_tokens"]) == (3, 1803)
    assert found["shareable_prompt_tokens"] == 2 * 512
